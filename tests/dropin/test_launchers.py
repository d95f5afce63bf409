"""Real launchers with fresh interpreters: `torchrun`, `deepspeed`, and what `srun` sets. The slowest tests of all."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from bamboo_ds.cli.bench.workers import free_port
from bamboo_ds.world.bootstrap import _first_host, _slurm_port
from tests.dropin.launching import SCRIPTS, Ended, launch
from tests.dropin.test_unmodified_scripts import ADAM, OURS, config_file, losses, shown, stock_alexnet

DEADLINE_SECONDS = 200
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus"]
slow = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_SECONDS + 60)]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return stock_alexnet(tmp_path_factory.getbasetemp() / "stock-alexnet")


def run(folder: Path, *command: object, environment: dict[str, str | None] | None = None) -> Ended:
    ended = launch(
        command, deadline_seconds=DEADLINE_SECONDS, temporary=folder / "temporary", environment=environment or {}
    )
    assert ended.left == [], ended.output[-6000:]
    return ended


def alexnet(folder: Path, stages: int) -> list[object]:
    path = config_file(folder, optimizer=ADAM, bamboo={})
    return [SCRIPTS / "alexnet_cifar.py", "--deepspeed_config", path, "--data", folder, "-p", stages]


def trained_as_stock(ended: Ended, stock: Ended) -> None:
    assert ended.codes == {0: 0}, ended.output[-6000:]
    assert shown(ended, "ENGINE") == f"{OURS} PipelineModule"
    assert losses(ended) == pytest.approx(losses(stock), rel=1e-6)


class TestLaunchers:
    pytestmark = slow

    def test_torchrun_runs_an_unmodified_script(self, tmp_path: Path, stock: Ended) -> None:
        port = ["--master-port", free_port()]
        ended = run(tmp_path, *TORCHRUN, 4, *port, "-m", "bamboo_ds", *alexnet(tmp_path, stages=4))
        trained_as_stock(ended, stock)

    def test_deepspeeds_launcher_runs_an_unmodified_script(self, tmp_path: Path, stock: Ended) -> None:
        port = ["--master_port", free_port()]
        ended = run(tmp_path, *DEEPSPEED, 2, *port, "--module", "bamboo_ds", *alexnet(tmp_path, stages=2))
        trained_as_stock(ended, stock)
        assert ended.output.count("exits successfully") == 2

    def test_srun_needs_no_other_variables_than_its_own(self, tmp_path: Path, stock: Ended) -> None:
        """Two processes, started as `srun` starts them."""
        script = shlex.join([sys.executable, "-m", "bamboo_ds", *map(str, alexnet(tmp_path, stages=2))])
        first, second = (f"SLURM_PROCID={rank} SLURM_LOCALID={rank} {script}" for rank in range(2))
        both = f"{second} & {first}; code=$?; wait $! && exit $code"
        slurm = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
        unset = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
        job = {"SLURM_JOB_ID": str(free_port())}
        trained_as_stock(run(tmp_path, "bash", "-c", both, environment={**unset, **slurm, **job}), stock)

    def test_a_script_may_patch_before_it_imports_anything_else(self, tmp_path: Path) -> None:
        script = [SCRIPTS / "patch_anywhere.py", "--when", "before everything"]
        ended = run(tmp_path, *TORCHRUN, 2, "--master-port", free_port(), *script)
        assert ended.codes == {0: 0}, ended.output[-6000:]
        assert shown(ended, "ENGINE") == "BambooPipelineEngine bamboo_ds.initialization True"

    def test_torchruns_summary_names_the_root_cause(self, tmp_path: Path) -> None:
        port = ["--master-port", free_port()]
        failing = [SCRIPTS / "failing.py", "--how", "layer", "--rank", 1]
        ended = run(tmp_path, *TORCHRUN, 2, *port, *failing)
        assert ended.codes == {0: 1}
        shows_the_traceback_once(ended, worker=1)
        summary = ended.output.partition("Root Cause")[2]
        assert "rank      : 1 " in summary
        assert "traceback : ValueError: the user's layer broke" in summary

    @pytest.mark.parametrize("rank", [0, 1])
    def test_deepspeeds_launcher_ends_all_after_the_traceback(self, tmp_path: Path, rank: int) -> None:
        """Worker 0 hosts the store here."""
        port = ["--master_port", free_port()]
        failing = [SCRIPTS / "failing.py", "--how", "layer", "--rank", rank]
        ended = run(tmp_path, *DEEPSPEED, 2, *port, *failing)
        assert ended.codes == {0: 1}
        shows_the_traceback_once(ended, worker=rank)
        assert f"bamboo: worker {1 - rank} ends: worker {rank} failed: ValueError" in ended.output


def shows_the_traceback_once(ended: Ended, *, worker: int) -> None:
    assert ended.output.count(f"bamboo: worker {worker} failed first, with:") == 1, ended.output[-6000:]
    own = [line for line in ended.output.splitlines() if re.match(rf"\[rank{worker}\]: ValueError: the user's", line)]
    assert len(own) == 1, ended.output[-6000:]
    assert len(re.findall(r"^\[rank\d\]: Traceback", ended.output, re.MULTILINE)) == 1, ended.output[-6000:]


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("localhost", "localhost"),
        ("a,b", "a"),
        ("gpu[03-05,9]", "gpu03"),
        ("rack-1-n[7]", "rack-1-n7"),
        ("n[1,3]-ib,m[4-5]", "n1-ib"),
        ("solo,n[1-2]", "solo"),
    ],
)
def test_the_first_host_of_a_slurm_node_list_holds_the_store(node_list: str, host: str) -> None:
    assert _first_host(node_list) == host


def test_jobs_of_slurm_take_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1234567")
    assert _slurm_port() == 29500 + 567
    monkeypatch.delenv("SLURM_JOB_ID")
    assert _slurm_port() == 29500
