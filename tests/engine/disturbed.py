"""Trains a job in a cluster on this machine whose workers die at given moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.config import EtcdConfig
from bamboo_ds.config.source import CONFIG_VARIABLE, encoded
from tests.engine.training import Outcome, Training, train

Fault = dict[str, Any]
LONGEST_SECONDS = 90.0


def kill(pipeline: int, stage: int, *, before: int, step: int = 1) -> Fault:
    """Return the fault that kills the worker of a place before an instruction of a step."""
    return {"how": "kill", "step": step, "pipeline": pipeline, "stage": stage, "instruction": before}


def logs(folder: Path) -> str:
    """Return the end of each log below a folder."""
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.rglob("*.log")))


class Cluster:
    """Runs jobs one after the other against one etcd.

    Args:
        etcd: of all jobs.
        folder: for logs.
    """

    def __init__(self, etcd: EtcdConfig, folder: Path) -> None:
        self._etcd, self._folder, self._runs = etcd, folder, 0

    def train(
        self,
        job: Training,
        shape: tuple[int, int],
        faults: Sequence[Fault] = (),
        *,
        redundancy: str = "eflb",
        target: Callable[..., Any] = train,
    ) -> dict[int, Outcome]:
        """Train in (stages, pipelines) and return what the survivors left, by worker id."""
        stages, pipelines = shape
        # A pipeline that has lost a worker stays cut as it was.
        block = {"reconfigure": "needed", **job.config.get("bamboo", {}), "fault_injection": list(faults)}
        disturbed = replace(job, config={**job.config, "bamboo": block})
        return self.run(
            lambda: target(0, disturbed, stages, redundancy),
            workers=stages * pipelines,
            lost=len(faults),
            config=disturbed.deepspeed_config(redundancy),
        )

    def run(self, program: Callable[[], Any], *, workers: int, lost: int, config: dict[str, Any]) -> dict[int, Any]:
        """Run a program on some workers, of which `lost` die; return what the others returned."""
        self._runs += 1
        cluster = LocalCluster(
            program,
            nodes=1,
            workers=workers,
            job=f"disturbed-{self._runs}",
            etcd=self._etcd,
            ttl_seconds=2.0,
            log_folder=self._folder / f"run-{self._runs}",
            echo=False,
            environment={CONFIG_VARIABLE: encoded(config)},
        )
        with cluster:
            code = cluster.wait(LONGEST_SECONDS)
            results = cluster.results()
        told = logs(self._folder / f"run-{self._runs}")
        assert code == 0, f"the job ended with {code}:\n{told}"
        assert len(results) == workers - lost, f"{len(results)} survivors, expected {workers - lost}:\n{told}"
        return results
