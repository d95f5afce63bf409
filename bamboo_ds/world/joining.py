"""Joins the cluster: opens the store, prepares what is slow, and waits to be let in. Once a process.

Whoever needs the world first brings it about: Bamboo, or the script's own `deepspeed.init_distributed` or
`torch.distributed.init_process_group`.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import torch.distributed as torch_distributed

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.key_value import StoreKeys
from bamboo_ds.elastic.member import NO_PLAN, Member
from bamboo_ds.elastic.membership import Membership, open_store
from bamboo_ds.world.group import BACKEND, register_backend
from bamboo_ds.world.rendezvous import RendezvousStore
from bamboo_ds.world.warming import import_heavy_modules, open_accelerator

_lock = threading.Lock()
_member: Member | None = None
_default_store: RendezvousStore | None = None  # torch's own reference to it does not keep its Python part alive


def joined() -> Member | None:
    """Return this process's seat in the cluster; None before `join`, and in a job without a cluster."""
    return _member


def take_hosted_member(member: Member) -> None:
    """Make this the process's seat in the cluster: it hosts its own agent, and has joined with it."""
    global _member
    _member = member


def join(membership: Membership) -> Member:
    """Join the cluster and return this process's seat once it may begin.

    Raises:
        SystemExit: the job has finished, and this worker was never needed.
        EvictedError: the cluster declared this worker dead.
        PeerLostError: the job has failed.
        StoreUnavailableError: the store cannot be reached.
    """
    with _lock:
        member = _open(membership)
        member.await_roster()
        if not torch_distributed.is_initialized():
            _describe(member, membership)
        return member


def _open(membership: Membership) -> Member:
    global _member
    if _member is None:
        store = open_store(membership.etcd, job=membership.job)
        _member = Member(
            store, worker=membership.worker, node=membership.node, outage_seconds=membership.outage_seconds
        )
        import_heavy_modules()
        open_accelerator()
        _member.join()
    return _member


def _describe(member: Member, membership: Membership) -> None:
    """Set the variables that scripts look for; the last two are only looked at, nobody listens there."""
    workers = member.company()[1]
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(workers.index(member.worker)), str(len(workers))
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("MASTER_ADDR", membership.address or "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


def make_default_group(membership: Membership, *, timeout: timedelta) -> None:
    """Make the default group of `torch.distributed`, unless there is one."""
    global _default_store
    member = join(membership)
    if torch_distributed.is_initialized():
        return
    register_backend(_seat)
    _default_store = RendezvousStore(
        StoreKeys(member.store, prefix=keys.rendezvous(NO_PLAN, "user")),
        timeout_seconds=timeout.total_seconds(),
        check=lambda: member.check(None),
    )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch_distributed.init_process_group(BACKEND, store=_default_store, rank=rank, world_size=size, timeout=timeout)


def _seat() -> tuple[Member, str]:
    membership = Membership.read()
    assert membership is not None
    assert _member is not None
    return _member, membership.address
