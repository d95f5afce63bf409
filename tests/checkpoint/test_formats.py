"""Tensors and plain state come back as they were, and no file can do more than hold them."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load

from bamboo_ds.checkpoint import DamagedError, from_plain, to_plain
from bamboo_ds.checkpoint.tensors import read_tensors, write_tensors
from bamboo_ds.errors import ConfigError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


def written(tensors: dict[str, torch.Tensor], metadata: Any = None) -> bytes:
    file = io.BytesIO()
    write_tensors(file, tensors, metadata)
    return file.getvalue()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape_come_back(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    shapes: list[tuple[int, ...]] = [(), (0,), (3,), (2, 3), (4, 0, 2), (1, 2, 3, 4)]
    tensors = {f"of {shape}": (torch.randn(shape) * 3).abs().to(dtype) for shape in shapes}
    found, metadata = read_tensors(written(tensors, {"told": [1, None]}))
    assert metadata == {"told": [1, None]}
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert found[key].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_the_files_are_those_of_the_library() -> None:
    tensors = {"b": torch.randn(3, 4), "a": torch.arange(5, dtype=torch.uint8), "c": torch.randn(2).bfloat16()}
    found = load(written(tensors))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())


def test_views_are_written_alone() -> None:
    whole = torch.randn(100, 100)
    data = written({"column": whole[:, 3], "transposed": whole[:2].t()})
    assert len(data) < 3000
    found, _ = read_tensors(data)
    assert torch.equal(found["column"], whole[:, 3])
    assert torch.equal(found["transposed"], whole[:2].t())


@pytest.mark.parametrize("cut", [0, 4, 9, 60, -1])
def test_a_file_that_is_cut_off_is_damaged(cut: int) -> None:
    with pytest.raises(DamagedError, match="cannot be read as safetensors"):
        read_tensors(written({"a": torch.randn(20)})[:cut])


def test_another_programs_file_is_damaged() -> None:
    from safetensors.torch import save

    with pytest.raises(DamagedError, match="cannot be read as safetensors"):
        read_tensors(save({"a": torch.zeros(3)}))


# ---- plain state ---------------------------------------------------------------------------------------------------

STATES: list[Any] = [
    {"last_epoch": 3, "_last_lr": [0.1, 1e-300, math.inf], "verbose": False, "none": None, "name": "x"},
    {"milestones": Counter({10: 1, 20: 2})},
    {"betas": (0.9, (0.99, [1, (2,)])), "seen": {1, 2}, "frozen": frozenset({(1, 2)})},
    {1: "one", (2, "b"): {"!": "a key of ours"}},
    {"!": 1, "of": 2},
    [],
]


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_plain_state_comes_back(state: Any) -> None:
    found = from_plain(json.loads(json.dumps(to_plain(state, name="state"))))
    assert found == state
    assert repr(found) == repr(state)


def test_tensors_and_numbers_of_numpy_are_plain() -> None:
    state = {"best": torch.tensor(0.1), "many": torch.randn(2, 3).bfloat16(), "empty": torch.zeros(0)}
    found = from_plain(json.loads(json.dumps(to_plain(state, name="state"))))
    for key, tensor in state.items():
        assert torch.equal(found[key], tensor)
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
    assert to_plain(numpy.int64(3), name="n") == 3
    assert to_plain(numpy.float64(0.1), name="n") == 0.1


def test_schedules_of_torch_go_on() -> None:
    def make() -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        first = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5])
        optimizer.step()
        second = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[4])

    ours, theirs = make(), make()
    for _ in range(3):
        ours.step()
    theirs.load_state_dict(from_plain(json.loads(json.dumps(to_plain(ours.state_dict(), name="schedule")))))
    for scheduler in (ours, theirs):
        scheduler.optimizer.param_groups[0]["lr"] = 0.01
    rates = []
    for scheduler in (ours, theirs):
        rates.append([scheduler.step() or scheduler.get_last_lr() for _ in range(6)])
    assert rates[0] == rates[1]


def test_what_is_not_plain_is_named() -> None:
    with pytest.raises(ConfigError, match=r"schedule\['of'\]\[1\] is a object, which a checkpoint cannot hold"):
        to_plain({"of": [1, object()]}, name="schedule")
