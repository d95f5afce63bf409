"""Reads the state of a layer back, in whatever shape the job is now."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bamboo_ds.checkpoint.manifest import Manifest
from bamboo_ds.checkpoint.state import BUFFER, PARAMETER, UnitState
from bamboo_ds.checkpoint.storage import DamagedError, Sink, Storage, read_checked
from bamboo_ds.checkpoint.tensors import read_tensors, write_tensors


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A parameter group of an optimizer, as far as it concerns one unit.

    Attributes:
        number: of the group in the optimizer of the worker that wrote it.
        settings: what else is in the group: learning rate, weight decay, ...
        names: of the unit's parameters in it, as all workers know them.
    """

    number: int
    settings: Mapping[str, Any]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SavedUnit:
    """What a checkpoint knows of a unit.

    Attributes:
        weights: its `state_dict`, as DeepSpeed saves it.
        rest: all of its state that is not in there.
        groups: where its parameters stand in an optimizer.
    """

    weights: Mapping[str, Any]
    rest: UnitState
    groups: tuple[SavedGroup, ...] = ()

    def state(self, names: Iterable[str]) -> UnitState:
        """Return the whole state.

        Args:
            names: `parameter/...` and `buffer/...` that the unit has; what the checkpoint lacks is left out.
        """
        tensors = dict(self.rest.tensors)
        for name in names:
            plain = name.removeprefix(PARAMETER).removeprefix(BUFFER)
            if name not in tensors and isinstance(self.weights.get(plain), torch.Tensor):
                tensors[name] = self.weights[plain]
        return UnitState(name=self.rest.name, tensors=tensors, values=self.rest.values)


def write_weights(sink: Sink, weights: Mapping[str, Any]) -> None:
    """Write a `state_dict` as DeepSpeed does."""
    torch.save(weights, sink)  # type: ignore[arg-type]  # it wants no more than these two methods


def write_rest(sink: Sink, saved: SavedUnit) -> None:
    """Write what DeepSpeed's file has no place for."""
    groups = [[group.number, dict(group.settings), list(group.names)] for group in saved.groups]
    metadata = {"name": saved.rest.name, "values": saved.rest.values, "groups": groups}
    write_tensors(sink, saved.rest.tensors, metadata)


def read_unit(storage: Storage, manifest: Manifest, unit: str) -> SavedUnit:
    """Read what a checkpoint knows of a unit.

    Raises:
        DamagedError: a file is not as it was written.
    """
    files = manifest.units[unit]
    weights = _weights(storage, manifest, files.weights) if files.weights else {}
    if not files.rest:
        return SavedUnit(weights, UnitState(name=unit))
    try:
        tensors, told = read_tensors(_bytes(storage, manifest, files.rest))
    except DamagedError as error:
        raise DamagedError(f"{files.rest}: {error}") from None
    groups = tuple(SavedGroup(number, settings, tuple(names)) for number, settings, names in told["groups"])
    return SavedUnit(weights, UnitState(name=told["name"], tensors=tensors, values=told["values"]), groups)


def _weights(storage: Storage, manifest: Manifest, name: str) -> Mapping[str, Any]:
    data = _bytes(storage, manifest, name)
    try:
        weights: Mapping[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise DamagedError(f"{name} holds more than tensors and plain data, or less: {error}") from None
    return weights


def _bytes(storage: Storage, manifest: Manifest, name: str) -> bytes:
    return read_checked(storage, f"{manifest.tag}/{name}", manifest.files[name])
