"""`python -m bamboo_ds script.py ...`: run an unmodified DeepSpeed script with Bamboo."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from bamboo_ds.errors import ConfigError

_USAGE = "usage: python -m bamboo_ds [-m] SCRIPT_OR_MODULE [ARGUMENT ...]"


def main(arguments: list[str]) -> None:
    """Patch DeepSpeed and run a script (or, after `-m`, a module) as `__main__`."""
    # DeepSpeed's launcher puts --local_rank before the script; the script expects it among its own arguments.
    ranks = [argument for argument in arguments[:1] if argument.startswith("--local_rank")]
    rest = arguments[len(ranks) :]
    as_module = rest[:1] == ["-m"]
    rest = rest[1:] if as_module else rest
    if not rest or rest[0].startswith("-"):
        raise SystemExit(_USAGE)
    from bamboo_ds.patching import patch

    patch()
    sys.argv = [rest[0], *ranks, *rest[1:]]
    if as_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if not Path(rest[0]).is_file():
        raise ConfigError(f"no such script: {rest[0]}")
    sys.path[0] = str(Path(rest[0]).resolve().parent)
    runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
