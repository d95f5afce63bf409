"""The hostfile of the `deepspeed` launcher, and which of its slots `--include`, `--exclude` and the like leave.

::

    # a comment
    worker-0 slots=4
    worker-1 slots=4 zone=eu-west-1a

`zone=` is ours and may be left out; DeepSpeed reads over it. `--include worker-0@worker-1:0,2` is all slots of worker-0
and two of worker-1; `--exclude` has the same form.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bamboo_ds.errors import ConfigError

__all__ = ["LOCAL_HOST", "Host", "parse_hostfile", "read_hostfile", "select", "this_machine"]

LOCAL_HOST = "localhost"
"""The name by which `--include` and `--exclude` know this machine where there is no hostfile."""

_LINE = re.compile(r"(\S+)\s+slots=(\d+)(\s.*)?")  # MPI's hostfiles say more, such as max_slots=4
_ZONE = re.compile(r"\szone=(\S+)")
_LIST_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: the numbers of the slots (accelerators) to use, and its zone ("" if nothing names it)."""

    slots: tuple[int, ...]
    zone: str = ""


Hosts = dict[str, Host]
"""By name, in the order of the hostfile."""


def read_hostfile(path: Path) -> Hosts:
    """Return the hosts of a hostfile with all their slots.

    Raises:
        ConfigError: there is no such file, or a line of it is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path}: cannot read it: {getattr(error, 'strerror', None) or error}") from None
    return parse_hostfile(text, name=str(path))


def parse_hostfile(text: str, *, name: str) -> Hosts:
    """Return the hosts of a hostfile's text; `name` is that of the file, for messages.

    Raises:
        ConfigError: a line is wrong, a host occurs twice, or there is none.
    """
    hosts: Hosts = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f'--hostfile {name}:{number}: "{line}" must be such as "worker-0 slots=4"')
        host, slots, zone = match[1], int(match[2]), _ZONE.search(match[3] or "")
        if slots < 1:
            raise ConfigError(f"--hostfile {name}:{number}: {host} has no slot; give it one, or drop the line")
        if host in hosts:
            raise ConfigError(f"--hostfile {name}:{number}: {host} occurs twice; keep one line with all its slots")
        hosts[host] = Host(tuple(range(slots)), zone[1] if zone else "")
    if not hosts:
        raise ConfigError(f'--hostfile {name}: names no host; write one line per host, such as "worker-0 slots=4"')
    return hosts


def select(
    hosts: Mapping[str, Host],
    *,
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> Hosts:
    """Return the hosts and slots that the flags leave, in the order of `hosts`.

    Args:
        hosts: all there are.
        include: of `--include`: these and no others.
        exclude: of `--exclude`: all but these.
        num_nodes: the first so many hosts.
        num_gpus: the first so many slots of each.

    Raises:
        ConfigError: flags exclude each other, name what is not there, or leave nothing.
    """
    _refuse_contradictions(include, exclude, num_nodes, num_gpus)
    if include:
        named = _named(hosts, include, flag="--include")
        return {name: replace(hosts[name], slots=named[name]) for name in hosts if name in named}
    if exclude:
        named = _named(hosts, exclude, flag="--exclude")
        left = {name: tuple(sorted({*host.slots}.difference(named.get(name, ())))) for name, host in hosts.items()}
        if not any(left.values()):
            raise ConfigError(f"--exclude {exclude}: leaves no slot at all; exclude less")
        return {name: replace(hosts[name], slots=slots) for name, slots in left.items() if slots}
    return _first(hosts, num_nodes, num_gpus)


def this_machine(*, accelerators: int | None = None) -> Host:
    """Return this machine: as many slots as it has accelerators, found without torch; one if it has none.

    Args:
        accelerators: their number, if it is known; else CUDA_VISIBLE_DEVICES says it, else `nvidia-smi`.
    """
    found = _visible_accelerators() if accelerators is None else accelerators
    return Host(tuple(range(max(found, 1))))


def _visible_accelerators() -> int:
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return next((index for index, name in enumerate(names) if name in ("", "-1")), len(names))
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_LIST_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def _refuse_contradictions(include: str, exclude: str, num_nodes: int | None, num_gpus: int | None) -> None:
    if include and exclude:
        raise ConfigError(f"--include {include} and --exclude {exclude} are both given; keep one")
    for flag, number in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if number is not None and (include or exclude):
            chosen = f"--include {include}" if include else f"--exclude {exclude}"
            raise ConfigError(f"{flag} {number} and {chosen} are both given; keep one")


def _first(hosts: Mapping[str, Host], num_nodes: int | None, num_gpus: int | None) -> Hosts:
    if num_nodes is not None and num_nodes > len(hosts):
        raise ConfigError(f"--num_nodes {num_nodes}: there are only {len(hosts)} hosts: {', '.join(hosts)}")
    chosen = dict(list(hosts.items())[:num_nodes])
    for name, host in chosen.items():
        if num_gpus is not None and num_gpus > len(host.slots):
            raise ConfigError(f"--num_gpus {num_gpus}: {name} has only {len(host.slots)} slot(s)")
    return {name: replace(host, slots=host.slots[:num_gpus]) for name, host in chosen.items()}


def _named(hosts: Mapping[str, Host], text: str, *, flag: str) -> dict[str, tuple[int, ...]]:
    """Return the slots that `HOST[:SLOT[,SLOT...]][@...]` names."""
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in hosts:
            raise ConfigError(f'{flag} {text}: no host "{name}"; there are: {", ".join(hosts)}')
        there = hosts[name].slots
        slots = _numbers(numbers, text=text, flag=flag) if colon else there
        for slot in slots:
            if slot not in there:
                raise ConfigError(f"{flag} {text}: {name} has no slot {slot}; it has: {', '.join(map(str, there))}")
        named[name] = tuple(sorted({*named.get(name, ()), *slots}))
    return named


def _numbers(numbers: str, *, text: str, flag: str) -> tuple[int, ...]:
    parts = [part.strip() for part in numbers.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ConfigError(f'{flag} {text}: "{numbers}" must be numbers of slots, such as 0,2')
    return tuple(map(int, parts))
