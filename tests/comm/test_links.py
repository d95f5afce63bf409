"""Links carry every tensor, keep a journal, and every wait on them ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bamboo_ds.cli.bench.workers import WorkerResult, values
from bamboo_ds.comm import Address, Kind, Network, make_message
from bamboo_ds.comm.wire import _DTYPES
from bamboo_ds.errors import PeerLostError, ScheduleError
from bamboo_ds.plan import StaticPlanSource, static_plan

Run = Callable[..., list[WorkerResult]]


def network(
    rank: int,
    *,
    workers: int = 2,
    timeout_seconds: float = 10.0,
    check: Any = lambda: None,
    row: bytes | None = None,
) -> Network:
    """Join the workers of one pipeline."""
    from bamboo_ds.world import init_distributed

    world = init_distributed(30.0)
    source = StaticPlanSource(static_plan(world_size=workers, num_stages=workers), worker=rank)
    made = Network(
        source, plan=source.current(), backing=world.store, instance=0,
        reductions={"all": frozenset(range(workers))}, redundancy=False,
        timeout_seconds=timeout_seconds, alarm=check, row=row,
    )  # fmt: skip
    made.form()
    return made


def address(micro_batch: int, **other: Any) -> Address:
    return replace(Address(kind=Kind.ACTIVATION, epoch=0, attempt=0, step=0, stage=1, micro_batch=micro_batch), **other)


def tensors() -> list[torch.Tensor]:
    """Return a tensor of every dtype and of every odd form."""
    numbers = torch.arange(24.0)
    every = [numbers.to(torch.float32).view(2, 3, 4).to(dtype) for dtype in _DTYPES if dtype is not torch.complex32]
    forms = [torch.tensor(3.5), torch.empty(0, 5), torch.ones(()).bool(), numbers.view(4, 6).t(), numbers[::3]]
    views = [torch.ones(1, 1).expand(3, 4), torch.complex(numbers, numbers + 1).conj(), numbers.view(2, 12)[:, 5:6]]
    return every + forms + views + [torch.randn(3) for _ in range(60)]


def carry(rank: int) -> Any:
    links, given = network(rank), tensors()
    torch.manual_seed(3)
    given[-60:] = [torch.randn(3) for _ in range(60)]
    wants = [index % 2 == 0 for index in range(len(given))]
    if rank == 0:
        out = links.outbound[Kind.ACTIVATION, rank]
        for index, tensor in enumerate(given):
            out.send(make_message(address(index), [tensor], is_tuple=False, requires_grad=[wants[index]]))
        out.send(make_message(address(len(given)), given, is_tuple=True, requires_grad=wants, digest=77))
        kept = len(out.journal())
        links.world.barrier()
        out.forget(links.timeout)
        return kept, len(out.journal())
    inbound, wrong = links.inbound[Kind.ACTIVATION, rank], []
    for index, tensor in enumerate(given):
        got = inbound.receive(address(index))
        if (
            not _same(got.tensors[0], tensor)
            or got.header.is_tuple
            or got.header.tensors[0].requires_grad != wants[index]
        ):
            wrong.append(index)
    last = inbound.receive(address(len(given)))
    links.world.barrier()
    same = all(map(_same, last.tensors, given))
    return wrong, same, last.header.digest, last.header.is_tuple, len(last.tensors) == len(given)


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    if ours.dtype.itemsize == 1 and ours.dtype.is_floating_point:
        ours, theirs = ours.view(torch.uint8), theirs.contiguous().view(torch.uint8)
    return torch.equal(ours, theirs)


def test_tensors_of_every_dtype_and_form_arrive_and_the_journal_is_kept_until_the_commit(workers: Run) -> None:
    sent, received = values(workers(carry, 2, timeout_seconds=30))
    count = len(tensors()) + 1
    assert sent == (count, 0)
    assert received == ([], True, 77, True, True)


def wait_for(links: Network, place: Address) -> tuple[str, str, float]:
    started = time.monotonic()
    (inbound,) = (link for (kind, _), link in links.inbound.items() if kind is Kind.ACTIVATION)
    try:
        inbound.receive(place)
    except (PeerLostError, ScheduleError) as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "received", "", time.monotonic() - started


def silent(rank: int, way: str) -> Any:
    """Worker 0 dies, is stopped, or only sleeps; worker 1 waits for it."""
    links = network(rank, timeout_seconds=2.0)
    if rank == 1:
        return wait_for(links, address(0))
    time.sleep(0.3)
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "stopped":
        # A child that outlives us wakes us up again, so that the test can end in order.
        if os.fork() == 0:
            time.sleep(4.0)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(4.0 if way == "asleep" else 0.0)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "within", "said"), [("killed", 1.5, "broke"), ("stopped", 4.0, "sent nothing for 2 s")]
)
def test_a_dead_or_silent_peer_ends_the_wait_in_time(workers: Run, way: str, within: float, said: str) -> None:
    kind, message, seconds = workers(silent, 2, args=(way,), timeout_seconds=30)[1].value
    assert (kind, said in message) == ("PeerLostError", True), message
    assert "worker 0 (stage 0 of pipeline 0)" in message
    assert seconds < within


def waiting_in_a_group(rank: int) -> Any:
    """Worker 0 takes part in no exchange: gathering and summing must both end."""
    links = network(rank, timeout_seconds=1.0)
    group, found = links.reduction("all"), []
    if rank == 1:
        for wait in (group.start_sum([torch.ones(3)]), lambda: links.world.gather_bytes(b"x")):
            started = time.monotonic()
            try:
                wait()
            except PeerLostError:
                found.append(time.monotonic() - started)
    else:
        time.sleep(3.0)
    return found


@pytest.mark.slow
def test_a_member_that_does_not_come_ends_a_collective_in_time(workers: Run) -> None:
    seconds = values(workers(waiting_in_a_group, 2, timeout_seconds=30))[1]
    assert len(seconds) == 2
    assert max(seconds) < 3


@pytest.mark.parametrize(
    "other", [{"micro_batch": 1}, {"step": 1}, {"epoch": 1}, {"stage": 2}, {"kind": Kind.GRADIENT}]
)
def test_a_message_of_another_address_is_refused(workers: Run, other: dict[str, Any]) -> None:
    def exchange(rank: int) -> Any:
        links = network(rank)
        if rank == 0:
            message = make_message(address(0), [torch.ones(1)], is_tuple=False, requires_grad=[False])
            links.outbound[Kind.ACTIVATION, rank].send(message)
            links.world.barrier()
            return None
        found = wait_for(links, address(**{"micro_batch": 0, **other}))
        links.world.barrier()
        return found

    kind, message, _ = values(workers(exchange, 2, timeout_seconds=30))[1]
    assert kind == "ScheduleError"
    assert "activation of micro-batch 0 for stage 1 (step 0, attempt 0, epoch 0)" in message


def test_a_changed_plan_ends_a_wait(workers: Run) -> None:
    def exchange(rank: int) -> Any:
        changed = threading.Event()

        def check() -> None:
            if changed.is_set():
                raise PeerLostError("a newer plan")

        links = network(rank, timeout_seconds=60.0, check=check)
        found = None
        if rank == 1:
            threading.Timer(0.2, changed.set).start()
            found = wait_for(links, address(0))
        links.world.barrier()
        return found

    kind, message, seconds = values(workers(exchange, 2, timeout_seconds=30))[1]
    assert (kind, message) == ("PeerLostError", "a newer plan")
    assert seconds < 2


def test_closing_a_network_ends_the_waits_of_its_peers_and_its_threads(workers: Run) -> None:
    def exchange(rank: int) -> Any:
        before = threading.active_count()
        links = network(rank, workers=3, timeout_seconds=60.0)
        if rank == 0:
            time.sleep(0.3)
            links.close()
            return threading.active_count() - before
        found = wait_for(links, address(0, stage=rank))
        links.close()
        return found

    first, second, third = values(workers(exchange, 3, timeout_seconds=30))
    assert first <= 1, "only gloo's own thread may stay"
    assert second[0] == third[0] == "PeerLostError"
    assert max(second[2], third[2]) < 5


@pytest.mark.parametrize("sizes", [(0, 10), (1020, 5), (5000, 0), (1, 200_000)])
def test_messages_of_any_length_are_gathered(workers: Run, sizes: tuple[int, int]) -> None:
    def exchange(rank: int) -> list[list[int]]:
        links = network(rank)
        return [
            [len(row) for row in links.world.gather_bytes(bytes([rank + 1]) * size)]
            for size in (3, sizes[rank], 3, sizes[rank])
        ]

    wanted = [[3, 3], list(sizes), [3, 3], list(sizes)]
    assert values(workers(exchange, 2, timeout_seconds=30)) == [wanted, wanted]


def test_one_long_message_does_not_make_all_later_ones_long(workers: Run) -> None:
    def exchange(rank: int) -> int:
        links = network(rank)
        links.world.gather_bytes(bytes(10_000_000))
        return links.world._room

    assert max(values(workers(exchange, 2, timeout_seconds=30))) <= 1 << 16
