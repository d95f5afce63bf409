"""A network in a cluster: forms by etcd, notices a death at once, waits for the verdict, and hears it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from bamboo_ds.cli.bench.workers import values
from bamboo_ds.comm import Address, Kind, Network, make_message
from bamboo_ds.elastic import keys
from bamboo_ds.errors import BambooError, PlanChangedError, StoreUnavailableError
from bamboo_ds.plan import Plan, codec
from bamboo_ds.plan.job import JobSpec
from bamboo_ds.plan.membership import LinkReport
from bamboo_ds.store import Store
from tests.world.cluster import Pen, dead
from tests.world.jobs import Job, await_keys

IDS = (3, 4, 5, 6, 8, 10, 11, 12)
PLAN = Plan(owners=((3, 5, 8, 11), (4, 6, 10, 12)))
"""P = 4, D = 2."""
ROW = Plan(owners=((3, 5, 8, 11),))
PAIR = Plan(owners=((3, 5),))


def join() -> Any:
    from bamboo_ds.world import init_distributed

    return init_distributed(20.0)


def network(world: Any, *, timeout_seconds: float = 20.0) -> Network:
    """Make the network of the plan that this worker is seated in."""
    stages = range(world.member.current().num_stages)
    made = Network(
        world.member,
        plan=world.member.current(),
        backing=world.store,
        instance=0,
        reductions={f"stage-{stage}": frozenset({stage}) for stage in stages},
        redundancy=True,
        timeout_seconds=timeout_seconds,
        address=world.address,
    )
    with ExitStack() as opened:
        opened.callback(made.close)
        made.form()
        opened.pop_all()
    return made


def ones(group: Any) -> list[torch.Tensor]:
    """Return what this worker contributes to a gradient group."""
    return [torch.ones(2) for _ in group.seats]


def take_seat(world: Any, stages: int) -> Plan:
    return world.member.take_seat(JobSpec(publisher=world.worker, num_stages=stages, num_layers=8))


def connect(plan: Plan, *, timeout_seconds: float = 20.0) -> tuple[Any, Network]:
    """Join the cluster, take a seat and make the network of it."""
    world = join()
    take_seat(world, plan.num_stages)
    return world, network(world, timeout_seconds=timeout_seconds)


def present(world: Any) -> None:
    """Say that this worker is ready to be disturbed."""
    world.member.store.put(f"pid/{world.worker}", str(os.getpid()).encode())


def pids(store: Store, ids: tuple[int, ...]) -> dict[int, int]:
    """Wait until all are ready, and return their process ids."""
    await_keys(store, *(f"pid/{worker}" for worker in ids))
    return {worker: int(store.get(f"pid/{worker}").value) for worker in ids}  # type: ignore[union-attr]


def address(stage: int, micro_batch: int = 0) -> Address:
    return Address(kind=Kind.ACTIVATION, epoch=0, attempt=0, step=0, stage=stage, micro_batch=micro_batch)


def a_message(stage: int, micro_batch: int = 0) -> Any:
    return make_message(address(stage, micro_batch), [torch.ones(3)], is_tuple=False, requires_grad=[False])


def test_eight_workers_form_all_their_groups_in_a_moment(job: Job) -> None:
    def script(worker: int) -> Any:
        world = join()
        plan = take_seat(world, 4)
        began = time.monotonic()
        links = network(world)
        links.world.barrier()
        assert links.pipeline is not None
        rows = links.pipeline.gather_bytes(str(worker).encode())
        seconds = time.monotonic() - began
        stage = plan.place(worker).stage
        sums = []
        for held in sorted({stage, (stage + 1) % 4}):
            group = links.reduction(f"stage-{held}")
            group.start_sum(total := ones(group))()
            sums.append((held, total[0].tolist()))
        if stage < 3:
            links.outbound[Kind.ACTIVATION, stage].send(a_message(stage + 1))
        got = links.inbound[Kind.ACTIVATION, stage].receive(address(stage)).tensors[0].tolist() if stage else []
        links.world.barrier()
        groups = len(links._groups) + len(links._reductions) + len(links.inbound) + len(links.outbound)
        links.close()
        return seconds, groups, (sums, rows, got, links.pipeline_id)

    results = values(job(script, IDS, coordinate=lambda pen: pen.plan(PLAN)))[:8]
    print("groups", [result[1] for result in results], "formed in", [round(result[0], 3) for result in results])
    assert max(result[0] for result in results) < 3  # alone on two cores it is a third of a second
    for worker, (_, groups, found) in zip(IDS, results, strict=True):
        place = PLAN.place(worker)
        assert groups == 8
        assert found == (
            [(stage, [4.0, 4.0]) for stage in sorted({place.stage, (place.stage + 1) % 4})],
            [str(owner).encode() for owner in sorted(PLAN.owners[place.pipeline])],
            [1.0] * 3 if place.stage else [],
            place.pipeline,
        )


# ---- who notices a death ---------------------------------------------------------------------------------------


def reports(store: Store, *, count: int, within_seconds: float, since: float) -> dict[tuple[int, int], float]:
    """Return who reports whom after how many seconds, until `count` reports are there or the time is over."""
    found: dict[tuple[int, int], float] = {}
    while len(found) < count and time.monotonic() - since < within_seconds:
        for entry in store.list(keys.SUSPECTS).entries:
            report = codec.decode(LinkReport, entry.value)
            found.setdefault((report.reporter, report.suspect), time.monotonic() - since)
        time.sleep(0.002)
    return found


@pytest.mark.parametrize("victim", ROW.owners[0])
def test_both_neighbours_of_a_killed_worker_report_it_at_once_whatever_its_stage(job: Job, victim: int) -> None:
    def script(worker: int) -> Any:
        world, links = connect(ROW)
        links.world.barrier()
        present(world)
        stage = ROW.place(worker).stage
        try:
            links.inbound[(Kind.ACTIVATION if stage else Kind.GRADIENT), stage].receive(address(stage))
        except BambooError as error:
            return type(error).__name__, str(error)
        finally:
            links.close()

    def coordinate(pen: Pen) -> Any:
        pen.plan(ROW)
        processes = pids(pen.store, ROW.owners[0])
        time.sleep(0.3)
        since = time.monotonic()
        os.kill(processes[victim], signal.SIGKILL)
        found = reports(pen.store, count=2, within_seconds=5, since=since)
        time.sleep(0.3)
        later = reports(pen.store, count=99, within_seconds=time.monotonic() - since + 0.01, since=since)
        pen.plan(dead(ROW, victim))
        return {**later, **found}

    results = job(script, ROW.owners[0], coordinate=coordinate)
    found = values(results[-1:])[0]
    print("reported after", {pair: round(seconds, 3) for pair, seconds in found.items()})
    assert set(found) == {(other, victim) for other in ROW.neighbours(victim, redundancy=True)}
    assert max(found.values()) < 0.5  # alone it is a few hundredths
    for result, worker in zip(results, ROW.owners[0], strict=False):
        if worker != victim:
            assert result.value == ("PlanChangedError", "plan 0.0 was replaced by 0.1: it was killed")


@pytest.mark.parametrize("first", ["plan", "death"])
def test_a_link_that_stays_under_a_newer_plan_is_reported_under_that_one(job: Job, first: str) -> None:
    """What was reported under a plan that was replaced says nothing any more: the loss would be seen by its lease."""
    newer, victim = Plan(owners=ROW.owners, version=1, cause="somewhere else"), 11

    def script(worker: int) -> Any:
        world, links = connect(ROW)
        links.world.barrier()
        links.forget()
        present(world)
        if worker == victim and first == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        await_version(world, 1)
        links.adopt(world.member.current())
        world.member.store.put(f"adopted/{worker}", b"")
        if worker == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        await_keys(world.member.store, "over")
        links.close()

    def coordinate(pen: Pen) -> Any:
        pen.plan(ROW)
        if first == "death":
            reports(pen.store, count=2, within_seconds=10, since=time.monotonic())
        else:
            pids(pen.store, ROW.owners[0])
        pen.plan(newer)
        others = [worker for worker in ROW.workers if worker != victim]
        await_keys(pen.store, *(f"adopted/{worker}" for worker in others))
        since, found = time.monotonic(), set[tuple[int, int]]()
        while len(found) < 2 and time.monotonic() < since + 5:
            entries = pen.store.list(f"{keys.SUSPECTS}0.1/").entries
            records = [codec.decode(LinkReport, entry.value) for entry in entries]
            found = {(record.reporter, record.suspect) for record in records}
        pen.store.put("over", b"")
        return found

    found = values(job(script, ROW.owners[0], coordinate=coordinate)[-1:])[0]
    assert found == {(other, victim) for other in ROW.neighbours(victim, redundancy=True)}


def test_a_worker_that_ends_in_order_is_not_reported(job: Job) -> None:
    def script(worker: int) -> Any:
        world, links = connect(ROW)
        links.world.barrier()
        present(world)
        said = ""
        if worker == 5:
            try:
                links.inbound[Kind.GRADIENT, 1].receive(address(1))
            except BambooError as error:
                said = str(error)
        if worker != 8:
            await_keys(world.member.store, "over")
        links.close()
        return said

    def coordinate(pen: Pen) -> Any:
        pen.plan(ROW)
        pids(pen.store, ROW.owners[0])
        time.sleep(1.0)
        found = pen.store.list(keys.SUSPECTS).entries
        pen.store.put("over", b"")
        time.sleep(1.0)
        return [entry.key for entry in (*found, *pen.store.list(keys.SUSPECTS).entries)]

    told = "the link to worker 8 (stage 2 of pipeline 0) broke: it was closed there"
    assert values(job(script, ROW.owners[0], coordinate=coordinate)) == ["", told, "", "", []]


# ---- every kind of wait ends with the news ---------------------------------------------------------------------


def waits_of(links: Network) -> dict[str, Callable[[], Any]]:
    """Return every kind of wait of worker 3 on worker 5. Both call it, as groups form by it."""
    group, pipeline = links.reduction("stage-0"), links.pipeline
    assert pipeline is not None
    pipeline.barrier()
    return {
        "receive": lambda: links.inbound[Kind.GRADIENT, 0].receive(address(0)),
        "sum": lambda: group.start_sum(ones(group))(),
        "gather": lambda: pipeline.gather_bytes(b"x"),
        "broadcast": lambda: group.start_broadcast(torch.ones(3), source=5)(),
    }


@pytest.mark.parametrize("news", ["plan", "failure", "eviction"])
@pytest.mark.parametrize("kind", ["receive", "sum", "gather", "broadcast"])
def test_news_ends_every_kind_of_wait_on_a_hung_peer(job: Job, kind: str, news: str) -> None:
    def script(worker: int) -> Any:
        world, links = connect(PAIR)
        waits = waits_of(links)
        present(world)
        if worker == 5:
            await_keys(world.member.store, "over")
            links.close()
            return None
        try:
            waits[kind]()
            return "it did not raise", 0.0
        except BambooError as error:
            heard, found = time.time(), type(error).__name__
        world.member.store.put("over", b"")
        decided = float(world.member.store.get("decided").value)
        links.close()
        return found, heard - decided

    def coordinate(pen: Pen) -> None:
        pen.plan(PAIR)
        pids(pen.store, PAIR.owners[0])
        time.sleep(0.1)
        pen.store.put("decided", str(time.time()).encode())
        pen.fail() if news == "failure" else pen.plan(dead(PAIR, 3 if news == "eviction" else 5))

    found, seconds = values(job(script, PAIR.owners[0], coordinate=coordinate))[0]
    print(f"{kind} ended {1000 * seconds:.0f} ms after the {news}")
    assert found == {"plan": "PlanChangedError", "failure": "PeerLostError", "eviction": "EvictedError"}[news]
    assert seconds < 0.2


def test_a_sum_that_news_has_interrupted_may_be_waited_for_again(job: Job) -> None:
    """The news was of others: this group goes on as it is."""

    def script(worker: int) -> Any:
        world, links = connect(PAIR)
        group = links.reduction("stage-0")
        links.world.barrier()
        links.forget()
        present(world)
        if worker == 5:
            await_keys(world.member.store, "heard")
        total, interrupted = ones(group), False
        wait = group.start_sum(total)
        try:
            wait()
        except PlanChangedError:
            interrupted = True
            world.member.store.put("heard", b"")
        if links.plan.version == 0:
            await_version(world, 1)
            links.adopt(world.member.current())
        assert links.reduction("stage-0") is group
        wait()
        links.world.barrier()
        links.close()
        return interrupted, total[0].tolist()

    def coordinate(pen: Pen) -> None:
        pen.plan(PAIR)
        pids(pen.store, PAIR.owners[0])
        time.sleep(0.1)
        pen.plan(Plan(owners=PAIR.owners, version=1, cause="somewhere else"))

    first, second = values(job(script, PAIR.owners[0], coordinate=coordinate))[:2]
    assert first == (True, [2.0] * 2)
    assert second[1] == [2.0] * 2


@pytest.mark.parametrize("kind", ["receive", "sum", "gather", "broadcast"])
@pytest.mark.parametrize("judged", [True, False])
def test_who_meets_a_broken_link_waits_for_the_verdict(job: Job, kind: str, judged: bool) -> None:
    def script(worker: int) -> Any:
        world, links = connect(PAIR, timeout_seconds=20.0 if judged else 1.0)
        waits = waits_of(links)
        links.world.barrier()
        present(world)
        if worker == 5:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            waits[kind]()
            return "it did not raise", "", 0.0
        except BambooError as error:
            return type(error).__name__, str(error), time.monotonic() - began

    def coordinate(pen: Pen) -> None:
        pen.plan(PAIR)
        while not pen.store.list(keys.SUSPECTS).entries:
            time.sleep(0.005)
        time.sleep(0.5)
        if judged:
            pen.plan(dead(PAIR, 5))

    found, message, seconds = job(script, PAIR.owners[0], coordinate=coordinate)[0].value
    assert found == ("PlanChangedError" if judged else "PeerLostError"), message
    assert ("was replaced by 0.1" if judged else "broke") in message
    assert 0.5 < seconds < 4


def follow(world: Any, links: Network, version: int) -> None:
    """Wait for a version of the plan and adopt it."""
    await_version(world, version)
    links.adopt(world.member.current())


def is_lost_after_one_message(world: Any, links: Network) -> None:
    links.outbound[Kind.ACTIVATION, 0].send(a_message(1, 0))
    await_keys(world.member.store, "received")
    os.kill(os.getpid(), signal.SIGKILL)


def takes_over_and_sends_in_vain(world: Any, links: Network) -> int:
    follow(world, links, 1)
    assert links.held(0, step=0) == 1
    await_keys(world.member.store, "deaf")
    for micro_batch in (1, 2):
        links.outbound[Kind.ACTIVATION, 0].send(a_message(1, micro_batch))
    world.member.store.put("again", b"")
    follow(world, links, 2)
    await_keys(world.member.store, "over")
    return 0


def receives_the_first_and_then_nothing(world: Any, links: Network) -> int:
    received = [links.inbound[Kind.ACTIVATION, 1].receive(address(1, 0))]
    world.member.store.put("received", b"")
    follow(world, links, 1)
    links.inbound[Kind.ACTIVATION, 1].close()
    world.member.store.put("deaf", b"")
    follow(world, links, 2)
    received += [links.inbound[Kind.ACTIVATION, 1].receive(address(1, micro_batch)) for micro_batch in (1, 2)]
    world.member.store.put("over", b"")
    return len(received)


def test_what_the_new_owner_of_a_stage_has_sent_is_sent_again_when_the_plan_changes_once_more(job: Job) -> None:
    """Its journal begins with what the successor lacked, not with the first message of the step."""
    first = Plan(owners=((3, 5, 8),))
    taken = replace(dead(first, 3), owners=((8, 5, 8),))
    parts = {3: is_lost_after_one_message, 5: receives_the_first_and_then_nothing, 8: takes_over_and_sends_in_vain}

    def script(worker: int) -> Any:
        world, links = connect(first)
        links.world.barrier()
        told = parts[worker](world, links)
        links.close()
        return told

    def coordinate(pen: Pen) -> None:
        pen.plan(first)
        await_keys(pen.store, "received")
        pen.plan(taken)
        await_keys(pen.store, "again")
        pen.plan(replace(taken, version=2, cause="somewhere else"))

    results = job(script, first.owners[0], coordinate=coordinate)
    assert values(results[1:3]) == [3, 0]


# ---- forming ---------------------------------------------------------------------------------------------------


def await_version(world: Any, version: int) -> None:
    """Wait for a plan of at least this version."""
    while True:
        try:
            if world.member.current().version >= version:
                return
        except BambooError:
            pass
        time.sleep(0.001)


def test_a_construction_that_news_has_interrupted_is_tried_again_in_the_same_process(job: Job) -> None:
    """Twenty times: worker 8 comes too late each time, and all meet under the next plan. Then they end in order."""
    rounds = 20

    def script(worker: int) -> Any:
        world = join()
        interrupted = 0
        for version in range(0, 2 * rounds, 2):
            links = None
            await_version(world, version + (worker == 8))
            try:
                links = network(world)
            except PlanChangedError:
                interrupted += 1
            await_version(world, version + 1)
            links = links or network(world)
            assert links.plan.version == version + 1
            assert links.world.gather_bytes(bytes([worker])) == [b"\x03", b"\x05", b"\x08"]
            links.world.barrier()
            links.close()
            world.member.store.put(f"done/{version}/{worker}", b"")
        return interrupted

    def coordinate(pen: Pen) -> None:
        for version in range(0, 2 * rounds, 2):
            pen.plan(Plan(owners=((3, 5, 8),), version=version))
            time.sleep(0.02 + 0.002 * version)
            pen.plan(Plan(owners=((3, 5, 8),), version=version + 1))
            await_keys(pen.store, *(f"done/{version}/{worker}" for worker in (3, 5, 8)))

    results = job(script, (3, 5, 8), coordinate=coordinate, exit_naturally=True, timeout_seconds=100)
    assert min(values(results)[:2]) > rounds // 2, "some came so late that they saw the next plan only"
    assert [result.exit_code for result in results] == [0] * 4


def test_a_peer_that_hangs_while_a_group_forms_holds_nobody_up_after_the_news(job: Job) -> None:
    """Worker 5 writes its address and hangs before it connects: gloo alone would wait for the time-out."""

    def script(worker: int) -> Any:
        from bamboo_ds.world.rendezvous import RendezvousStore

        take = RendezvousStore.get

        def hang(self: Any, key: str) -> bytes:
            self._backing.set("hangs", b"")
            os.kill(os.getpid(), signal.SIGSTOP)
            return take(self, key)

        present(world := join())
        if worker == 5:
            RendezvousStore.get = hang  # type: ignore[method-assign]
            Network.pipeline = property(lambda _: time.sleep(60))  # type: ignore[assignment, method-assign]
        take_seat(world, 2)
        try:
            network(world)
            return "it did not raise", 0.0
        except BambooError as error:
            return type(error).__name__, time.time()

    def coordinate(pen: Pen) -> float:
        pen.plan(PAIR)
        await_keys(pen.store, f"{keys.rendezvous((0, 0), 'engine-0')}hangs")
        time.sleep(0.3)
        decided = time.time()
        pen.plan(dead(PAIR, 5))
        time.sleep(2.0)
        os.kill(pids(pen.store, PAIR.owners[0])[5], signal.SIGKILL)
        return decided

    results = job(script, PAIR.owners[0], coordinate=coordinate, exit_naturally=True)
    (kind, heard), decided = values([results[0], results[2]])
    print(f"construction ended {1000 * (heard - decided):.0f} ms after the plan")
    assert kind == "PlanChangedError"
    assert heard - decided < 0.6


def test_a_group_forms_through_an_outage_of_the_store(job: Job) -> None:
    """A write that the store did not answer is made again."""

    def script(worker: int) -> Any:
        world = join()
        put, failures = world.member.store.put, [3]

        def failing(*arguments: Any, **options: Any) -> Any:
            if failures[0] and threading.current_thread().name == "bamboo-group":
                failures[0] -= 1
                raise StoreUnavailableError("no answer")
            return put(*arguments, **options)

        world.member.store.put = failing
        take_seat(world, 2)
        links = network(world)
        links.world.barrier()
        links.close()
        return failures[0]

    assert values(job(script, PAIR.owners[0], coordinate=lambda pen: pen.plan(PAIR)))[:2] == [0, 0]
