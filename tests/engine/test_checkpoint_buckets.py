"""Checkpoints of an engine in a bucket: moto's S3 on the loopback device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from bamboo_ds.checkpoint import find, open_storage
from bamboo_ds.cli.bench.workers import WorkerResult, values
from tests.engine.test_checkpoint_background import STEPS, go_on, periodic, train_all
from tests.engine.test_checkpoints import JOBS, resume, save_then_go_on
from tests.engine.training import largest

Run = Callable[..., list[WorkerResult]]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """Run a server with a bucket, and let the environment lead to it."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://{host}:{port}",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
    )
    import boto3

    boto3.session.Session().client("s3").create_bucket(Bucket="checkpoints")
    yield "s3://checkpoints"
    os.environ.clear()
    os.environ.update(before)
    server.stop()


def test_a_script_saves_and_loads_there(workers: Run, bucket: str) -> None:
    folder = f"{bucket}/by-hand"
    undisturbed = values(workers(save_then_go_on, 2, args=(JOBS["Adam"], 2, folder), timeout_seconds=60))
    for stages, count in ((2, 2), (1, 1)):
        resumed = values(workers(resume, count, args=(JOBS["Adam"], stages, folder), timeout_seconds=60))
        assert all(largest(one.losses, undisturbed[0].losses) < 1e-6 for one in resumed)
        assert all(one.extra[1:4] == ([1, "two"], 3, 30) for one in resumed)


def test_they_are_written_there_beside_training(workers: Run, bucket: str) -> None:
    folder = f"{bucket}/by-itself"
    job = periodic(JOBS["Adam"], folder, interval_steps=2, keep=1)
    found = values(workers(train_all, 2, args=(job, 2), timeout_seconds=60))
    assert not [report.error for _, reports in found for report in reports if report.error]
    storage = open_storage(folder)
    whole = find(storage).whole
    assert len(whole) == len(storage.folders()) == 1
    rest = replace(JOBS["Adam"], steps=STEPS + 1)
    first, losses = values(workers(go_on, 1, args=(rest, 1, folder), timeout_seconds=60))[0]
    assert first == whole[0].step
    assert largest(losses[: STEPS - first], found[0][0].losses[first:]) < 1e-6 if first < STEPS else len(losses) == 1
