"""A layer's state can be taken out of one worker and put into another, which then goes on bit for bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bamboo_ds.checkpoint import UnitState
from bamboo_ds.engine.gradients import Unit
from bamboo_ds.engine.precision import MixedPrecisionOptimizer, target_of
from bamboo_ds.engine.unit_state import copy_to_host, describe, empty_like, put, take
from bamboo_ds.errors import ConfigError
from bamboo_ds.world import local_device

WIDTH = 6
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "Adam capturable": lambda p: torch.optim.Adam(p, 0.01, capturable=local_device().type == "cuda"),
    "Adam fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.3),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.05, t0=1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
}


class Layer(nn.Module):
    """Has all that a layer may have: a scalar and a frozen parameter, a name used twice, buffers saved and not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.rand(()))
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.again = self.linear
        self.register_buffer("seen", torch.rand(()), persistent=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.again(torch.tanh(self.norm(self.linear(value)) * self.scale + self.frozen + self.seen))


class Holder:
    """A worker, as far as one unit is concerned."""

    def __init__(self, make: Make | None, *, seed: int, low: bool = False) -> None:
        torch.manual_seed(seed)
        layer = Layer().to(local_device(), torch.bfloat16 if low else torch.float32)
        self.parameters = [p for p in layer.parameters() if p.requires_grad]
        self.unit = Unit(name="3", module=layer, parameters=tuple(self.parameters), stages=frozenset({0}))
        self.optimizer: Any = make and make(self.parameters)
        if low and make:
            self.optimizer = MixedPrecisionOptimizer(self.optimizer)

    def steps(self, *numbers: int) -> list[torch.Tensor]:
        """Train; return all weights and buffers afterwards."""
        for number in numbers:
            torch.manual_seed(number)
            values = torch.randn(4, WIDTH).to(self.unit.module.scale)
            self.unit.module(values).float().square().mean().backward()
            for parameter in self.parameters:
                target, gradient = target_of(parameter, self.optimizer), parameter.grad
                parameter.grad = None
                target.grad = gradient.to(target.dtype)
            self.optimizer.step()
            self.optimizer.zero_grad()
        state = take(self.unit, self.optimizer)
        return [tensor.clone() for tensor in state.tensors.values()]

    def take(self) -> UnitState:
        return take(self.unit, self.optimizer)

    def put(self, state: UnitState) -> None:
        put(self.unit, self.optimizer, state)


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(
        one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_who_is_given_a_layer_goes_on_bit_for_bit(name: str, low: bool) -> None:
    old, new = (Holder(OPTIMIZERS[name], seed=seed, low=low) for seed in (1, 2))
    old.steps(1, 2, 3)
    new.put(old.take())
    assert equal(new.steps(4, 5, 6), old.steps(4, 5, 6))


def test_what_a_worker_knew_before_is_forgotten() -> None:
    """It has made other steps, with state of its own."""
    old, new = (Holder(OPTIMIZERS["Adam"], seed=seed) for seed in (1, 2))
    old.steps(1, 2, 3)
    new.steps(7, 8)
    new.put(old.take())
    assert equal(new.steps(4), old.steps(4))


def test_a_layer_that_was_never_stepped_takes_the_optimizers_state_away() -> None:
    old, new = (Holder(OPTIMIZERS["SGD with momentum"], seed=seed) for seed in (1, 2))
    new.steps(7, 8)
    new.put(old.take())
    assert not any(parameter in new.optimizer.state for parameter in new.parameters)
    assert equal(new.steps(4), old.steps(4))


def test_taking_copies_nothing_and_leaves_no_trace() -> None:
    holder = Holder(OPTIMIZERS["Adam"], seed=1)
    state = holder.take()
    assert len(holder.optimizer.state) == 0
    assert state.tensors["parameter/linear.weight"].data_ptr() == holder.unit.module.linear.weight.data_ptr()
    holder.steps(1)
    weight = holder.unit.module.linear.weight
    assert holder.take().tensors["state/linear.weight/exp_avg"] is not None
    assert (
        holder.take().tensors["state/linear.weight/exp_avg"].data_ptr()
        == holder.optimizer.state[weight]["exp_avg"].data_ptr()
    )


def test_all_there_is_has_a_name() -> None:
    holder = Holder(OPTIMIZERS["SGD with momentum"], seed=1, low=True)
    holder.steps(1)
    state = holder.take()
    trained = ["linear.weight", "linear.bias", "norm.weight", "norm.bias", "scale"]
    buffers = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "seen"]
    assert set(state.tensors) == {
        *(f"parameter/{name}" for name in (*trained, "frozen")),
        *(f"buffer/{name}" for name in buffers),
        *(f"master/{name}" for name in trained),
        *(f"state/{name}/momentum_buffer" for name in trained),
    }
    trained_numbers = WIDTH * WIDTH + 3 * WIDTH + 1
    assert state.bytes == trained_numbers * (2 + 4 + 4) + WIDTH * 2 + (2 * WIDTH + 1) * 2 + 8


def test_a_copy_on_the_host_stays_while_training_goes_on() -> None:
    old, new = (Holder(OPTIMIZERS["Adam"], seed=seed) for seed in (1, 2))
    old.steps(1, 2)
    copied = copy_to_host(old.take())
    expected = old.steps(3)
    new.put(copied)
    assert {tensor.device.type for tensor in copied.tensors.values()} == {"cpu"}
    assert equal(new.steps(3), expected)


def test_a_state_travels_as_text_and_tensors() -> None:
    old, new = (Holder(OPTIMIZERS["SGD with momentum"], seed=seed) for seed in (1, 2))
    old.steps(1)
    old.optimizer.state[old.parameters[0]]["note"] = {"seen": [1, None, 0.1]}
    sent = old.take()
    received = empty_like(new.unit, json.loads(json.dumps(describe(sent))), optimizer=new.optimizer)
    assert received.bytes == sent.bytes
    for key, tensor in received.tensors.items():
        tensor.copy_(sent.tensors[key])
    new.put(received)
    assert new.optimizer.state[new.parameters[0]]["note"] == {"seen": [1, None, 0.1]}
    assert equal(new.steps(2), old.steps(2))


def test_without_an_optimizer_the_weights_are_put() -> None:
    old, new = Holder(OPTIMIZERS["Adam"], seed=1, low=True), Holder(None, seed=2, low=True)
    old.steps(1)
    new.put(old.take())
    weights = old.take().tensors
    assert list(new.take().tensors) == [key for key in weights if key.startswith(("parameter/", "buffer/"))]
    assert all(torch.equal(tensor, weights[key]) for key, tensor in new.take().tensors.items())


def test_fused_adams_count_of_steps_goes_with_each_layer() -> None:
    """It keeps one count for a whole group, in the state of the group's last parameter."""

    class FusedAdam(torch.optim.SGD):
        """Counts as DeepSpeed's does; that one needs a compiled op."""

    old, new = Holder(FusedAdam, seed=1), Holder(FusedAdam, seed=2)
    for count, parameter in zip([0, 0, 0, 0, 7], old.parameters, strict=True):
        old.optimizer.state[parameter] = {"step": count}
    new.put(old.take())
    assert [new.optimizer.state[parameter] for parameter in new.parameters] == [{"step": 7}] * 5


class Counting(nn.Module):
    """Keeps more than tensors, in itself and in a module below."""

    def __init__(self, *, inner: bool = True) -> None:
        super().__init__()
        self.seen: Any = {"steps": 0}
        self.inner = Counting(inner=False) if inner else None

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def unit_of(module: nn.Module) -> Unit:
    return Unit(name="3", module=module, parameters=tuple(module.parameters()), stages=frozenset({0}))


def test_what_modules_keep_besides_tensors_goes_with_them() -> None:
    old, new = Counting(), Counting()
    old.seen, old.inner.seen = {"steps": 3, 7: (1, torch.ones(2, dtype=torch.bfloat16))}, "text"
    sent = take(unit_of(old), None)
    assert list(sent.values) == ["extra/_extra_state", "extra/inner._extra_state"]
    put(unit_of(new), None, UnitState("3", values=json.loads(json.dumps(sent.values))))
    assert new.seen["steps"] == 3
    assert new.seen[7][0] == 1
    assert torch.equal(new.seen[7][1], torch.ones(2, dtype=torch.bfloat16))
    assert new.inner.seen == "text"


def test_objects_that_modules_keep_are_named() -> None:
    module = Counting()
    module.inner.seen = object()
    with pytest.raises(ConfigError, match=r"unit 3: extra/inner\._extra_state of Counting is a object, which"):
        take(unit_of(module), None)


# ---- what does not fit ---------------------------------------------------------------------------------------------


def changed(change: Callable[[UnitState], None]) -> UnitState:
    holder = Holder(OPTIMIZERS["Adam"], seed=1, low=True)
    holder.steps(1)
    state = holder.take()
    change(state)
    return state


MISFITS: dict[str, tuple[Callable[[UnitState], Any], str]] = {
    "shape": (
        lambda s: s.tensors.update({"parameter/scale": torch.zeros(2, dtype=torch.bfloat16)}),
        r"parameter/scale is torch.bfloat16\(\), the given state has torch.bfloat16\(2,\)",
    ),
    "dtype": (lambda s: s.tensors.update({"buffer/seen": torch.zeros(())}), "buffer/seen is torch.bfloat16"),
    "lacks a parameter": (lambda s: s.tensors.pop("parameter/frozen"), "lacks parameter/frozen"),
    "lacks a master": (lambda s: s.tensors.pop("master/scale"), "lacks master/scale"),
    "more": (lambda s: s.tensors.update({"buffer/x": torch.zeros(1)}), "has no buffer/x"),
    "not stepped": (
        lambda s: s.tensors.update({"state/frozen/exp_avg": torch.zeros(WIDTH)}),
        "'frozen', which this worker's optimizer does not step",
    ),
    "unknown": (lambda s: s.values.update({"state/gone/step": 1}), "'gone', which this worker's"),
    "more to keep": (lambda s: s.values.update({"extra/x._extra_state": 1}), r"has no extra/x\._extra_state"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_before_anything_changes(name: str) -> None:
    change, told = MISFITS[name]
    state, new = changed(change), Holder(OPTIMIZERS["Adam"], seed=2, low=True)
    before = copy.deepcopy(new.take().tensors)
    with pytest.raises(ConfigError, match=told):
        new.put(state)
    with pytest.raises(ConfigError, match=told):
        empty_like(new.unit, describe(state), optimizer=new.optimizer)
    assert equal(list(new.take().tensors.values()), list(before.values()))


def test_another_layers_state_is_refused() -> None:
    new = Holder(None, seed=2)
    with pytest.raises(ConfigError, match="unit 3: given the state of unit 4"):
        new.put(UnitState(name="4"))


def test_an_optimizer_that_keeps_objects_is_named() -> None:
    holder = Holder(OPTIMIZERS["SGD"], seed=1)
    holder.optimizer.state[holder.parameters[0]]["odd"] = {1, 2}
    with pytest.raises(ConfigError, match=r"unit 3: the optimizer keeps 'state/\S+/odd' as set"):
        holder.take()
