"""Whatever happens to a cluster, in whatever order, the plans keep their promises.

A `World` plays random stories through `decide` and keeps books of its own: who was placed where when the epoch began,
who died since. The promises are checked against these books, not against the plan's own functions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import event as note
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.plan import Plan, static_plan
from bamboo_ds.plan.cluster import Bounds, Cluster, Node, Shape
from bamboo_ds.plan.codec import decode, encode
from bamboo_ds.plan.membership import Cause, Evidence, Loss, judge
from bamboo_ds.plan.model import Model
from bamboo_ds.plan.plan import NOBODY
from bamboo_ds.plan.policy import Action, Boundary, Event, Joined, Launched, Lost, PlanDecision, decide

WITH_PLAN = {Action.START, Action.FAILOVER, Action.ABORT, Action.RECONFIGURE, Action.RESTORE}


@dataclass
class World:
    """A cluster in which things happen.

    Attributes:
        bounds: of the job.
        nodes: whose lease lives.
        plan: the current one.
        dead: workers declared dead.
        homes: owners when the epoch began.
        born: workers so far.
        settled: whether a step of this epoch has committed.
        broken: whether somebody with a stage was lost before.
    """

    bounds: Bounds
    nodes: list[Node] = field(default_factory=list)
    plan: Plan | None = None
    dead: set[int] = field(default_factory=set)
    homes: tuple[tuple[int, ...], ...] = ()
    born: int = 0
    settled: bool = False
    broken: bool = False

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.bounds, tuple(self.nodes))

    @property
    def alive(self) -> set[int]:
        return {worker for node in self.nodes for worker in node.workers} - self.dead

    def join(self, zone: str, workers: int) -> Event:
        ids = tuple(range(self.born, self.born + workers))
        self.nodes.append(Node(f"node{self.born}", zone, ids))
        self.born += workers
        return Joined(ids)

    def kill(self, picks: list[int]) -> Event:
        """End some workers; their nodes live on, and go on listing those that the plan must remember as dead."""
        alive = sorted(self.alive)
        victims = sorted({alive[pick % len(alive)] for pick in picks}) if alive else []
        placed = self.plan.workers if self.plan else ()
        self.forget([victim for victim in victims if victim not in placed])
        self.dead.update(victims)
        losses = tuple(Loss(victim, Cause.EXIT, f"worker {victim} ended") for victim in victims)
        return Lost(losses, settled=self.settled)

    def forget(self, workers: list[int]) -> None:
        """Strike workers off their nodes' lists, as agents do."""
        left = (Node(n.name, n.zone, tuple(w for w in n.workers if w not in workers)) for n in self.nodes)
        self.nodes = [node for node in left if node.workers]

    def take_away(self, pick: int) -> Event:
        """End a node: its lease is gone."""
        node = self.nodes.pop(pick % len(self.nodes)) if self.nodes else None
        self.dead.update(node.workers if node else ())
        return Lost(judge(self.cluster, self.plan, Evidence()) if self.plan else (), settled=self.settled)

    def commit(self) -> Event:
        """End a step; where nobody trains, the work of the step was dropped."""
        self.settled = self.plan is not None and not self.plan.aborted
        return Boundary()

    def launch(self, pipelines: int) -> Event:
        """Say where a launcher put the first workers; they may not all be there."""
        stages = self.bounds.num_stages
        return Launched(static_plan(world_size=stages * pipelines, num_stages=stages))

    def held(self) -> dict[int, set[int]]:
        """The stages each worker placed in this epoch has layers of."""
        stages: dict[int, set[int]] = {}
        for row in self.homes:
            for stage, worker in enumerate(row):
                stages[worker] = {stage, (stage + 1) % len(row)} if self.bounds.redundancy else {stage}
        return stages

    def happen(self, event: Event) -> PlanDecision:
        before, decision = self.plan, decide(self.cluster, self.plan, event)
        assert decide(Cluster(self.bounds, tuple(reversed(self.nodes))), self.plan, event) == decision
        assert (decision.plan is not None) == (decision.action in WITH_PLAN)
        if decision.plan is not None:
            assert before is None or decision.plan.number > before.number
            self.check_step(before, decision, event)
            self.plan = decision.plan
            assert self.plan.dead >= (before.dead if before else set()), "who was declared dead stays so"
            assert decode(Plan, encode(self.plan)) == self.plan
        elif isinstance(event, Boundary) and before is not None:
            self.check_rest(before, decision)
        self.check_plan()
        return decision

    def check_rest(self, plan: Plan, decision: PlanDecision) -> None:
        """Nothing was done at a boundary: the wait for nodes is for too few, and no rule asks for another epoch."""
        shape = self.bounds.shape(len(self.alive))
        assert decision.action is (Action.WAIT if plan.aborted else Action.KEEP)
        assert not plan.aborted or shape is None
        if plan.aborted or shape is None or not set(plan.workers) <= self.alive:
            return
        aborting = self.aborting(plan) / len(plan.workers)
        if shape == Shape(plan.num_stages, plan.num_pipelines):
            assert plan.owners == plan.homes or not self.bounds.redundancy, "the gaps could have been filled"
        elif self.bounds.redundancy and pace(plan) * 1.05 >= 1 / (shape.num_stages * shape.num_pipelines):
            assert aborting < 0.5 or shape.num_stages == 1, "half of the losses would abort"
        if self.bounds.model.micro_batches is None:
            assert pace(plan) < 1.05 / (shape.num_stages * shape.num_pipelines), "another shape is faster"

    def aborting(self, plan: Plan) -> int:
        """Count the workers whose loss would abort the step, by losing each."""
        found = 0
        for worker in plan.workers:
            decision = decide(self.cluster, plan, Lost((Loss(worker, Cause.EXIT, ""),)))
            found += decision.action is Action.ABORT
        return found

    def check_step(self, before: Plan | None, decision: PlanDecision, event: Event) -> None:
        after = decision.plan
        assert after is not None
        if before is not None and before.epoch == after.epoch:
            for old, new in zip(before.owners, after.owners, strict=True):
                kept = [(o, n) for o, n in zip(old, new, strict=True) if o in self.alive]
                assert all(o == n for o, n in kept), "who lives keeps its stages until the epoch ends"
            assert decision.action is (Action.ABORT if after.aborted else Action.FAILOVER)
            self.broken |= not self.settled
            return
        if isinstance(event, Launched):
            assert (before, after.owners) == (None, event.plan.owners)
            assert set(after.workers) <= self.alive
        else:
            self.check_shape(after)
        if before is not None:
            held_by_the_living = set().union(*(s for w, s in self.held().items() if w in self.alive))
            lost_for_good = held_by_the_living != set(range(before.num_stages))
            assert after.from_checkpoint == lost_for_good == (decision.action is Action.RESTORE)
            assert before.aborted or (isinstance(event, Boundary) and self.settled)
            assert before.aborted or before.owners != after.owners
            assert after.epoch == before.epoch + 1
            again = decide(self.cluster, after, Boundary())
            assert again.action is Action.KEEP, "the same cluster gives no other epoch at once"
        assert after.parts == self.bounds.model.parts(after.num_stages)
        self.homes, self.settled, self.broken = after.owners, False, False

    def check_shape(self, plan: Plan) -> None:
        """The largest shape in the bounds, every worker once."""
        bounds, placed = self.bounds, [worker for row in plan.owners for worker in row]
        assert not plan.aborted
        assert len(set(placed)) == len(placed)
        assert plan.num_stages == min(bounds.num_stages, len(self.alive)) >= bounds.min_stages
        assert plan.num_pipelines <= (bounds.pipelines or len(placed))
        spare = len(self.alive) - len(placed)
        assert spare < plan.num_stages or plan.num_pipelines == bounds.pipelines

    def check_plan(self) -> None:
        plan = self.plan
        if plan is None:
            return
        held, holes = self.held(), 0
        assert {w for row in self.homes for w in row} & self.dead <= plan.dead <= self.dead
        for d, row in enumerate(plan.owners):
            for stage, owner in enumerate(row):
                shadow = self.homes[d][stage - 1] if self.bounds.redundancy else None
                candidates = {self.homes[d][stage], shadow} & self.alive
                holes += owner == NOBODY
                if owner == NOBODY:
                    assert not candidates, "a stage is lost only when nobody of its pipeline holds it"
                else:
                    assert owner in candidates
                    assert stage in held[owner], "nobody owns what it does not hold"
                    assert stage in plan.held_stages(owner, redundancy=self.bounds.redundancy)
        assert plan.aborted == (holes > 0 or self.broken), "no stage is without an owner unless the plan says so"
        assert not plan.dead & set(plan.workers)


