"""Breaks a node on purpose, from inside or from outside, in the ways in which a cloud and its network do."""

from __future__ import annotations

import os
import signal
from typing import Literal, cast, get_args

from bamboo_ds.elastic.namespaces import check_own_link, cut_own_link
from bamboo_ds.elastic.processes import NodeProcesses, node_processes, send
from bamboo_ds.errors import ConfigError

__all__ = ["How", "break_node", "break_own_node", "check", "read_how"]

How = Literal["kill", "term", "stop", "cut"]
"""SIGKILL to all its processes; SIGTERM to its agent, as a cloud's notice; SIGSTOP to all; its network link down."""

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def read_how(text: str) -> How:
    """Return a way of breaking a node.

    Raises:
        ConfigError: there is no such way.
    """
    if text not in get_args(How):
        raise ConfigError(f'preempt how = "{text}": allowed are {", ".join(get_args(How))}')
    return cast(How, text)


def check(how: How) -> None:
    """Check that the node of this process can be broken so.

    Raises:
        ConfigError: `cut` needs a network namespace of ours.
    """
    if how == "cut":
        check_own_link()


def break_node(processes: NodeProcesses, how: How) -> None:
    """Break a node from outside.

    A machine that is gone tells nobody. So agent and spawner are stopped first: they would see the workers end, and the
    agent might write so before its own turn comes.

    Raises:
        ConfigError: `cut` is done by whoever owns the link.
    """
    if how == "cut":
        raise ConfigError("a node's link is cut from inside, or by the cluster that made it")
    if how == "term":
        send([processes.agent], signal.SIGTERM)
        return
    send([processes.agent, *([processes.spawner] if processes.spawner else [])], signal.SIGSTOP)
    send(processes.everything, _SIGNALS[how])


def break_own_node(how: How) -> None:
    """Break the node whose agent this process is; that is the last of them.

    Does not return from `kill`, and not before SIGCONT from `stop`.

    Raises:
        ConfigError: `cut` needs a network namespace of ours.
    """
    if how == "cut":
        cut_own_link()
    elif how == "term":
        send([os.getpid()], signal.SIGTERM)
    else:
        send(node_processes(os.getpid()).everything, _SIGNALS[how])
