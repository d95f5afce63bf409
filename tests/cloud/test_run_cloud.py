"""What `bamboo-ds run` makes of the cloud and of `--cloud`, without processes."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from bamboo_ds.cli.run import Launch, run, this_node
from bamboo_ds.cli.run_cloud import Place, local_fleet, local_market, this_place
from bamboo_ds.cli.run_options import RunOptions
from bamboo_ds.cloud.identity import Identity
from bamboo_ds.config.cloud import CloudConfig, Ec2Config, LocalMarketConfig, PriceConfig
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.agent_settings import AgentPort
from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import encode
from bamboo_ds.store import MemoryStore
from tests.cloud.fake_metadata import fake_metadata
from tests.cloud.test_metadata import EC2

ON_EC2 = CloudConfig(provider="ec2", ec2=Ec2Config(group="g"))


def test_on_ec2_a_machine_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_metadata() as fake:
        fake.paths |= EC2
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", fake.endpoint)
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
        place = this_place()
    assert place.identity == Identity("ec2", "i-0123", "eu-west-1b", "g5.xlarge", True)
    assert place.companion(None, job="j", workers=1) is not None  # it hears warnings without being told to


def test_off_a_cloud_nothing_is_asked_and_nothing_runs_beside_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo_ds.cli.run_cloud.find_metadata", lambda: None)
    begin = time.monotonic()
    place = this_place()
    assert time.monotonic() - begin < 0.5
    assert place.identity == Identity()
    assert place.companion(None, job="j", workers=1) is None


def test_the_command_line_does_not_import_boto3() -> None:
    code = "import sys, bamboo_ds.cli.main; sys.exit(any(name in sys.modules for name in ('boto3', 'botocore')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).resolve().parents[2])


def test_a_companion_for_ec2_is_made_without_asking_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo_ds.cloud.ec2_client.Clients._make", None)  # to ask would fail
    assert Place(Identity(), None).companion(ON_EC2, job="j", workers=1) is not None


def test_without_boto3_the_provider_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'bamboo_ds\[aws\]'"):
        Place(Identity(), None).companion(ON_EC2, job="j", workers=1)


def test_providers_are_refused_where_they_do_not_belong() -> None:
    with pytest.raises(ConfigError, match="--local-nodes N"):
        Place(Identity(), None).companion(CloudConfig(provider="local"), job="j", workers=1)
    with (
        pytest.raises(ConfigError, match='use "local"'),
        local_fleet(ON_EC2, job="j", workers=1, zones=("a",)),
    ):
        pass


def test_without_a_provider_local_nodes_are_only_counted() -> None:
    with local_fleet(CloudConfig(), job="j", workers=1, zones=("a",)) as fleet:
        assert len(fleet.companions) == 1
        assert fleet.meanwhile(None, zones={}) is None  # type: ignore[arg-type]
    with local_fleet(None, job="j", workers=1, zones=("a",)) as fleet:
        assert fleet.companions == ()


def test_a_trace_is_the_markets_capacity(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(0, "add", "n1", "a"), (0, "add", "n2", "b"), (60, "add", "n3", "a"), (120, "remove", "n1", "")]
    names = ("seconds", "event", "node", "zone")
    lines = [json.dumps({name: value for name, value in zip(names, row, strict=True) if value != ""}) for row in rows]
    path.write_text("\n".join(lines))
    config = CloudConfig(local=LocalMarketConfig(trace=str(path), speed=10.0))
    market = local_market(config, zones=("a", "b"))
    counts = [(market.supply.capacity("a", at), market.supply.capacity("b", at)) for at in (0.0, 5.9, 6.0, 12.0)]
    assert counts == [(1, 1), (1, 1), (2, 1), (1, 1)]
    assert local_market(CloudConfig(), zones=("a",)).supply.total(0.0) > 10_000


def test_the_keeper_shows_its_count_to_prometheus_and_an_odd_node_gets_its_own_file(tmp_path: Path) -> None:
    store, told, registry = MemoryStore(), queue.Queue[str](), CollectorRegistry()
    lease = store.lease(5.0)
    store.put(keys.node("n7"), encode(Node("n7", "a", (0,))), lease=lease)
    port = AgentPort(
        store=store,
        node="n7",
        zone="a",
        lease=lambda: lease,
        tell=lambda kind, text, **fields: told.put(kind),
        say=lambda text: None,
        leave=lambda reason: None,
        registry=registry,
    )
    config = CloudConfig(
        look_seconds=0.02, prices=PriceConfig(spot={"*": 1.5}), notice_file=str(tmp_path / "end-of-{node}")
    )
    companion = Place(Identity(), None).companion(config, job="j", workers=1)
    assert companion is not None
    (tmp_path / "end-of-n7").touch()
    with contextlib.closing(companion(port)):
        assert told.get(timeout=10) == "notice"
        labels, deadline = {"job_name": "j", "node": "n7"}, time.monotonic() + 10
        while registry.get_sample_value("bamboo_dollars_per_hour", labels) != 1.5:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def options(tmp_path: Path, **given: object) -> RunOptions:
    script = tmp_path / "train.py"
    script.touch()
    return RunOptions(script=str(script), **given)  # type: ignore[arg-type]


def test_a_cloud_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--cloud .*missing\.json: no such file"):
        options(tmp_path, cloud=tmp_path / "missing.json", etcd="h:1").check()


def test_a_cloud_file_needs_a_cluster_of_several_nodes(tmp_path: Path) -> None:
    path = tmp_path / "cloud.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="goes with --etcd"):
        run(options(tmp_path, cloud=path))
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n")
    with pytest.raises(ConfigError, match=r"--cloud .* do not go together"):
        options(tmp_path, cloud=path, hostfile=hosts).check()


def test_the_agents_settings_follow_the_cloud_unless_flags_say_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    identity = Identity("ec2", "i-0123", "eu-west-1b", "g5.xlarge", spot=False)
    monkeypatch.setattr("bamboo_ds.cli.run.this_place", lambda: Place(identity, None))
    launch = Launch.of(options(tmp_path, etcd="h:1", workers_per_node=1))
    assert launch.etcd is not None
    settings = this_node(launch, launch.etcd)
    assert (settings.node, settings.zone, settings.spot) == ("i-0123", "eu-west-1b", False)
    flags = Launch.of(options(tmp_path, etcd="h:1", workers_per_node=1, node="mine", zone="here"))
    settings = this_node(flags, launch.etcd)
    assert (settings.node, settings.zone, settings.companions) == ("mine", "here", ())


def test_a_machine_that_was_started_for_a_job_knows_since_when_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bamboo_ds.cli.run.this_place", lambda: Place(Identity(), None))
    launch = Launch.of(options(tmp_path, etcd="h:1", workers_per_node=1, started_for_job=True))
    assert launch.etcd is not None
    started = this_node(launch, launch.etcd).started_at
    assert started is not None
    assert started == pytest.approx(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME), abs=1.0)
    with pytest.raises(ConfigError, match="--local-nodes 2 and --started-for-job do not go together"):
        options(tmp_path, local_nodes=2, started_for_job=True).check()
