"""Small checkpoints to write, find and damage: two layers and one tied one, by two workers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bamboo_ds.checkpoint import (
    Closing,
    Manifest,
    Part,
    SavedGroup,
    SavedUnit,
    Storage,
    UnitFiles,
    UnitState,
    await_notes,
    close,
    layer_name,
    periodic_tag,
    read_unit,
    unit_name,
    write_part,
    write_rest,
    write_weights,
)

UNITS = {"0:ends": 0, "1": 1, "2": 0}
"""Units, and who writes each."""


def unit(name: str, step: int, *, size: int = 50) -> SavedUnit:
    """Return the state of a unit after a step."""
    seed = 1000 * step + int(name[0])
    generator = torch.Generator().manual_seed(seed)
    weights = {"weight": torch.randn(size, generator=generator), "bias": torch.full((3,), float(seed))}
    rest = UnitState(
        name=name,
        tensors={"state/weight/momentum": torch.randn(size, generator=generator), "buffer/seen": torch.tensor(step)},
        values={"state/weight/step": step},
    )
    return SavedUnit(weights, rest, (SavedGroup(1, {"lr": 0.1 * step, "betas": [0.9, 0.5]}, ("0.weight", "0.bias")),))


def part(tag: str, worker: int, step: int, *, size: int = 50) -> Part:
    files, units = {}, {}
    for name in (name for name, writer in UNITS.items() if writer == worker):
        saved = unit(name, step, size=size)
        places = UnitFiles(layer_name(int(name[0])), unit_name(name), worker)
        files[places.weights] = lambda sink, saved=saved: write_weights(sink, saved.weights)
        files[places.rest] = lambda sink, saved=saved: write_rest(sink, saved)
        units[name] = places
    return Part(tag, worker, files, units)


def closing(tag: str, step: int, *, keep: int | None = None, periodic: bool = True) -> Closing:
    manifest = Manifest(
        tag=tag,
        step=step,
        samples=10 * step,
        num_stages=2,
        num_pipelines=1,
        parts=(0, 2, 3),
        periodic=periodic,
        common={"scheduler": {"last": step}},
    )
    return Closing(manifest, workers=(0, 1), units=frozenset(UNITS), keep=keep)


def save(
    storage: Storage,
    step: int,
    *,
    tag: str | None = None,
    keep: int | None = None,
    size: int = 50,
    workers: Iterable[int] = (0, 1),
) -> Manifest:
    """Write a checkpoint of a step as all workers would."""
    tag = periodic_tag(step, "abc") if tag is None else tag
    for worker in workers:
        write_part(storage, part(tag, worker, step, size=size))
    wanted = closing(tag, step, keep=keep, periodic=tag.startswith("bamboo"))
    notes = await_notes(storage, wanted, given_up=lambda: True, timeout_seconds=1.0)
    return close(storage, wanted, notes)


def assert_holds(storage: Storage, manifest: Manifest, *, size: int = 50) -> None:
    """Check that a checkpoint can be read, and holds what its step had."""
    for name in UNITS:
        found, expected = read_unit(storage, manifest, name), unit(name, manifest.step, size=size)
        for ours, theirs in ((found.weights, expected.weights), (found.rest.tensors, expected.rest.tensors)):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        assert (found.rest.name, found.rest.values) == (name, expected.rest.values)
        assert found.groups == expected.groups
