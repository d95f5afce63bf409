"""What a node of a local cluster runs: the fork that becomes its agent, and the program in the forks of its workers."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from bamboo_ds.elastic import forking
from bamboo_ds.elastic.agent import Agent
from bamboo_ds.elastic.agent_settings import AgentSettings
from bamboo_ds.elastic.membership import Membership
from bamboo_ds.elastic.namespaces import enter_own_network
from bamboo_ds.elastic.spawner import Script
from bamboo_ds.errors import BambooError, ConfigError

__all__ = ["RESULTS", "Gate", "be_agent", "run_and_keep", "run_script"]

RESULTS = "result-*.pickle"
_WRONG_INPUT = 2
_ENTERED, _LINKED, _NO_LINK = b"e", b"l", b"n"
_GATE_SECONDS = 10.0


class Gate:
    """Holds up a fork until its parent has given its new network a link."""

    def __init__(self) -> None:
        self._parent, self._child = socket.socketpair()

    def pass_through(self) -> None:
        """In the child: enter a network of its own and wait for the link.

        Raises:
            ConfigError: it must not, or gets no link; the parent says why.
        """
        self._parent.close()
        enter_own_network()
        self._child.send(_ENTERED)
        if self._child.recv(1) != _LINKED:
            raise ConfigError("its network got no link")
        self._child.close()

    def await_child(self) -> None:
        """In the parent: wait until the child is in its network.

        Raises:
            ConfigError: it does not say so.
        """
        self._child.close()
        self._parent.settimeout(_GATE_SECONDS)
        try:
            entered = self._parent.recv(1)
        except TimeoutError:
            entered = b""
        if entered != _ENTERED:
            raise ConfigError("a node could not enter a network of its own")

    def open(self, *, linked: bool) -> None:
        """In the parent: let the child go on, or end if it has got no link."""
        with contextlib.suppress(OSError):
            self._parent.send(_LINKED if linked else _NO_LINK)
        self._parent.close()


def be_agent(settings: AgentSettings, *, launcher: int, temporary_folder: Path, gate: Gate | None) -> NoReturn:
    """Be the agent of a node, in a fresh fork.

    Args:
        settings: what it must know.
        launcher: id of the parent process; the agent dies with it.
        temporary_folder: for all temporary files of the node.
        gate: to a network of its own; None if it has none.
    """
    forking.forget_parent()
    os.setsid()  # Ctrl-C is for the launcher
    forking.signal_at_parents_death(signal.SIGKILL, parent=launcher)
    forking.replace_streams()
    os.environ["TMPDIR"] = str(temporary_folder)
    tempfile.tempdir = None
    try:
        if gate is not None:
            gate.pass_through()
        code = Agent(settings).run()
    except BambooError as error:
        os.write(2, f"bamboo: node {settings.node}: {error}\n".encode())
        code = _WRONG_INPUT
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_script(script: Script) -> NoReturn:
    """Run a script in this process, and end it, as `python -m bamboo_ds` would."""
    from bamboo_ds.__main__ import main

    sys.path[0] = os.getcwd()
    arguments = [*(["-m"] if script.as_module else []), *script.argv]
    forking.run_as_script(lambda: main(arguments), finalize=True)


def run_and_keep(program: Callable[[], Any], folder: Path) -> None:
    """Run a callable and keep its value in a file, whole or not at all."""
    value = pickle.dumps(program())
    membership = Membership.read()
    assert membership is not None, "the agent has put it into the environment"
    path = folder / RESULTS.replace("*", str(membership.worker))
    draft = path.with_suffix(".draft")
    draft.write_bytes(value)
    draft.replace(path)
