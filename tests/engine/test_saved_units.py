"""What a checkpoint keeps of a layer is all of it, once, whatever the layer puts into its `state_dict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bamboo_ds.checkpoint import (
    Closing,
    Manifest,
    Part,
    SavedUnit,
    UnitFiles,
    close,
    open_storage,
    read_unit,
    write_part,
)
from bamboo_ds.engine.checkpoint_parts import _write_rest, _write_weights
from bamboo_ds.engine.gradients import Unit
from bamboo_ds.engine.parameters import GroupOf
from bamboo_ds.engine.saved_units import adopt_groups, groups_of_saved, on_host, put_saved, saved_unit, whole_state
from bamboo_ds.engine.unit_state import put, take
from bamboo_ds.errors import ConfigError

WIDTH = 5


class Layer(nn.Module):
    """Has one parameter under two names, frozen ones, buffers saved and not, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.again = self.linear
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.register_buffer("kept", torch.rand(2))
        self.register_buffer("unsaved", torch.rand(3), persistent=False)
        self.vocabulary = ["a"]

    def get_extra_state(self) -> Any:
        return {"vocabulary": self.vocabulary}

    def set_extra_state(self, state: Any) -> None:
        self.vocabulary = state["vocabulary"]


class Renaming(nn.Module):
    """Tells other names to the world than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self._register_state_dict_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}w"] = state.pop(f"{prefix}weight").half()


def holder(layer: nn.Module, *, seed: int, steps: int = 0) -> tuple[Unit, Any]:
    torch.manual_seed(seed)
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.data.copy_(torch.rand(tensor.shape))
    trained = tuple(p for p in layer.parameters() if p.requires_grad)
    optimizer = torch.optim.Adam([{"params": trained, "lr": 0.1 * seed}])
    for _ in range(steps):
        for parameter in trained:
            parameter.grad = torch.rand(parameter.shape)
        optimizer.step()
    return Unit("3", layer, trained, frozenset({0})), optimizer


def written(saved: SavedUnit, folder: Path) -> SavedUnit:
    """Return what is read back."""
    storage = open_storage(str(folder))
    files = {"w.pt": lambda sink: _write_weights(saved, sink), "r.safetensors": lambda sink: _write_rest(saved, sink)}
    note = write_part(storage, Part("tag", 0, files, {"3": UnitFiles("w.pt", "r.safetensors", 0)}))
    manifest = Manifest("tag", 1, 1, 1, 1, (0, 1), False, {})
    return read_unit(storage, close(storage, Closing(manifest, (0,), frozenset({"3"})), [note]), "3")


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("kind", [Layer, Renaming])
def test_a_layer_comes_back_whole(kind: type[nn.Module], tmp_path: Path) -> None:
    (unit, optimizer), (other, others) = holder(kind(), seed=1, steps=2), holder(kind(), seed=2)
    if kind is Layer:
        unit.module.vocabulary = ["b", 3]
    saved = written(on_host(saved_unit(unit, optimizer, {})), tmp_path)
    put_saved(other, others, whole_state(other, saved, strict=kind is Layer))
    assert equal(take(other, others).tensors, take(unit, optimizer).tensors)
    if kind is Layer:
        assert other.module.vocabulary == ["b", 3]


def test_what_modules_keep_besides_tensors_comes_with_the_weights(tmp_path: Path) -> None:
    (unit, optimizer), (other, others) = holder(Layer(), seed=1), holder(Layer(), seed=2)
    unit.module.vocabulary = ["b", 3]
    saved = written(on_host(saved_unit(unit, optimizer, {})), tmp_path)
    assert saved.rest.values == {}, "it is in DeepSpeed's file already"
    put_saved(other, None, whole_state(other, saved))
    assert other.module.vocabulary == ["b", 3]
    other.module.vocabulary = []
    put(other, others, whole_state(other, saved), given=True)  # as a new epoch does
    assert other.module.vocabulary == ["b", 3]


def test_nothing_is_written_twice() -> None:
    unit, optimizer = holder(Layer(), seed=1, steps=1)
    saved = saved_unit(unit, optimizer, {})
    assert set(saved.weights) == {
        "linear.weight", "linear.bias", "again.weight", "again.bias", "frozen", "kept", "_extra_state"
    }  # fmt: skip
    moments = {f"state/linear.{name}/{key}" for name in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")}
    assert set(saved.rest.tensors) == {"buffer/unsaved", *moments}
    copied = on_host(saved)
    assert copied.weights["linear.weight"] is copied.weights["again.weight"]


def test_what_a_state_dict_does_not_hold_as_it_is_lies_beside() -> None:
    unit, _ = holder(Renaming(), seed=1)
    saved = saved_unit(unit, None, {})
    assert list(saved.weights) == ["w"]
    assert torch.equal(saved.rest.tensors["parameter/weight"], unit.module.weight)


def test_a_copy_does_not_change_with_training() -> None:
    unit, optimizer = holder(Layer(), seed=1, steps=1)
    copied = on_host(saved_unit(unit, optimizer, {}))
    before = {key: tensor.clone() for key, tensor in copied.rest.tensors.items()}
    weight = copied.weights["linear.weight"].clone()
    with torch.no_grad():
        for tensor in take(unit, optimizer).tensors.values():
            tensor.add_(1)
    unit.module.vocabulary.append("later")
    assert equal(dict(copied.rest.tensors), before)
    assert torch.equal(copied.weights["linear.weight"], weight)
    assert copied.weights["_extra_state"] == {"vocabulary": ["a"]}


def test_the_memory_of_an_earlier_copy_is_used_again() -> None:
    unit, optimizer = holder(Layer(), seed=1)
    old = on_host(saved_unit(unit, optimizer, {}))  # the optimizer knows nothing yet
    places = {name: old.weights[name].data_ptr() for name in ("linear.weight", "frozen", "kept")}
    for parameter in unit.parameters:
        parameter.grad = torch.rand(parameter.shape)
    optimizer.step()
    new = on_host(saved_unit(unit, optimizer, {}), into=old)
    assert {name: new.weights[name].data_ptr() for name in places} == places
    assert new.weights["again.weight"] is new.weights["linear.weight"]
    fresh = on_host(saved_unit(unit, optimizer, {}))
    assert equal(dict(new.rest.tensors), dict(fresh.rest.tensors))
    assert all(torch.equal(new.weights[name], fresh.weights[name]) for name in places)


def test_two_names_that_are_one_tensor_no_more_do_not_share_the_memory_of_a_copy() -> None:
    unit, optimizer = holder(Layer(), seed=1)
    old = on_host(saved_unit(unit, optimizer, {}))
    unit.module.again = nn.Linear(WIDTH, WIDTH)
    new = on_host(saved_unit(unit, optimizer, {}), into=old)
    for name in ("linear.weight", "again.weight"):
        assert torch.equal(new.weights[name], unit.module.get_parameter(name))


def test_frozen_parameters_may_be_left_out(tmp_path: Path) -> None:
    (unit, optimizer), (other, others) = holder(Layer(), seed=1, steps=1), holder(Layer(), seed=2)
    saved = written(on_host(saved_unit(unit, optimizer, {}, exclude_frozen=True)), tmp_path)
    assert "frozen" not in saved.weights
    assert "parameter/frozen" not in saved.rest.tensors
    with pytest.raises(ConfigError, match="lacks parameter/frozen"):
        put_saved(other, others, whole_state(other, saved))
    kept = other.module.frozen.clone()
    put_saved(other, others, whole_state(other, saved, frozen_too=False))
    assert torch.equal(other.module.frozen, kept)
    assert torch.equal(other.module.linear.weight, unit.module.linear.weight)


def test_weights_of_another_model_are_refused_unless_told_otherwise() -> None:
    class More(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Parameter(torch.rand(1))

    (unit, _), (other, _) = holder(More(), seed=1), holder(Layer(), seed=2)
    with pytest.raises(ConfigError, match="layer 3 has no more: the checkpoint is of another model"):
        whole_state(other, saved_unit(unit, None, {}))
    with pytest.raises(ConfigError, match="lacks parameter/more"):
        put_saved(unit, None, whole_state(unit, saved_unit(other, None, {})))
    kept = unit.module.more.clone()
    saved = saved_unit(other, None, {})
    put_saved(unit, None, whole_state(unit, saved, strict=False))
    assert torch.equal(unit.module.linear.weight, other.module.linear.weight)
    assert torch.equal(unit.module.more, kept)


# ---- parameter groups ----------------------------------------------------------------------------------------------


def test_groups_come_back_by_parameter(tmp_path: Path) -> None:
    unit, optimizer = holder(Layer(), seed=1)
    groups = {
        "3.linear.weight": GroupOf(1, {"lr": 0.5, "betas": [0.5, 0.6], "marks": [1, 2]}),
        "3.linear.bias": GroupOf(0, {"lr": 0.25, "weight_decay": 0.1}),
    }
    saved = written(saved_unit(unit, optimizer, groups), tmp_path)
    assert groups_of_saved(saved) == groups
    linear = unit.module.linear
    given = [{"params": [linear.bias]}, {"params": []}, {"params": [linear.weight], "marks": [3]}]
    others = torch.optim.Adam(given, lr=9.0)
    adopt_groups({"3.linear.weight": linear.weight, "3.linear.bias": linear.bias}, others, [saved])
    assert [group["lr"] for group in others.param_groups] == [0.25, 9.0, 0.5]
    assert others.param_groups[2]["betas"] == (0.5, 0.6)
    assert others.param_groups[2]["marks"] == [1, 2], "what is a list here stays one"
    assert others.param_groups[0]["weight_decay"] == 0.1


def test_groups_that_cannot_be_told_apart_here_are_named() -> None:
    unit, optimizer = holder(Layer(), seed=1)
    groups = {"3.linear.weight": GroupOf(0, {"lr": 0.5}), "3.linear.bias": GroupOf(1, {"lr": 0.25})}
    held = {name: unit.module.get_parameter(name.removeprefix("3.")) for name in groups}
    with pytest.raises(ConfigError, match=r"3\.linear\.weight and 3\.linear\.bias are in one group of the optimizer"):
        adopt_groups(held, optimizer, [saved_unit(unit, optimizer, groups)])
