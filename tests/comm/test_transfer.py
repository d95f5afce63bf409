"""State between workers: all that was sent arrives as it was, in the place that is ready for it if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bamboo_ds.cli.bench.workers import WorkerResult, values
from bamboo_ds.comm import Parcel
from tests.comm.test_links import network

Run = Callable[..., list[WorkerResult]]
LARGE = 1 << 17


def parcels() -> list[Parcel]:
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(LARGE, 2, generator=generator)
    small = {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "flags": torch.tensor([True, False])}
    return [
        Parcel("first", {"step": 3}, {"fits": large, "other dtype": large.double(), "view": large.t(), **small}),
        Parcel("second", {}, {"elsewhere": -large}),
    ]


def exchange(rank: int) -> Any:
    """Send all parcels to the other worker, and receive the same from it."""
    links, other, sent = network(rank, row=b"mine"), 1 - rank, parcels()
    assert links.posted() == [b"mine", b"mine"]
    ready = {"fits": torch.zeros(LARGE, 2), "other dtype": torch.zeros(LARGE, 2), "view": torch.zeros(LARGE, 2).t()}
    got = links.carry({other: sent}, [other], rooms={"first": ready})[other]
    wrong = [
        (mine.name, name)
        for mine, theirs in zip(sent, got, strict=True)
        for name, tensor in mine.tensors.items()
        if not torch.equal(theirs.tensors[name], tensor) or theirs.tensors[name].dtype != tensor.dtype
    ]
    in_place = [name for name, room in ready.items() if got[0].tensors[name].data_ptr() == room.data_ptr()]
    links.world.barrier()
    links.close()
    return [(parcel.name, dict(parcel.values)) for parcel in got], wrong, in_place


def test_both_ways_at_once_and_into_memory_that_fits(workers: Run) -> None:
    for names, wrong, in_place in values(workers(exchange, 2, timeout_seconds=60)):
        assert names == [("first", {"step": 3}), ("second", {})]
        assert wrong == []
        assert in_place == ["fits"]
