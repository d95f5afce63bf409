"""Places for checkpoints: a folder, and a bucket on a server of our own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from bamboo_ds.checkpoint import Storage, open_storage

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Run moto's S3 on the loopback device."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a bucket, and let the environment lead to it; return its name."""
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{next(_numbers)}"
    boto3.session.Session().client("s3").create_bucket(Bucket=name)
    return name


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Return an empty place of each kind."""
    if request.param == "local":
        return open_storage(str(tmp_path / "place"))
    return open_storage(f"s3://{request.getfixturevalue('bucket')}/some/prefix")
