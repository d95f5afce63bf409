"""Real launchers, fresh interpreters, and an etcd in the config: the workers host their agents, and end in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bamboo_ds.cli.bench.workers import free_port
from bamboo_ds.elastic import keys
from bamboo_ds.store.embedded import EmbeddedEtcd
from tests.dropin.launching import SCRIPTS, Ended
from tests.dropin.test_launchers import DEADLINE_SECONDS, DEEPSPEED, TORCHRUN, run, trained_as_stock
from tests.dropin.test_unmodified_scripts import ADAM, config_file, stock_alexnet
from tests.elastic.clusters import Look

pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_SECONDS + 60)]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return stock_alexnet(tmp_path_factory.getbasetemp() / "stock-alexnet")


def alexnet(folder: Path, etcd: EmbeddedEtcd, *, job: str) -> list[object]:
    bamboo = {"job": job, "etcd": {"endpoints": [etcd.endpoint]}}
    path = config_file(folder, optimizer=ADAM, bamboo=bamboo)
    return [SCRIPTS / "alexnet_cifar.py", "--deepspeed_config", path, "--data", folder, "-p", 2]


def finished(etcd: EmbeddedEtcd, *, job: str) -> None:
    look = Look(etcd.endpoint, job=job)
    assert look.get(keys.FINISHED) == b"all 2 worker(s) have ended in order"
    assert not look.list(keys.NODES)


def test_torchrun_runs_an_unmodified_script(tmp_path: Path, stock: Ended, etcd: EmbeddedEtcd) -> None:
    port = ["--master-port", free_port()]
    ended = run(tmp_path, *TORCHRUN, 2, *port, "-m", "bamboo_ds", *alexnet(tmp_path, etcd, job="torchrun"))
    trained_as_stock(ended, stock)
    finished(etcd, job="torchrun")


def test_deepspeeds_launcher_runs_an_unmodified_script(tmp_path: Path, stock: Ended, etcd: EmbeddedEtcd) -> None:
    port = ["--master_port", free_port()]
    ended = run(tmp_path, *DEEPSPEED, 2, *port, "--module", "bamboo_ds", *alexnet(tmp_path, etcd, job="deepspeed"))
    trained_as_stock(ended, stock)
    assert ended.output.count("exits successfully") == 2
    finished(etcd, job="deepspeed")
