"""Fixtures of the cloud's tests. Nothing of them reaches outside of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cloud.aws import REGION, Gate, handler_of, serving

VARIABLES = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_SESSION_TOKEN": "testing",
    "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "NO_PROXY": "127.0.0.1",
}


@pytest.fixture(scope="session")
def moto_address() -> Iterator[tuple[str, int]]:
    """Run moto's server for all tests of this process."""
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def aws(moto_address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Give an empty cloud at which boto3 ends up, whatever it is asked for."""
    gate = Gate(moto_address)
    gate.forward("POST", "/moto-api/reset", {}, b"")
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    with serving(handler_of(gate)) as gate.endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", gate.endpoint)
        yield gate


@pytest.fixture
def ec2(aws: Gate) -> Any:
    """Give a client of EC2 for what a test makes there itself."""
    import boto3

    return boto3.client("ec2")