def pace(plan: Plan) -> float:
    """Stages of the busiest worker, over all stages and pipelines."""
    return max(Counter(row).most_common(1)[0][1] for row in plan.owners) / (plan.num_stages * plan.num_pipelines)


models = st.builds(
    lambda micro_batches, cut: Model(
        {stages: tuple(range(0, 61, 60 // stages)) for stages in range(1, 6)} if cut else {},
        micro_batches=micro_batches,
    ),
    st.none() | st.integers(3, 16),
    st.booleans(),
)
bounds_ = st.builds(
    lambda stages, pipelines, least, redundancy, model: Bounds(
        stages, pipelines if model.micro_batches is None else pipelines or 3, min(least, stages), redundancy, model
    ),
    st.integers(1, 5),
    st.none() | st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([True, True, True, False]),
    models,
)
joins = st.tuples(st.just("join"), st.sampled_from("abc"), st.integers(1, 3))
kills = st.tuples(st.just("kill"), st.lists(st.integers(0, 30), min_size=1, max_size=4))
nodes_lost = st.tuples(st.just("take_away"), st.integers(0, 30))
boundaries = st.just(("commit",))
launches = st.tuples(st.just("launch"), st.integers(1, 3))
gatherings = st.lists(joins, min_size=4, max_size=10) | st.lists(joins, max_size=3)
stories = st.tuples(
    st.one_of(boundaries, launches, joins),
    st.lists(st.one_of(joins, kills, nodes_lost, launches, boundaries), max_size=25),
).map(lambda parts: [parts[0], *parts[1]])


def occurrence(world: World, step: tuple[object, ...]) -> Event:
    name, *arguments = step
    event: Event = getattr(world, str(name))(*arguments)
    return event


@settings(max_examples=250, deadline=None)
@given(bounds_, gatherings, stories)
def test_plans_keep_their_promises_whatever_happens(
    bounds: Bounds, gathering: list[tuple[object, ...]], story: list[tuple[object, ...]]
) -> None:
    world = World(bounds)
    for step in gathering:
        occurrence(world, step)
    for step in story:
        note(world.happen(occurrence(world, step)).action.value)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.booleans(), st.data())
def test_losses_at_once_and_one_after_another_give_the_same_owners(
    stages: int, pipelines: int, redundancy: bool, data: st.DataObject
) -> None:
    bounds = Bounds(stages, pipelines, redundancy=redundancy)
    world = World(bounds)
    world.join("a", stages * pipelines)
    start = decide(world.cluster, None, Boundary()).plan
    assert start is not None
    order = data.draw(st.permutations(range(stages * pipelines)))[: data.draw(st.integers(1, stages * pipelines))]
    losses = [Loss(worker, Cause.EXIT, "") for worker in order]
    together = decide(world.cluster, start, Lost(tuple(losses))).plan
    plan = start
    for loss in losses:
        plan = decide(world.cluster, plan, Lost((loss,))).plan or plan
    assert together is not None
    assert (together.owners, together.dead, together.aborted) == (plan.owners, plan.dead, plan.aborted)
