"""All links and groups of one worker, and how they follow the plan.

The links of a worker and the group of its pipeline form all at once, so none waits for the neighbours of another, and
forming them cannot deadlock. The gradient groups, which nobody needs before the first sums, form in the background
while the first step runs, likewise all at once; whoever needs one waits for them. Others form when they are first used,
which all members do in the same order.

In a cluster each worker must also notice the death of both its neighbours in the ring of its pipeline. Between the
first and the last stage no messages pass; two links that carry none let them notice each other's.

When a worker dies, only its *edges* change: each is one directed link between two stages, and the worker that owns the
lost stage now makes it anew with the neighbour, who carries over what it has received and re-sends what it has sent. An
edge or group that was made after the last commit is made anew, too, when the plan changes again: one of its ends may
have been interrupted in the making, and the other cannot know. A commit proves that all are there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from bamboo_ds.comm.doors import Door, Sign
from bamboo_ds.comm.groups import Group, GroupFactory, SeatGroup
from bamboo_ds.comm.links import Held, InboundLink, Message, OutboundLink
from bamboo_ds.comm.rendezvous import KeyValue, keys_below
from bamboo_ds.comm.transfer import Background, Courier, Parcel, Rooms, all_at_once
from bamboo_ds.comm.waits import Waits
from bamboo_ds.comm.wire import Kind
from bamboo_ds.elastic import keys
from bamboo_ds.errors import BambooError, PeerLostError, ScheduleError
from bamboo_ds.plan import Plan, PlanSource, Seat

_GOODBYE_SECONDS = 0.5  # for all goodbyes together to leave


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """One directed link between two stages of a pipeline.

    Attributes:
        order: links are listed in this order.
        kind: what passes.
        source: the stage that sends.
        target: the stage that receives.
    """

    order: int
    kind: Kind
    source: int
    target: int


class Network:
    """What a worker sends and reduces through, once it was told to `form`.

    Args:
        source: hears of broken links, and knows whether the plan is still the newest.
        plan: in which this worker has a place.
        backing: the store through which groups form.
        instance: distinguishes engines of one process.
        reductions: the gradient groups by name: the stages whose holders reduce together (one stage, or all that
            share a tied layer).
        redundancy: whether shadows hold redundant layers.
        timeout_seconds: the one time-out of every wait.
        alarm: called while waiting; raises when another worker has failed.
        address: at which other nodes reach this worker; empty for gloo's own choice.
        row: hung out for all workers of the plan before anything else, with the way to this worker's door; see
            `posted`. Without one no state can be carried.

    Attributes:
        plan: the one that these links belong to.
        pipeline_id: this worker's pipeline.
        inbound: links by kind and the stage that receives, which is this worker's.
        outbound: links by kind and the stage that sends, which is this worker's.
    """

    def __init__(
        self,
        source: PlanSource,
        *,
        plan: Plan,
        backing: KeyValue,
        instance: int,
        reductions: Mapping[str, frozenset[int]],
        redundancy: bool,
        timeout_seconds: float,
        alarm: Callable[[], None] = lambda: None,
        address: str = "",
        row: bytes | None = None,
    ) -> None:
        self.plan, self._source, self._alarm = plan, source, alarm
        self.pipeline_id = self.plan.place(source.worker).pipeline
        self._backing, self._scope, self._address = backing, f"engine-{instance}", address
        self._stages, self._redundancy = reductions, redundancy
        self._waits = Waits(check=self._check, timeout_seconds=timeout_seconds, elastic=source.elastic)
        self.inbound: dict[tuple[Kind, int], InboundLink] = {}
        self.outbound: dict[tuple[Kind, int], OutboundLink] = {}
        self._ends: dict[Edge, tuple[int, int]] = {}
        self._kept_under: dict[Edge, Plan] = {}
        self._unread: dict[Edge, tuple[list[Message], Held]] = {}
        self._journals: dict[Edge, list[Message]] = {}
        self._told: dict[Edge, Held] = {}
        self._reductions: dict[str, tuple[tuple[Seat, ...], SeatGroup]] = {}
        self._groups: dict[str, Group] = {}
        self._settled: set[Edge | str] = set()
        self._ahead: Background | None = None
        self._closings: list[Background] = []
        self._is_closed = False
        self._factory = self._new_factory()
        self._unsubscribe = source.subscribe(self._wake)
        self._door: Door | None = None
        self._signs: dict[int, Sign] = {}
        if row is not None:
            self._door = Door(address, waits=self._waits)
            told = {"sign": asdict(self._door.sign), "row": row.decode()}
            self._factory.store.set(f"rows/{source.worker}", json.dumps(told))

    def form(self) -> None:
        """Form the links and the group of the pipeline; all workers of the plan do.

        Raises:
            PlanChangedError: there is a newer one. Close the network.
            PeerLostError: another worker is gone, and the cluster knows nothing of it. Close the network.
        """
        tasks: list[Callable[[], object]] = [self._renew_all]
        if self._source.elastic:  # the first round of all workers needs it
            tasks.append(lambda: self.pipeline)
        try:
            all_at_once(tasks)
        finally:
            self._factory.rest()

    def form_ahead(self) -> None:
        """Begin to form the gradient groups in the background; whoever needs one of them waits for all."""
        self._ahead = Background(lambda: self._form_missing(filter(self._has_seat, sorted(self._stages))))

    # ---- what the engine uses ----------------------------------------------------------------------------------

    @property
    def timeout(self) -> timedelta:
        """The one time-out of every wait."""
        return self._waits.timeout

    @property
    def world(self) -> Group:
        """The group of all workers of the plan."""
        return self._group("world", self.plan.workers)

    @property
    def pipeline(self) -> Group | None:
        """The group of the workers of this pipeline; None when there is only one."""
        owners = tuple(sorted(set(self.plan.owners[self.pipeline_id])))
        return self._group(f"pipeline-{self.pipeline_id}", owners) if len(owners) > 1 else None

    def reduction(self, name: str) -> SeatGroup:
        """Return the group of a reduction, in which this worker has a seat."""
        self.form_reductions([name])
        return self._reductions[name][1]

    def form_reductions(self, names: Iterable[str]) -> None:
        """Form the groups of these reductions that are missing, all at once; this worker has a seat in each."""
        self._await_ahead()
        self._form_missing(names)

    def posted(self) -> list[bytes]:
        """Wait for the rows that all workers of the plan have hung out, and return them in the order of ids."""
        names = [f"rows/{worker}" for worker in self.plan.workers]
        self._factory.store.wait(names)
        told = [json.loads(self._factory.store.get(name)) for name in names]
        self._signs = {worker: Sign(**one["sign"]) for worker, one in zip(self.plan.workers, told, strict=True)}
        return [one["row"].encode() for one in told]

    def carry(
        self, outgoing: Mapping[int, Sequence[Parcel]], incoming: Iterable[int], *, rooms: Rooms
    ) -> dict[int, list[Parcel]]:
        """Send and receive state, once all rows were `posted`; see `Courier`.

        Raises:
            ScheduleError: this worker has hung out no row.
        """
        if self._door is None:
            raise ScheduleError("state can be carried only between workers that have hung out a row")
        courier = Courier(self._source.worker, door=self._door, signs=self._signs, waits=self._waits, rooms=rooms)
        try:
            return courier.carry(outgoing, incoming)
        finally:
            self._door.close()

    def held(self, stage: int, *, step: int) -> int:
        """Return how many activations of a step the receiver of a stage's outputs had when the link was made."""
        found = [told for edge, told in self._told.items() if (edge.kind, edge.source) == (Kind.ACTIVATION, stage)]
        return sum(told.count for told in found if (told.step, told.attempt) == (step, 0))

    def sent(self, kind: Kind, stage: int) -> list[Message]:
        """Return what this worker has sent from a stage in this step, also through a link that is gone."""
        if (kind, stage) in self.outbound:
            return self.outbound[kind, stage].journal()
        kept = [messages for edge, messages in self._journals.items() if (edge.kind, edge.source) == (kind, stage)]
        return kept[0] if kept else []

    def forget(self) -> None:
        """Drop the journals: the step has committed, so all links and groups of this plan are whole."""
        self.drop_journals()
        self._settled = {*self._ends, *self._reductions}
        self._told = {}
        self._factory.rest()

    def drop_journals(self) -> None:
        """Forget what was sent."""
        self._journals = {}
        for link in self.outbound.values():
            link.forget(self.timeout)

    def close(self) -> None:
        """End all links and groups, in order: gloo may abort a process that exits with live groups.

        The peers hear that it is in order, and do not report it.
        """
        self._unsubscribe()
        self._is_closed = True
        self._give_up_ahead()
        if self._door is not None:
            self._door.close()
        for outbound in self.outbound.values():
            outbound.say_goodbye()
        deadline = time.monotonic() + _GOODBYE_SECONDS
        for outbound in self.outbound.values():
            outbound.close(within_seconds=deadline - time.monotonic())
        for inbound in self.inbound.values():
            inbound.close()
        for _, reduction in self._reductions.values():
            reduction.close()
        for group in self._groups.values():
            group.close()
        for closing in self._closings:
            closing.wait()

    # ---- following the plan ------------------------------------------------------------------------------------

    def adopt(self, plan: Plan) -> int:
        """Make the links of a newer version of the plan.

        May be called again after it was interrupted, with a still newer plan.

        Returns:
            Bytes of tensors that were sent again.

        Raises:
            PlanChangedError: there is a newer one.
            PeerLostError: a neighbour is gone, and the cluster knows nothing of it.
        """
        self._give_up_ahead()
        self.plan = plan
        self._factory = self._new_factory()
        for edge in self._edges():
            self._part(edge)
        for edge in self._ends:
            self._keep(edge)
        self._drop_groups()
        return self._renew_all()

    def _check(self) -> None:
        if self._is_closed:
            raise PeerLostError("the network was closed while groups formed")
        self._source.check(self.plan)
        self._alarm()

    def _give_up_ahead(self) -> None:
        """Wait for the groups that still form in the background: soon they are there, or not wanted any more."""
        with contextlib.suppress(BambooError):
            self._await_ahead()

    def _await_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.result()

    def _form_missing(self, names: Iterable[str]) -> None:
        seats = {name: self._seats(name) for name in names}
        missing = {name: told for name, told in seats.items() if self._reductions.get(name, ((),))[0] != told}
        groups = self._factory.seated({f"reduce-{name}": told for name, told in missing.items()})
        for (name, told), group in zip(missing.items(), groups, strict=True):
            self._reductions[name] = told, group

    def _new_factory(self) -> GroupFactory:
        return GroupFactory(
            keys_below(self._backing, keys.rendezvous(self.plan.number, self._scope)),
            prefix="groups",
            worker=self._source.worker,
            timeout_seconds=self._waits.timeout_seconds,
            check=self._check,
            address=self._address,
            waits=self._waits,
        )

    def _wake(self) -> None:
        """Let all waits look at the news; called from the thread that brings it."""
        self._waits.wake()
        for link in list(self.inbound.values()):
            link.wake()

    def _edges(self) -> Iterator[Edge]:
        """Yield the edges of this worker's pipeline, in order."""
        last = self.plan.num_stages - 1
        for stage in range(last):
            yield Edge(stage, Kind.ACTIVATION, stage, stage + 1)
            yield Edge(stage, Kind.GRADIENT, stage + 1, stage)
        if self._source.elastic and self._redundancy and last > 1:
            yield Edge(last, Kind.RING, last, 0)
            yield Edge(last, Kind.RING, 0, last)

    def _wanted(self, edge: Edge) -> tuple[int, int] | None:
        """Return sender and receiver of an edge; None when this worker is neither, or both."""
        owners = self.plan.owners[self.pipeline_id]
        ends = owners[edge.source], owners[edge.target]
        return ends if ends[0] != ends[1] and self._source.worker in ends else None

    def _part(self, edge: Edge) -> None:
        """End a link that is not to stay, and keep what the next one of this edge must know."""
        if edge not in self._ends or (self._ends[edge] == self._wanted(edge) and edge in self._settled):
            return
        ends = self._ends.pop(edge)
        self._settled.discard(edge)
        if ends[0] == self._source.worker:
            outbound = self.outbound.pop((edge.kind, edge.source))
            self._journals[edge] = outbound.journal()
            outbound.close()
        else:
            self._unread[edge] = self.inbound.pop((edge.kind, edge.target)).abandon()

    def _keep(self, edge: Edge) -> None:
        """Let a link stay under the current plan: reports are of a plan, and what was said under another is void."""
        self._kept_under[edge] = self.plan
        link = self.inbound.get((edge.kind, edge.target))
        if self._ends[edge][1] == self._source.worker and link is not None and link.broken:
            self._report(edge, self._ends[edge][0], link.broken)

    def _report(self, edge: Edge, sender: int, detail: str) -> None:
        """Tell the cluster that the link from a neighbour is broken; may be called from the link's thread."""
        self._source.report(sender, detail, plan=self._kept_under[edge])

    def _renew_all(self) -> int:
        """Make the links that are missing; return how many bytes were sent again through them."""
        missing = {
            edge: ends for edge in self._edges() if edge not in self._ends and (ends := self._wanted(edge)) is not None
        }
        for edge, (_, receiver) in missing.items():
            self._kept_under[edge] = self.plan
            if receiver == self._source.worker:
                held = self._unread.get(edge, ([], Held()))[1]
                self._factory.store.set(f"held/{self._name(edge)}", json.dumps(asdict(held)))
        groups = self._factory.hosts({self._name(edge): ends for edge, ends in missing.items()})
        return sum(self._open(edge, ends, group) for (edge, ends), group in zip(missing.items(), groups, strict=True))

    def _name(self, edge: Edge) -> str:
        return f"{edge.kind.name.lower()}-{self.pipeline_id}-{edge.source}-{edge.target}"

    def _open(self, edge: Edge, ends: tuple[int, int], group: Group) -> int:
        sends = self._source.worker == ends[0]
        unread, held = self._unread.get(edge, ([], Held()))
        resent = self._open_outbound(edge, group) if sends else self._open_inbound(edge, group, unread, held)
        self._ends[edge] = ends
        self._unread.pop(edge, None)
        self._journals.pop(edge, None)
        return resent

    def _open_outbound(self, edge: Edge, group: Group) -> int:
        told = Held(**json.loads(self._factory.store.get(f"held/{group.name}")))
        peer, journal = self._peer(edge.target), self._journals.get(edge, ())
        link = OutboundLink(group, peer=peer, waits=self._waits, journal=journal)
        self.outbound[edge.kind, edge.source], self._told[edge] = link, told
        return link.resend(told)

    def _open_inbound(self, edge: Edge, group: Group, unread: Sequence[Message], held: Held) -> int:
        self.inbound[edge.kind, edge.target] = InboundLink(
            group,
            peer=self._peer(edge.source),
            waits=self._waits,
            on_broken=functools.partial(self._report, edge, group.members[0]),
            carried=unread,
            held=held,
        )
        return 0

    def _peer(self, stage: int) -> str:
        return f"worker {self.plan.owners[self.pipeline_id][stage]} (stage {stage} of pipeline {self.pipeline_id})"

    def _group(self, name: str, members: tuple[int, ...]) -> Group:
        if name not in self._groups:
            self._groups[name] = self._factory.host(name, members)
        return self._groups[name]

    def _drop_groups(self) -> None:
        """End groups that have lost a member, or may not be whole; in the background, as that takes gloo a while."""
        dropped: list[Group | SeatGroup] = list(self._groups.values())
        self._groups = {}
        for name, (seats, group) in list(self._reductions.items()):
            if seats != self._seats(name) or name not in self._settled:
                del self._reductions[name]
                self._settled.discard(name)
                dropped.append(group)
        if dropped:
            self._closings.append(Background(lambda: [group.close() for group in dropped]))

    def _has_seat(self, name: str) -> bool:
        return any(seat.worker == self._source.worker for seat in self._seats(name))

    def _seats(self, name: str) -> tuple[Seat, ...]:
        return self.plan.seats(self._stages[name], redundancy=self._redundancy)
