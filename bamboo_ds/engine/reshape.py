"""Takes a worker into a plan of another epoch, with all it knows, in the process that it is.

The same happens to everybody: to one that has trained all along, to one that begins to, to one that was left out for a
time. Each says which layers it holds and at which step; who lacks a layer is sent it by a holder, with what the
optimizer knows of it; who is not at the step of the others takes over their counters. Then all say in one round that
they have everything. Until that is decided, the epoch is *unsettled*: a worker that is lost leads to yet another epoch,
for which everybody still keeps what it had in the last that settled.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import cast

import torch
from torch import nn

from bamboo_ds.checkpoint import UnitState
from bamboo_ds.comm import Network, Parcel, all_at_once
from bamboo_ds.engine.common import CommonState, Restored
from bamboo_ds.engine.failover import Failover, Work
from bamboo_ds.engine.gradients import Unit, units_of
from bamboo_ds.engine.parameters import GroupOf, Places, groups_of, regroup
from bamboo_ds.engine.unit_state import copy_to_host, put, take, weights_of
from bamboo_ds.errors import StateLostError
from bamboo_ds.plan import Plan
from bamboo_ds.plan.shipment import Shipping, Stock, ship
from bamboo_ds.world import local_device


@dataclass(frozen=True, slots=True)
class Holding:
    """A unit that this worker has, whether or not its place needs it.

    Attributes:
        state: of the unit, at the step of the worker.
        groups: where its parameters stand in an optimizer, by the name that all workers share.
        module: whose state it is; None when it came from another worker.
        own: whether it is of the worker's own stage, as far as the script can have changed it before training.
    """

    state: UnitState
    groups: Mapping[str, GroupOf]
    module: nn.Module | None = None
    own: bool = False


@dataclass(frozen=True, slots=True)
class Delivery:
    """What this worker has heard and received at the beginning of an epoch.

    Attributes:
        shipping: what has to travel, of all.
        common: what is common to all, as each worker of an epoch that has begun knows it.
        received: units that came; none when some are lost.
        seconds: how long they travelled, here.
    """

    shipping: Shipping
    common: Mapping[int, CommonState]
    received: dict[str, Holding]
    seconds: float


@dataclass(frozen=True, slots=True)
class ReshapeReport:
    """One new epoch as this worker went through it.

    Attributes:
        number: of the plan.
        cause: why it began.
        received_bytes: of layers that came from others; `sent_bytes` likewise.
        transfer_seconds: how long layers travelled, here.
        seconds: from the moment at which this worker had stopped its own work until all had all they need.
    """

    number: tuple[int, int]
    cause: str
    received_bytes: int
    sent_bytes: int
    transfer_seconds: float
    seconds: float


class Reshaping(Failover):
    """The part of the engine that begins a new epoch."""

    _connect: Callable[[Plan, bytes], Network]
    _places: Places
    _settled: bool
    """Whether this worker has been in an epoch that has settled."""
    _kept: dict[str, Holding]
    _missing: set[str]
    _reshape_wanted: bool
    """Whether another epoch would be better than this one, as the last commit said."""
    reshapes: list[ReshapeReport]

    def _take_place(self, plan: Plan) -> None:
        """Adopt place and share of a plan, and make anew what depends on them."""
        raise NotImplementedError  # the engine knows what does

    def _meet_at_boundary(self) -> None:
        """Let another epoch begin before the next step, if it would still be better: all workers are about to train.

        Not at the commit itself: then a script may go on to evaluate, which one that joins knows nothing of.
        """
        while self._reshape_wanted:
            with self._through_plan_changes(self._adopt_newest):
                self._committer.share("", boundary=True)
                self._reshape_wanted = False
        self._adopt_newest()

    @property
    def _is_first(self) -> bool:
        """Whether this worker speaks for all."""
        raise NotImplementedError  # the checkpointing part of the engine knows

    def _restored(self, units: Mapping[str, Unit]) -> Restored:
        """Read what the newest whole checkpoint has of these units."""
        raise NotImplementedError  # the checkpointing part of the engine does

    # ---- a new epoch -------------------------------------------------------------------------------------------

    def _reshape(self, plan: Plan, work: Work | None) -> None:
        """Drop the running step and follow a plan of another epoch; wait where it has no place for this worker."""
        stopped = time.monotonic()
        self._drop_step()
        self._keep_holdings()
        self._leave_network()
        self.plan = plan
        if plan.aborted or self._source.worker not in plan.workers:
            self._source.await_place(plan)
            return
        self._begin_epoch(plan, stopped)
        if work is not None:
            self._restart_step(work)

    def _begin_epoch(self, plan: Plan, stopped: float) -> None:
        self.module.move(plan, redundancy=self.bamboo.redundancy != "off", dtype=self._held_dtype())
        units = self._held_units()
        self._missing = set(units)
        delivery = self._connect_and_carry(plan, self._stock_row(units))
        shipping, received = delivery.shipping, delivery.received
        if shipping.lost:
            received = self._restore(units, shipping.lost)
        else:
            self._catch_up(shipping, delivery.common)
        self._fill(units, received)
        self._take_place(plan)
        self._settle()
        self.network.form_ahead()
        sent = () if shipping.lost else shipping.shipments
        moved = [one for one in sent if self._source.worker in (one.source, one.target)]
        self._report_epoch(
            ReshapeReport(
                number=plan.number,
                cause=plan.cause,
                received_bytes=sum(one.bytes for one in moved if one.target == self._source.worker),
                sent_bytes=sum(one.bytes for one in moved if one.source == self._source.worker),
                transfer_seconds=delivery.seconds,
                seconds=time.monotonic() - stopped,
            )
        )

    def _held_dtype(self) -> torch.dtype | None:
        dtype: torch.dtype | None = self._mixed_precision_dtypes()[0]
        return dtype

    def _held_units(self) -> dict[str, Unit]:
        return {unit.name: unit for units in units_of(self.module).values() for unit in units}

    def _close_network(self) -> None:
        """End links and groups. Until there are others, `network` is None."""
        network, self.network = self.network, cast(Network, None)
        if network is not None:
            network.close()

    def _leave_network(self) -> None:
        """End links and groups in the background: the next ones need not wait for that."""
        network, self.network = self.network, cast(Network, None)
        if network is not None:
            threading.Thread(target=network.close, name="bamboo-close", daemon=True).start()

    # ---- what is there -----------------------------------------------------------------------------------------

    def _keep_holdings(self) -> None:
        """Keep what this worker has until everybody has what it needs: it may be the only one who has it."""
        groups, own = groups_of(self.module, self.optimizer), set(self._own_unit_names())
        for name, unit in self._held_units().items():
            if name not in self._missing:
                self._kept[name] = Holding(
                    state=take(unit, self.optimizer),
                    groups=_of_unit(groups, name),
                    module=unit.module,
                    own=name in own,
                )

    def _own_unit_names(self) -> Iterator[str]:
        """Yield the units whose copy here is what the script has made of them."""
        sources = self.module.tied_source_stages()
        for unit in self._held_units().values():
            _, _, key = unit.name.partition(":")
            if self.module.own_stage in unit.stages and (not key or sources[key] == self.module.own_stage):
                yield unit.name

    def _stock_row(self, units: Mapping[str, Unit]) -> bytes:
        """Tell the others what this worker has and needs."""
        mine = self._stock(units)
        common = asdict(CommonState.of(self)) if mine.step >= 0 else None
        return json.dumps({"stock": asdict(mine), "common": common}).encode()

    def _take_stock(self, network: Network) -> tuple[Shipping, dict[int, CommonState]]:
        """Hear what all workers have and need, and return what has to travel."""
        rows = [json.loads(row) for row in network.posted()]
        shipping = ship([Stock(**row["stock"]) for row in rows])
        return shipping, {row["stock"]["worker"]: CommonState(**row["common"]) for row in rows if row["common"]}

    def _stock(self, units: Mapping[str, Unit]) -> Stock:
        holdings = self._kept if self._settled else {name: one for name, one in self._kept.items() if one.own}
        return Stock(
            worker=self._source.worker,
            step=self.global_steps if self._kept else -1,
            settled=self._settled,
            holds={name: holding.state.bytes for name, holding in holdings.items()},
            digests={} if self._settled else {name: _digest(one.state) for name, one in self._kept.items()},
            needs=tuple(units),
        )

    # ---- what travels ------------------------------------------------------------------------------------------

    def _connect_and_carry(self, plan: Plan, row: bytes) -> Delivery:
        """Form links and groups; layers travel meanwhile, through connections of their own."""
        deliveries: list[Delivery] = []
        with ExitStack() as opened:
            network = self._connect(plan, row)
            opened.callback(network.close)
            all_at_once([network.form, lambda: deliveries.append(self._deliver(network))])
            opened.pop_all()
        self.network = network
        return deliveries[0]

    def _deliver(self, network: Network) -> Delivery:
        shipping, common = self._take_stock(network)
        started = time.monotonic()
        received = {} if shipping.lost else self._carry(network, shipping)
        return Delivery(shipping, common, received, seconds=time.monotonic() - started)

    def _carry(self, network: Network, shipping: Shipping) -> dict[str, Holding]:
        """Send and receive layers; return what came."""
        me = self._source.worker
        outgoing: dict[int, list[Parcel]] = {}
        for one in shipping.shipments:
            if one.source == me:
                outgoing.setdefault(one.target, []).append(_packed(self._kept[one.unit]))
        incoming = sorted({one.source for one in shipping.shipments if one.target == me})
        carried = network.carry(outgoing, incoming, rooms=self._rooms())
        return {parcel.name: _unpacked(parcel) for parcels in carried.values() for parcel in parcels}

    def _rooms(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """Return the weights of new layers, into which they may be received: they hold nothing that anybody needs."""
        return {name: weights_of(unit) for name, unit in self._held_units().items() if name not in self._kept}

    def _catch_up(self, shipping: Shipping, common: Mapping[int, CommonState]) -> None:
        """Take over the counters of the others, if this worker is not where they are."""
        if shipping.leader is not None and self._source.worker not in shipping.current:
            self._kept = {}
            common[shipping.leader].give_to(self)

    def _restore(self, units: Mapping[str, Unit], lost: Sequence[str]) -> dict[str, Holding]:
        """Go back to the newest checkpoint, all of us, as nobody has some layers any more; return what was read."""
        step, told = self.global_steps, f"layer(s) {', '.join(lost)} are held by no live worker"
        try:
            restored = self._restored(units)
        except StateLostError as error:
            raise StateLostError(
                f"{told}, and training cannot go on from a checkpoint: {error}. Start the job again, with "
                "load_checkpoint() if you have one elsewhere; with a shorter bamboo.checkpoint.interval_steps or "
                "interval_seconds the first is there earlier"
            ) from None
        self._kept = {}
        restored.common.give_to(self)
        if self._is_first:
            self._source.tell(
                "restored",
                f"{told}: all go on from checkpoint {restored.tag}, at step {restored.step} (worker "
                f"{self._source.worker} was at {step})",
                layers=list(lost),
                tag=restored.tag,
                step=restored.step,
            )
        return {
            name: Holding(state=state, groups=_of_unit(restored.groups, name))
            for name, state in restored.states.items()
        }

    def _fill(self, units: Mapping[str, Unit], received: Mapping[str, Holding]) -> None:
        """Put layers where they belong, with what the optimizer knows of them."""
        found = {name: received.get(name) or self._kept[name] for name in units}
        groups = {name: group for holding in found.values() for name, group in holding.groups.items()}
        self._places = regroup(self.module, self.optimizer, groups)
        for name, unit in units.items():
            if found[name].module is not unit.module:
                put(unit, self.optimizer, found[name].state, given=name in received)
            self._missing.discard(name)

    def _settle(self) -> None:
        """Say that this worker has everything, and wait until all have."""
        self._committer.follow(self.network)
        if self._source.elastic:
            self._committer.share("")
        self.network.forget()
        self._kept, self._settled, self._reshape_wanted = {}, True, False

    def _report_epoch(self, report: ReshapeReport) -> None:
        self.reshapes.append(report)
        place = self.plan.place(self._source.worker)
        if (place.pipeline, place.stage) == (0, 0):
            self._source.tell(
                "reshaped",
                f"epoch {self.plan.epoch} has begun at step {self.global_steps} with {self.plan.num_stages} stages x "
                f"{self.plan.num_pipelines} pipelines, {1000 * report.seconds:.0f} ms after the last work",
                **asdict(report),
                step=self.global_steps,
            )

    def _restart_step(self, work: Work) -> None:
        """Begin the step again that was dropped, in the new place."""
        raise NotImplementedError  # the engine begins steps


def _of_unit(groups: Mapping[str, GroupOf], unit: str) -> dict[str, GroupOf]:
    layer = unit.partition(":")[0]
    return {name: group for name, group in groups.items() if name.partition(".")[0] == layer}


def _digest(state: UnitState) -> int:
    checksum = 0
    for name, tensor in sorted(copy_to_host(state).tensors.items()):
        checksum = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), checksum))
    return zlib.crc32(json.dumps(state.values, sort_keys=True).encode(), checksum)


def _packed(holding: Holding) -> Parcel:
    state = holding.state if local_device().type == "cpu" else copy_to_host(holding.state)
    groups = {name: [group.number, dict(group.settings)] for name, group in holding.groups.items()}
    return Parcel(name=state.name, values={"state": state.values, "groups": groups}, tensors=state.tensors)


def _unpacked(parcel: Parcel) -> Holding:
    state = UnitState(name=parcel.name, tensors=dict(parcel.tensors), values=dict(parcel.values["state"]))
    groups = {name: GroupOf(number, settings) for name, (number, settings) in parcel.values["groups"].items()}
    return Holding(state=state, groups=groups)
