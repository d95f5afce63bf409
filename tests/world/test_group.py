"""The default group of a script: true ranks, all collectives, and no wait for the dead."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bamboo_ds.cli.bench.workers import values
from bamboo_ds.elastic import keys
from bamboo_ds.errors import BambooError, PeerLostError, PlanChangedError
from bamboo_ds.plan import Plan
from bamboo_ds.plan.job import JobSpec
from tests.world.cluster import Pen, dead
from tests.world.jobs import Job, await_keys, register


def start() -> Any:
    from bamboo_ds.world import init_distributed

    return init_distributed(20.0)


def all_collectives(worker: int) -> Any:  # noqa: PLR0915  # one after the other
    """Return what each collective gave, in plain numbers."""
    start()
    rank, size, ones = dist.get_rank(), dist.get_world_size(), torch.ones(2)
    got: dict[str, Any] = {"place": (rank, size, dist.get_backend())}
    total = ones * (rank + 1)
    dist.all_reduce(total)
    got["all_reduce"] = total.tolist()
    lowest = torch.tensor([rank + 5])
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    got["minimum"] = lowest.item()
    sent = ones * rank
    dist.broadcast(sent, src=1)
    got["broadcast"] = sent.tolist()
    rows = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(rows, ones * rank)
    got["all_gather"] = [int(row[0]) for row in rows]
    flat = torch.zeros(size)
    dist.all_gather_into_tensor(flat, torch.tensor([float(rank)]))
    got["all_gather_into_tensor"] = flat.tolist()
    reduced = ones * (rank + 1)
    dist.reduce(reduced, dst=2)
    got["reduce"] = reduced.tolist() if rank == 2 else None
    gathered = [torch.zeros(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), gathered, dst=0)
    got["gather"] = [row.item() for row in gathered or []]
    part = torch.zeros(1)
    dist.scatter(part, [torch.tensor([float(index * 10)]) for index in range(size)] if rank == 0 else None, src=0)
    got["scatter"] = part.item()
    share = torch.zeros(1)
    dist.reduce_scatter(share, [torch.tensor([float(index)]) for index in range(size)])
    got["reduce_scatter"] = share.item()
    whole = torch.zeros(1)
    dist.reduce_scatter_tensor(whole, torch.arange(float(size)))
    got["reduce_scatter_tensor"] = whole.item()
    turned = torch.zeros(size)
    dist.all_to_all_single(turned, torch.arange(float(size)) + 10 * rank)
    got["all_to_all_single"] = turned.tolist()
    if rank == 0:
        dist.send(torch.tensor([7.0]), dst=1)
        dist.isend(torch.tensor([8.0]), dst=1, tag=3).wait()
    if rank == 1:
        first, second = torch.zeros(1), torch.zeros(1)
        got["source"] = dist.recv(first)
        dist.irecv(second, src=0, tag=3).wait()
        got["recv"] = (first.item(), second.item())
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    got["all_gather_object"] = objects
    told = [{"from": rank}, "x"]
    dist.broadcast_object_list(told, src=2)
    got["broadcast_object_list"] = told
    kept: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(("row", rank), kept, dst=1)
    got["gather_object"] = kept
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {index}" for index in range(size)], src=0)
    got["scatter_object_list"] = mine
    work = dist.all_reduce(ones, async_op=True)
    work.wait(timedelta(seconds=5))
    got["async"] = (work.is_completed(), ones.tolist())
    dist.barrier()
    return got


def test_every_collective_of_torch_works_with_its_defaults(job: Job) -> None:
    results = values(job(all_collectives, (4, 6, 9)))[:3]
    assert [got.pop("place") for got in results] == [(0, 3, "bamboo"), (1, 3, "bamboo"), (2, 3, "bamboo")]
    assert results[1].pop("source") == 0
    assert results[1].pop("recv") == (7.0, 8.0)
    assert [got.pop("reduce") for got in results] == [None, None, [6.0, 6.0]]
    assert [got.pop("gather") for got in results] == [[0.0, 1.0, 2.0], [], []]
    assert [got.pop("scatter") for got in results] == [0.0, 10.0, 20.0]
    assert [got.pop("reduce_scatter") for got in results] == [0.0, 3.0, 6.0]
    assert [got.pop("reduce_scatter_tensor") for got in results] == [0.0, 3.0, 6.0]
    assert [got.pop("all_to_all_single") for got in results] == [[r, 10.0 + r, 20.0 + r] for r in range(3)]
    assert [got.pop("gather_object") for got in results] == [None, [("row", 0), ("row", 1), ("row", 2)], None]
    assert [got.pop("scatter_object_list") for got in results] == [["for 0"], ["for 1"], ["for 2"]]
    same = {
        "all_reduce": [6.0, 6.0],
        "minimum": 5,
        "broadcast": [1.0, 1.0],
        "all_gather": [0, 1, 2],
        "all_gather_into_tensor": [0.0, 1.0, 2.0],
        "all_gather_object": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
        "broadcast_object_list": [{"from": 2}, "x"],
        "async": (True, [3.0, 3.0]),
    }
    assert results == [same] * 3


# ---- who is there ----------------------------------------------------------------------------------------------


def plan_of(*owners: int) -> Plan:
    return Plan(owners=(owners,))


def take_seat(world: Any, stages: int) -> Plan:
    return world.member.take_seat(JobSpec(publisher=world.worker, num_stages=stages, num_layers=8))


def done(world: Any) -> None:
    world.member.store.put(f"done/{world.worker}", b"")


def hang(world: Any, *others: int) -> None:
    """Do nothing until others are done."""
    await_keys(world.member.store, *(f"done/{other}" for other in others))


def await_version(world: Any, version: int) -> None:
    deadline = time.monotonic() + 10
    while world.member.current().version < version:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_ranks_are_those_of_the_moment_and_the_group_forms_anew_without_the_dead(job: Job) -> None:
    plan = plan_of(9, 4, 6)

    def script(worker: int) -> Any:
        import deepspeed.comm

        world = start()
        before = dist.get_rank(), dist.get_world_size()
        dist.barrier()
        take_seat(world, 3)
        seated = dist.get_rank(), dist.get_world_size()
        dist.barrier()
        world.member.tell("passed", "the barrier")
        if worker == 4:
            return hang(world, 6, 9)
        await_version(world, 1)
        total = torch.ones(1)
        dist.all_reduce(total)
        after = dist.get_rank(), dist.get_world_size(), deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
        done(world)
        return before, seated, total.item(), after, dist.get_process_group_ranks(dist.group.WORLD)

    def coordinate(pen: Pen) -> None:
        pen.plan(plan)
        while len(pen.store.list(keys.EVENTS).entries) < 3:
            time.sleep(0.01)
        pen.plan(dead(plan, 4))

    assert values(job(script, (4, 6, 9), coordinate=coordinate))[1:3] == [
        ((1, 3), (1, 3), 2.0, (0, 2, 0, 2), [0, 1]),
        ((2, 3), (2, 3), 2.0, (1, 2, 1, 2), [0, 1]),
    ]


def test_a_plan_with_the_same_workers_disturbs_no_collective(job: Job) -> None:
    """The first plan may come while some are still in a collective of the beginning."""

    def script(worker: int) -> Any:
        world = start()
        dist.barrier()
        group = dist.group.WORLD
        assert group is not None
        inner = group._circle
        if worker == 4:
            world.member.tell("passed", "the barrier")
            while True:  # the plan is there, and the others are in the next barrier
                try:
                    world.member.current()
                    break
                except BambooError:
                    time.sleep(0.01)
            time.sleep(0.2)
        dist.barrier()
        take_seat(world, 2)
        dist.barrier()
        return group._circle is inner

    def coordinate(pen: Pen) -> None:
        while not pen.store.list(keys.EVENTS).entries:
            time.sleep(0.01)
        pen.plan(plan_of(4, 6))

    assert values(job(script, (4, 6), coordinate=coordinate))[:2] == [True, True]


def test_groups_of_some_workers_form_and_outlive_the_death_of_others(job: Job) -> None:
    plan = plan_of(4, 6, 9)

    def script(worker: int) -> Any:
        world = start()
        take_seat(world, 3)
        pair = dist.new_group([1, 2])
        total = torch.ones(1)
        if worker == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total, group=pair)
        world.member.tell("passed", "the sum")
        await_version(world, 1)
        dist.all_reduce(total, group=pair)
        return total.item(), dist.get_rank(pair), dist.get_world_size(pair), dist.get_rank()

    def coordinate(pen: Pen) -> None:
        pen.plan(plan)
        while len(pen.store.list(keys.EVENTS).entries) < 2:
            time.sleep(0.01)
        pen.plan(dead(plan, 4))

    results = job(script, (4, 6, 9), coordinate=coordinate)
    assert values(results[1:3]) == [(4.0, 0, 2, 0), (4.0, 1, 2, 1)]


def test_a_wrong_argument_stays_the_callers_error_and_spoils_nothing(job: Job) -> None:
    def script(worker: int) -> Any:
        start()
        dist.barrier()
        try:
            dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(3))
        except RuntimeError as error:
            said = isinstance(error, BambooError), str(error)[:30]
        total = torch.ones(1)
        dist.all_reduce(total)
        return said, total.item()

    assert values(job(script, (4, 6)))[:2] == [((False, "ProcessGroupGloo::allgather: i"), 2.0)] * 2


# ---- nobody waits for the dead ---------------------------------------------------------------------------------


def outcome_of(wait: Callable[[], Any], *, since: Callable[[], float]) -> tuple[str, str, float]:
    try:
        wait()
    except (PeerLostError, PlanChangedError) as error:
        return type(error).__name__, str(error), time.time() - since()
    return "it did not raise", "", 0.0


def told_at(world: Any, key: str) -> float:
    entry = world.member.store.get(key)
    return 0.0 if entry is None else float(entry.value)


@pytest.mark.parametrize("seated", [False, True])
def test_a_killed_peer_ends_a_barrier_of_all_within_a_moment(job: Job, seated: bool) -> None:
    ids = (4, 6, 9, 11)

    def script(worker: int) -> Any:
        world = start()
        if seated:
            take_seat(world, 4)
        dist.barrier()
        if worker == 6:
            time.sleep(0.3)
            world.member.store.put("killed", str(time.time()).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome_of(dist.barrier, since=lambda: told_at(world, "killed"))

    results = job(script, ids, coordinate=lambda pen: pen.plan(plan_of(*ids)) if seated else None)
    for result in (results[0], *results[2:4]):
        kind, message, seconds = result.value
        assert kind == "PeerLostError", message
        assert "group of workers 4, 6, 9, 11 broke" in message
        assert seconds < 0.5


@pytest.mark.parametrize(
    ("news", "kind", "said"),
    [("plan", "PlanChangedError", "changed with plan 0.1"), ("failure", "PeerLostError", "worker 9: ValueError")],
)
def test_a_hung_peer_ends_a_collective_as_soon_as_there_is_news_of_it(
    job: Job, news: str, kind: str, said: str
) -> None:
    ids = (4, 6, 9)

    def script(worker: int) -> Any:
        world = start()
        take_seat(world, 3)
        dist.barrier()
        world.member.tell("passed", "the barrier")
        if worker == 6:
            return hang(world, 4, 9)
        found = outcome_of(lambda: dist.all_reduce(torch.ones(3)), since=lambda: told_at(world, "decided"))
        done(world)
        return found

    def coordinate(pen: Pen) -> None:
        pen.plan(plan_of(*ids))
        while len(pen.store.list(keys.EVENTS).entries) < 3:
            time.sleep(0.01)
        time.sleep(0.2)
        pen.store.put("decided", str(time.time()).encode())
        pen.plan(dead(plan_of(*ids), 6)) if news == "plan" else pen.fail()

    results = values(job(script, ids, coordinate=coordinate))
    for got, message, seconds in (results[0], results[2]):
        assert (got, said in message) == (kind, True), message
        assert seconds < 0.3


def test_a_peer_that_ended_before_the_first_collective_is_named(job: Job) -> None:
    def script(worker: int) -> Any:
        start()
        began = time.time()
        return None if worker == 6 else outcome_of(dist.barrier, since=lambda: began)

    def coordinate(pen: Pen) -> None:
        register(pen.store, 4, 9)  # the agent of 6 has taken it off its node
        pen.roster(4, 6, 9)

    results = values(job(script, (4, 6, 9), coordinate=coordinate, roster=False))
    for kind, message, seconds in (results[0], results[2]):
        assert kind == "PeerLostError"
        assert "group of workers 4, 6, 9 cannot form: worker 6 ended or cannot be reached" in message
        assert seconds < 3


# ---- scripts that ask first ------------------------------------------------------------------------------------


def torch_first() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))


def torch_by_keyword() -> None:
    dist.distributed_c10d.init_process_group(backend="cpu:gloo")


def deepspeed_first() -> None:
    import deepspeed

    deepspeed.init_distributed()


@pytest.mark.parametrize("ask", [torch_first, torch_by_keyword, deepspeed_first])
def test_a_script_that_asks_torch_or_deepspeed_for_a_group_joins_the_cluster(job: Job, ask: Callable[[], None]) -> None:
    def script(worker: int) -> Any:
        from bamboo_ds.world.bootstrap import answer_script, init_distributed

        answer_script()  # what `python -m bamboo_ds` does
        ask()
        world = init_distributed(20.0)
        import deepspeed.comm

        total = torch.ones(1)
        deepspeed.comm.all_reduce(total)
        environment = os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]
        again = "no error"
        try:
            dist.init_process_group("gloo")
        except ValueError as error:
            again = str(error)
        deepspeed.comm.barrier()
        return dist.get_backend(), world.worker, world.rank, total.item(), deepspeed.comm.get_rank(), environment, again

    twice = "trying to initialize the default process group twice!"
    assert values(job(script, (4, 6)))[:2] == [
        ("bamboo", 4, 0, 2.0, 0, ("0", "2", "0"), twice),
        ("bamboo", 6, 1, 2.0, 1, ("1", "2", "0"), twice),
    ]


def test_the_store_of_the_default_group_is_one_of_torch(job: Job) -> None:
    def script(worker: int) -> Any:
        start()
        store = dist.distributed_c10d._get_default_store()
        total = store.add("count", worker)
        store.set(f"key-{worker}", str(worker))
        others = [store.get(f"key-{other}").decode() for other in (4, 6)]
        first = store.compare_set("first", "", str(worker)).decode()
        dist.barrier()
        return total in (4, 6, 10), others, first == store.get("first").decode(), store.check(["key-4", "no such key"])

    assert values(job(script, (4, 6)))[:2] == [(True, ["4", "6"], True, False)] * 2
