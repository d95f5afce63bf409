"""Ends an agent that was started over ssh when the launcher that started it is gone.

ssh tells the far side nothing when its own side is killed, but that its stdin has ended. So the launcher keeps the
agent's stdin open, and this process reads it: at its end, however that came about, the agent gets SIGTERM. The agent
runs in a child, as it wants a process without other threads.

The first line of stdin is a JSON object of variables for the environment: passwords, which must not stand on a command
line that everyone on the machine can read.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import typer

from bamboo_ds.elastic.forking import forget_parent, fork, signal_at_parents_death
from bamboo_ds.errors import BambooError, ConfigError

__all__ = ["on_leash"]

_LINE_LIMIT = 1 << 20
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def on_leash(run: Callable[[], int], *, stdin: int = 0, grace_seconds: float = 15.0) -> int:
    """Run an agent in a child of this process until it ends or stdin does, and return its exit code.

    Args:
        run: the agent.
        stdin: file descriptor to read.
        grace_seconds: in which the agent ends its workers in order, then itself; after that it is killed.

    Raises:
        ConfigError: the first line of stdin is no JSON object.
    """
    _take_variables(stdin)
    parent = os.getpid()
    child = fork(lambda: _be_agent(run, parent, stdin))
    for number in _FORWARDED:
        signal.signal(number, lambda *_: _end(child))
    return _hold(child, stdin, grace_seconds)


def _take_variables(stdin: int) -> None:
    line = bytearray()
    while len(line) < _LINE_LIMIT and (byte := os.read(stdin, 1)) not in (b"", b"\n"):
        line += byte
    try:
        variables = json.loads(line)
        os.environ.update({str(name): str(value) for name, value in variables.items()})
    except (ValueError, AttributeError):
        raise ConfigError("--leash: the first line of stdin must be a JSON object of variables") from None


def _be_agent(run: Callable[[], int], parent: int, stdin: int) -> NoReturn:
    """Run the agent and end this process, without the exit handlers that belong to the parent."""
    forget_parent()
    signal_at_parents_death(signal.SIGTERM, parent=parent)
    os.dup2(os.open(os.devnull, os.O_RDONLY), stdin)
    try:
        code = run()
    except BambooError as error:
        typer.echo(f"bamboo-ds run: {error}", err=True)
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _hold(child: int, stdin: int, grace_seconds: float) -> int:
    """Wait for the child's end; tell it to end when stdin ends, and kill it when it does not."""
    process = os.pidfd_open(child)
    watched = [process, stdin]
    deadline: float | None = None
    while True:
        patience = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        ready, _, _ = select.select(watched, [], [], patience)
        if process in ready:
            os.close(process)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return code if code >= 0 else 128 - code
        if not ready:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            deadline = None
        elif not os.read(stdin, 4096):
            watched, deadline = [process], time.monotonic() + grace_seconds
            _end(child)


def _end(child: int) -> None:
    os.kill(child, signal.SIGTERM)  # not reaped before _hold returns: it is still ours
