"""Who this machine is, and how fast that is known off a cloud."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from bamboo_ds.cloud.identity import Identity, identify
from bamboo_ds.cloud.metadata import Metadata, MetadataError, find_metadata, maker
from tests.cloud.fake_metadata import fake_metadata

EC2 = {
    "/latest/meta-data/instance-id": "i-0123",
    "/latest/meta-data/placement/availability-zone": "eu-west-1b",
    "/latest/meta-data/instance-type": "g5.xlarge",
    "/latest/meta-data/instance-life-cycle": "spot",
}
GCP = {
    "/computeMetadata/v1/instance/name": "node-7",
    "/computeMetadata/v1/instance/zone": "projects/12/zones/europe-west1-b",
    "/computeMetadata/v1/instance/machine-type": "projects/12/machineTypes/a2-highgpu-1g",
    "/computeMetadata/v1/instance/scheduling/preemptible": "TRUE",
}
AZURE = {
    "/metadata/instance/compute?api-version=2021-02-01": '{"name": "vm-3", "location": "westeurope", "zone": "2", '
    '"vmSize": "Standard_NC24ads_A100_v4", "priority": "Spot"}'
}


@pytest.mark.parametrize(
    ("cloud", "paths", "identity"),
    [
        ("ec2", EC2, Identity("ec2", "i-0123", "eu-west-1b", "g5.xlarge", True)),
        ("gcp", GCP, Identity("gcp", "node-7", "europe-west1-b", "a2-highgpu-1g", True)),
        ("azure", AZURE, Identity("azure", "vm-3", "westeurope-2", "Standard_NC24ads_A100_v4", True)),
        ("azure", {}, Identity("azure")),
    ],
)
def test_a_machine_is_what_its_cloud_says(cloud: str, paths: dict[str, str], identity: Identity) -> None:
    with fake_metadata(cloud) as fake:
        fake.paths |= paths
        assert identify(Metadata(cloud, endpoint=fake.endpoint, timeout_seconds=5.0), deadline_seconds=20.0) == identity  # type: ignore[arg-type]


def test_an_on_demand_instance_is_no_spot_instance() -> None:
    with fake_metadata() as fake:
        fake.paths |= {**EC2, "/latest/meta-data/instance-life-cycle": "on-demand"}
        assert identify(Metadata("ec2", endpoint=fake.endpoint), deadline_seconds=20.0).spot is False


def test_a_token_is_fetched_once_and_again_when_it_has_expired() -> None:
    with fake_metadata() as fake:
        fake.paths |= EC2
        metadata = Metadata("ec2", endpoint=fake.endpoint, timeout_seconds=5.0)
        for _ in range(3):
            assert metadata.get("/latest/meta-data/instance-id") == "i-0123"
        assert fake.asked.count("PUT /latest/api/token") == 1
        fake.token = "token-2"
        assert metadata.get("/latest/meta-data/instance-id") == "i-0123"
        assert fake.asked.count("PUT /latest/api/token") == 2


def test_what_is_not_there_is_none() -> None:
    with fake_metadata("gcp") as fake:
        assert Metadata("gcp", endpoint=fake.endpoint).get("/computeMetadata/v1/nothing") is None


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with fake_metadata() as fake:
        fake.paths |= EC2
        assert Metadata("ec2", endpoint=fake.endpoint).get("/latest/meta-data/instance-id") == "i-0123"


def test_a_server_that_hangs_costs_no_more_than_a_second() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        assert identify(Metadata("ec2", endpoint=endpoint, timeout_seconds=0.4)) == Identity("ec2")
        assert time.monotonic() - begin < 1.0


def test_a_server_that_is_slow_is_not_asked_on_and_on() -> None:
    with fake_metadata() as fake:
        fake.paths |= EC2
        fake.delay_seconds = 0.3
        begin = time.monotonic()
        assert identify(Metadata("ec2", endpoint=fake.endpoint, timeout_seconds=0.4)) == Identity("ec2")
        assert time.monotonic() - begin < 1.2


def test_nobody_at_the_address_is_an_error_of_its_own() -> None:
    with pytest.raises(MetadataError, match="does not answer"):
        Metadata("ec2", endpoint="http://127.0.0.1:9").get("/latest/meta-data/instance-id")


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2\n"}, "ec2"),
        ({"sys_vendor": "Google\n"}, "gcp"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation"}, None),  # Hyper-V at home
        ({"sys_vendor": "QEMU"}, None),
        ({}, None),
    ],
)
def test_the_firmware_says_who_made_the_machine(files: dict[str, str], cloud: str | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert maker(tmp_path) == cloud
    found = find_metadata({}, folder=tmp_path)
    assert (found.cloud if found else None) == cloud


def test_the_variables_of_the_clouds_libraries_count(tmp_path: Path) -> None:
    on_ec2 = tmp_path / "sys_vendor"
    on_ec2.write_text("Amazon EC2")
    assert find_metadata({"AWS_EC2_METADATA_DISABLED": "true"}, folder=tmp_path) is None
    moved = find_metadata({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1234"}, folder=tmp_path / "no")
    assert moved is not None
    assert (moved.cloud, moved._host, moved._port) == ("ec2", "127.0.0.1", 1234)
    google = find_metadata({"GCE_METADATA_HOST": "127.0.0.1:99"}, folder=tmp_path / "no")
    assert google is not None
    assert (google.cloud, google._port) == ("gcp", 99)


def test_off_a_cloud_nothing_is_asked() -> None:
    assert identify(None) == Identity()
