"""The default process group of `torch.distributed` in a job whose workers come and go: the backend `bamboo`.

It belongs to the user's script; nothing of a training step runs on it. Rank and size are asked of the cluster at each
call, so a script that says `if get_rank() == 0` finds someone who says yes, whoever has died. Collectives run on an
inner group (gloo for host tensors, the accelerator's own for others) that forms at the first of them, among the workers
of the moment, and anew when those have changed. A worker's death, a newer plan without it or a failure end a collective
within milliseconds: whoever hears of it poisons its inner group, so that all others raise too.

A worker that comes when the others train already has the rank that it would have with a place; until it has one, its
collectives are its own, as nobody would answer them.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.key_value import StoreKeys
from bamboo_ds.elastic.member import Member
from bamboo_ds.errors import BambooError, PeerLostError, PlanChangedError, StoreError
from bamboo_ds.world.gloo import device_group, host_group, is_broken, made_while, poison, reason_of
from bamboo_ds.world.rendezvous import RendezvousStore

BACKEND = "bamboo"
_COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "recv", "recv_anysource", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
    "scatter", "send",
)  # fmt: skip
_COUNT_SECONDS = 1.0  # between two looks, while a group forms, whether its members still live


@dataclass(slots=True)
class _Circle:
    """An inner group.

    Attributes:
        workers: ids of its members, by rank.
        rank: of this worker.
        host: moves host memory.
        whole: dispatches on the device of the tensors.
        fault: why it is broken; empty while it is not.
    """

    workers: tuple[int, ...]
    rank: int
    host: Any
    whole: torch_distributed.ProcessGroup
    fault: str = ""

    def end(self, why: str) -> None:
        self.fault = self.fault or why
        poison(self.host, rank=self.rank, size=len(self.workers))


class BambooProcessGroup(torch_distributed.ProcessGroup):
    """A group of `torch.distributed` that outlives its members.

    Args:
        member: this worker's seat in the cluster.
        name: of the group, the same on all members.
        timeout: of collectives.
        address: at which other nodes reach this one.
        workers: ids of a fixed membership, by rank, as `new_group` asks for; None for whoever is there.
    """

    def __init__(
        self,
        member: Member,
        *,
        name: str,
        timeout: timedelta,
        address: str,
        workers: tuple[int, ...] | None = None,
    ) -> None:
        self._member, self._name, self._timeout, self._address = member, name, timeout, address
        self._workers = workers
        self._numbered: tuple[int, ...] = ()  # whose ranks torch knows
        self._number = member.company()[0]
        self._circle: _Circle | None = None
        self._former: _Circle | None = None
        super().__init__(self.rank(), self.size())  # type: ignore[call-arg]  # torch's stubs know one way only
        self._unsubscribe = member.subscribe(self._hear)

    # ---- who is there ------------------------------------------------------------------------------------------

    def rank(self) -> int:
        """Return this worker's rank among those of the moment; -1 if it is none of them."""
        workers = self._company()[1]
        return workers.index(self._member.worker) if self._member.worker in workers else -1

    def size(self) -> int:
        """Return how many workers there are at the moment."""
        return len(self._company()[1])

    def name(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    getBackendName = name  # torch's name for it

    @property
    def _device_types(self) -> list[torch.device]:
        device = get_accelerator().device_name()
        return [torch.device("cpu"), *([torch.device(device)] if device != "cpu" else [])]

    def _company(self) -> tuple[tuple[int, int], tuple[int, ...]]:
        if self._workers is not None:
            return self._number, self._workers
        number, workers = self._member.company()
        if workers != self._numbered:
            self._numbered = workers
            _renumber(workers)
        return number, workers

    # ---- collectives -------------------------------------------------------------------------------------------

    def _run(self, name: str, *args: Any, **kwargs: Any) -> _Work:
        """Start a collective on the inner group.

        Raises:
            PlanChangedError: its members have changed meanwhile.
            PeerLostError: a member, or the whole job, is gone.
        """
        circle = self._formed()
        try:
            work = getattr(circle.whole, name)(*args, **kwargs)
        except RuntimeError as error:
            if not is_broken(error):
                raise
            raise self._fault(circle, error) from error
        return _Work(work, lambda error: self._fault(circle, error))

    def _formed(self) -> _Circle:
        number, workers = self._company()
        if self._member.alone:
            workers = (self._member.worker,)
        if self._circle is None or self._circle.workers != workers:
            # The others may still be in a collective that we have done our part of: so the old one is not ended.
            self._former, self._circle = self._circle, self._form(number, workers)
        if self._circle.fault:
            raise self._fault(self._circle, RuntimeError(self._circle.fault))
        return self._circle

    def _form(self, number: tuple[int, int], workers: tuple[int, ...]) -> _Circle:
        check = self._checking(workers)
        check()
        if self._member.worker not in workers:
            raise PlanChangedError(f"worker {self._member.worker} has no part in a collective of workers {workers}")
        scope = f"{self._name}/alone-{workers[0]}" if self._member.alone else self._name
        backing = StoreKeys(self._member.store).below(f"{keys.rendezvous(number, 'user')}{scope}/")
        store = RendezvousStore(backing, timeout_seconds=self._timeout.total_seconds(), check=check)
        try:
            (circle,) = made_while(
                [functools.partial(self._make, store, workers)],
                check=check,
                discards=[lambda made: made.end("it was made too late")],
            )
        except RuntimeError as error:
            raise PeerLostError(
                f"the script's own {_named(workers)} did not come together: {reason_of(error)}"
            ) from error
        finally:
            store.rest()
        return circle

    def _make(self, store: RendezvousStore, workers: tuple[int, ...]) -> _Circle:
        rank, size = workers.index(self._member.worker), len(workers)
        kind = torch_distributed.ProcessGroup.BackendType
        host = host_group(store, rank, size, timeout=self._timeout, address=self._address)
        whole = torch_distributed.ProcessGroup(store, rank, size)
        whole._set_default_backend(kind.GLOO)
        whole._register_backend(torch.device("cpu"), kind.GLOO, host)
        accelerator = get_accelerator()
        if accelerator.communication_backend_name() == "nccl":
            device = torch.device(accelerator.device_name())
            nccl = torch_distributed.PrefixStore("nccl", store)
            whole._register_backend(device, kind.NCCL, device_group(nccl, rank, size, timeout=self._timeout))
        return _Circle(workers=workers, rank=rank, host=host, whole=whole)

    def _checking(self, workers: tuple[int, ...]) -> Callable[[], None]:
        """Return a check for the time in which a group forms: a member that has died will never come."""
        next_count = [time.monotonic() + _COUNT_SECONDS]

        def check() -> None:
            self._check(workers)
            if time.monotonic() >= next_count[0]:
                next_count[0] = time.monotonic() + _COUNT_SECONDS
                with contextlib.suppress(StoreError):
                    if gone := self._member.gone(workers):
                        raise PeerLostError(f"the script's own {_named(workers)} cannot form: {_gone(gone)}")

        return check

    # ---- ending ------------------------------------------------------------------------------------------------

    def _check(self, workers: tuple[int, ...]) -> None:
        """Raise when a collective among these workers has to end."""
        self._member.check(None)
        if self._is_over(workers):
            plan = self._member.current()
            raise PlanChangedError(
                f"the members of the script's own {_named(workers)} changed with plan {keys.dotted(plan.number)}: "
                f"{plan.cause}"
            )

    def _is_over(self, workers: tuple[int, ...]) -> bool:
        if self._member.alone:
            return workers != (self._member.worker,)
        dead = self._member.dead
        return not dead.isdisjoint(workers) or (self._workers is None and self._company()[1] != workers)

    def _fault(self, circle: _Circle, error: RuntimeError) -> BambooError:
        """Return what a broken collective means; all others that wait in it hear of it at once."""
        circle.end(reason_of(error))
        try:
            self._check(circle.workers)
        except BambooError as news:
            return news
        with contextlib.suppress(StoreError):
            if gone := self._member.gone(circle.workers):
                return PeerLostError(f"a collective of the script's own {_named(circle.workers)} broke: {_gone(gone)}")
        return PeerLostError(f"a collective of the script's own {_named(circle.workers)} broke: {circle.fault}")

    def _hear(self) -> None:
        """End the inner group if the news says so; called from the thread that follows the board."""
        self._company()
        for circle in (self._circle, self._former):
            if circle is not None and not circle.fault:
                try:
                    self._check(circle.workers)
                except BambooError as news:
                    circle.end(str(news))

    def shutdown(self) -> None:
        """End the inner group."""
        self._unsubscribe()
        for circle in (self._circle, self._former):
            if circle is not None:
                circle.end("it was shut down")
        self._circle = self._former = None

    abort = shutdown


def _collective(name: str) -> Callable[..., Any]:
    def run(self: BambooProcessGroup, *args: Any, **kwargs: Any) -> _Work:
        return self._run(name, *args, **kwargs)

    run.__name__ = name
    return run


for _name in _COLLECTIVES:
    setattr(BambooProcessGroup, _name, _collective(_name))


class _Work(torch_distributed.Work):
    """A collective under way; a broken one is explained."""

    def __init__(self, work: Any, explain: Callable[[RuntimeError], BambooError]) -> None:
        super().__init__()
        self._work, self._explain = work, explain

    def wait(self, *timeout: timedelta) -> bool:
        """Wait for the end."""
        try:
            return bool(self._work.wait(*timeout))
        except RuntimeError as error:
            if not is_broken(error):
                raise
            raise self._explain(error) from error

    def synchronize(self) -> None:
        """Wait for the end."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Return why it has not ended well."""
        return self._work.exception()

    def result(self) -> Any:
        """Return its tensors."""
        return self._work.result()

    def get_future(self) -> Any:
        """Return the future of its tensors."""
        return self._work.get_future()

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    source_rank = _source_rank


@functools.cache
def register_backend(join: Callable[[], tuple[Member, str]]) -> None:
    """Make the backend known to torch.

    Args:
        join: returns this worker's seat, and the address of its node.
    """

    def create(options: Any, _: Any) -> BambooProcessGroup:
        member, address = join()
        ranks = options.global_ranks_in_group
        company = member.company()[1]
        return BambooProcessGroup(
            member,
            name=str(options.group_id),
            timeout=options.timeout,
            address=address,
            workers=tuple(company[rank] for rank in ranks) if ranks else None,
        )

    devices = dict.fromkeys(("cpu", get_accelerator().device_name()))
    torch_distributed.Backend.register_backend(BACKEND, create, extended_api=True, devices=list(devices))


def _renumber(company: tuple[int, ...]) -> None:
    """Tell torch the ranks of the moment, which it believes to be fixed: it translates between those of its groups."""
    ranks = {worker: rank for rank, worker in enumerate(company)}
    known = distributed_c10d._world.pg_group_ranks
    for group in [group for group in known if isinstance(group, BambooProcessGroup)]:
        workers = company if group._workers is None else group._workers
        known[group] = {ranks[worker]: rank for rank, worker in enumerate(workers) if worker in ranks}


def _named(workers: tuple[int, ...]) -> str:
    return f"group of workers {', '.join(map(str, workers))}"


def _gone(gone: tuple[int, ...]) -> str:
    return f"worker{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))} ended or cannot be reached"
