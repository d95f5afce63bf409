"""`bamboo-ds bench`: measure what the project promises, on this machine, against one process and stock DeepSpeed.

Every command prints one JSON object as its last line, with `ok`, and exits 1 when not ok.
"""

from __future__ import annotations

import typer

from bamboo_ds.cli.bench.leak import leak
from bamboo_ds.cli.bench.overhead import overhead
from bamboo_ds.cli.bench.parity import parity

bench = typer.Typer(no_args_is_help=True, help="Measure parity, overhead and leaks on this machine.")
bench.command()(parity)
bench.command()(overhead)
bench.command()(leak)

__all__ = ["bench"]
