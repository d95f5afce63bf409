"""Network namespaces: nodes on one machine, each with a network link that can be cut.

::

    launcher's own network           holder's network                  node's network (one for each node)
    etcd at .1 -- <name>  ========== up0 -- bridge -- port0 ========== bamboo0 at .2, .3, ...
                                            |  `---- port1 ========== ...

No namespace has a name and each lives as long as its processes; with the last one the kernel removes its devices, and
with a device the other end of its cable. So the bridge is not in the launcher's network but in that of a *holder*, a
process that dies with the launcher: whatever is killed, nothing is left of all this.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import NoReturn

from bamboo_ds.elastic import forking
from bamboo_ds.errors import ConfigError

__all__ = ["Network", "check_own_link", "cut_own_link", "enter_own_network"]

_LINK = "bamboo0"
_CLONE_NEWNET = 0x40000000
_COMMAND_SECONDS = 20
_LAST_INDEX = 252  # has the address .254
_NETWORKS = [f"198.{second}.{third}" for second in (18, 19) for third in range(256)]
"""Set aside for tests of network devices (RFC 2544): no real host is there."""


def enter_own_network() -> None:
    """Move this process, which must have one thread, to a new network of its own, which has no link yet.

    Raises:
        ConfigError: it must not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(f"cannot make a network namespace ({reason}): run as root, or without namespaces")


def check_own_link() -> None:
    """Check that this process is in a network with a link that can be cut.

    Raises:
        ConfigError: it is not in a namespace of ours.
    """
    if _LINK not in {name for _, name in socket.if_nameindex()}:
        raise ConfigError(
            f"cut: this node has no link {_LINK} to take down, as it is not in a network namespace of "
            "`bamboo-ds run --local-nodes N --namespaces`; use kill, term or stop"
        )


def cut_own_link() -> None:
    """Take down the link of the node that this process belongs to.

    Raises:
        ConfigError: the node is not in a namespace of ours.
    """
    check_own_link()
    _ip([f"link set {_LINK} down"])


class Network:
    """A network for nodes on this machine. It ends with this process, or with `close`.

    Attributes:
        address: of the launcher, for the etcd that all nodes reach.

    Raises:
        ConfigError: it cannot be made here; the message says what is missing.
    """

    def __init__(self) -> None:
        missing = [program for program in ("ip", "nsenter") if shutil.which(program) is None]
        if missing:
            raise ConfigError(f"namespaces need the programs ip and nsenter; not found: {', '.join(missing)}")
        self._holder = _hold_network()
        try:
            self._base = _free_network()
            self.address = f"{self._base}.1"
            self._connect(f"bamboo{os.urandom(3).hex()}")
        except BaseException:
            self.close()
            raise

    def node_address(self, index: int) -> str:
        """Return the address of a node, by its index from 0.

        Raises:
            ConfigError: the network has no more addresses.
        """
        if index > _LAST_INDEX:
            raise ConfigError(
                f"a network of namespaces has addresses for {_LAST_INDEX + 1} nodes, those that ended too"
            )
        return f"{self._base}.{index + 2}"

    def attach(self, processes: Mapping[int, int]) -> None:
        """Give the networks of some processes a link to all others.

        Args:
            processes: their ids, by the index of the node.
        """
        ports = []
        for index, pid in processes.items():
            port = f"port{index}"
            ports.append(f"link add {port} type veth peer name {_LINK} netns {pid}")
            ports += [f"link set {port} master bridge", f"link set {port} up"]
        _ip(ports, inside=self._holder)
        for index, pid in processes.items():
            address = f"addr add {self.node_address(index)}/24 dev {_LINK}"
            _ip(["link set lo up", address, f"link set {_LINK} up"], inside=pid)

    def cut(self, index: int) -> None:
        """Take down the link of a node, at our end: the node sees that its cable is loose."""
        _ip([f"link set port{index} down"], inside=self._holder)

    def close(self) -> None:
        """Remove it. May be called again."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._holder, signal.SIGKILL)
            os.waitpid(self._holder, 0)

    def _connect(self, name: str) -> None:
        _ip(
            [
                f"link add {name} type veth peer name up0 netns {self._holder}",
                f"addr add {self.address}/24 dev {name}",
                f"link set {name} up",
            ]
        )
        _ip(
            ["link add bridge type bridge", "link set bridge up", "link set up0 master bridge", "link set up0 up"],
            inside=self._holder,
        )


def _hold_network() -> int:
    """Start the process that holds the network with the bridge."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()

    def child() -> NoReturn:
        forking.forget_parent()
        os.setsid()
        forking.signal_at_parents_death(signal.SIGKILL, parent=parent)
        try:
            enter_own_network()
        except ConfigError as error:
            os.write(writer, str(error).encode())
            os._exit(1)
        os.write(writer, b"ok")
        os.close(writer)
        while True:
            signal.pause()

    pid = forking.fork(child)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read().decode()
    if answer != "ok":
        os.waitpid(pid, 0)
        raise ConfigError(answer or "the process that should hold the network has died")
    return pid


def _free_network() -> str:
    """Return the first three numbers of a network that this machine does not use."""
    shown = _run(["ip", "-4", "-o", "addr", "show"], "")
    free = [network for network in _NETWORKS if f" {network}." not in shown]
    return random.choice(free)


def _ip(commands: Sequence[str], *, inside: int | None = None) -> None:
    """Run `ip` commands, in the network of a process if one is given."""
    enter = [] if inside is None else ["nsenter", f"--net=/proc/{inside}/ns/net"]
    _run([*enter, "ip", "-batch", "-"], "\n".join(commands) + "\n")


def _run(command: Sequence[str], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(command)} failed: {done.stderr.strip()}\nits input was:\n{text}")
    return done.stdout
