"""Jobs of plainly started processes, as `srun` starts them, whose config names an etcd: each hosts its own agent.

The processes are forks of this one, which opens no store. The reference of every loss is the same job without etcd.
"""

from __future__ import annotations

import functools
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.cli.bench.workers import free_port
from bamboo_ds.elastic import keys
from bamboo_ds.store.embedded import EmbeddedEtcd
from tests.dropin.launching import Ended, launch_forked
from tests.elastic.clusters import Look

DEADLINE_SECONDS = 60
TTL_SECONDS = 3.0  # the agents share their interpreters, and the cores, with the training
CONFIG = {
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "steps_per_print": 1000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}  # fmt: skip


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


def run(folder: Path, *arguments: object, workers: int = 4, **block: Any) -> Ended:
    bamboo = {"ttl_seconds": TTL_SECONDS, "timeout_seconds": 30, **block}
    ended = launch_forked(
        "hosted.py", "--config", json.dumps({**CONFIG, "bamboo": bamboo}), *arguments, workers=workers,
        deadline_seconds=DEADLINE_SECONDS, temporary=folder / "temporary", patched=True,
    )  # fmt: skip
    assert ended.left == [], ended.output[-6000:]
    return ended


def at(etcd: EmbeddedEtcd) -> dict[str, Any]:
    return {"endpoints": [etcd.endpoint], "timeout_seconds": 2}


def losses(ended: Ended) -> dict[int, list[list[float]]]:
    """Return the losses that each rank has shown, by engine."""
    found: dict[int, list[list[float]]] = {}
    for rank, text in re.findall(r"^LOSSES of (\d+): (.*)$", ended.output, re.MULTILINE):
        found.setdefault(int(rank), []).append(json.loads(text))
    return found


@functools.cache
def undisturbed(folder: Path, *arguments: object, workers: int = 4) -> list[list[float]]:
    """Return the losses of the job without etcd."""
    folder.mkdir(exist_ok=True)
    ended = run(folder, *arguments, workers=workers)
    assert set(ended.codes.values()) == {0}, ended.output[-6000:]
    return losses(ended)[0]


@pytest.fixture
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return functools.partial(undisturbed, tmp_path_factory.getbasetemp() / "without-etcd")


def said_by_all(ended: Ended, text: str) -> None:
    """Check that both workers end with an error that says a text, or that it met the error of the other."""
    assert ended.codes == {0: 1, 1: 1}, ended.output[-6000:]
    assert f"Error: {text}" in ended.output, ended.output[-6000:]
    (line,) = re.findall(r"^\[rank\d\]: bamboo: worker \d ends: (.*)$", ended.output, re.MULTILINE)
    assert text in line or "it met the same error as worker" in line, line


def test_a_job_trains_as_without_etcd_and_leaves_an_orderly_end(
    tmp_path: Path, etcd: EmbeddedEtcd, reference: Any
) -> None:
    """Two engines, one after the other, use the same agents."""
    second = ("--engines", 2)
    ended = run(tmp_path, *second, etcd=at(etcd), job="orderly")
    assert set(ended.codes.values()) == {0}, ended.output[-6000:]
    assert losses(ended) == dict.fromkeys(range(4), reference(*second))
    look = Look(etcd.endpoint, job="orderly")
    assert look.get(keys.FINISHED) == b"all 4 worker(s) have ended in order"
    assert not look.list(keys.NODES)
    assert [event["text"] for event in look.events("plan")] == [
        "the launcher has placed 4 workers: 2 stages x 2 pipelines"
    ]
    plan = look.plan()
    assert plan is not None
    assert plan.owners == ((0, 2), (1, 3))


def test_engines_whose_models_were_built_before_the_agent_began_use_it_too(
    tmp_path: Path, etcd: EmbeddedEtcd, reference: Any
) -> None:
    ended = run(tmp_path, "--engines", 2, "--before", etcd=at(etcd), job="before")
    assert losses(ended) == dict.fromkeys(range(4), reference("--engines", 2))


@pytest.mark.parametrize(("victim", "why"), [(0, "coordinates, and holds torch's store"), (3, "does neither")])
def test_a_killed_worker_changes_no_bit_of_the_losses(
    tmp_path: Path, etcd: EmbeddedEtcd, reference: Any, victim: int, why: str
) -> None:
    fault = {"how": "kill", "step": 1, "instruction": 6, "worker": victim}
    ended = run(tmp_path, etcd=at(etcd), job=f"kill-{victim}", fault_injection=[fault])
    survivors = [worker for worker in range(4) if worker != victim]
    assert ended.codes == {victim: -signal.SIGKILL, **dict.fromkeys(survivors, 0)}, ended.output[-6000:]
    assert losses(ended) == dict.fromkeys(survivors, reference())
    look = Look(etcd.endpoint, job=f"kill-{victim}")
    plan = look.plan()
    assert plan is not None
    assert (plan.number, plan.dead) == ((0, 1), frozenset({victim}))
    leaders = {event["node"].rpartition("-")[2] for event in look.events("coordinator")}
    assert "0" in leaders
    assert len(leaders) > 1 or victim != 0, why


def test_in_a_long_pipeline_both_neighbours_of_a_killed_worker_tell_at_once(
    tmp_path: Path, etcd: EmbeddedEtcd, reference: Any
) -> None:
    fault = {"how": "kill", "step": 1, "instruction": 6, "worker": 2}
    ended = run(tmp_path, "--stages", 4, etcd=at(etcd), job="long", fault_injection=[fault], ttl_seconds=100)
    assert losses(ended) == dict.fromkeys((0, 1, 3), reference("--stages", 4)), ended.output[-6000:]
    (failover,) = Look(etcd.endpoint, job="long").events("failover")
    assert "both neighbours of worker 2" in failover["text"]


def test_a_run_that_was_killed_does_not_confuse_the_next(tmp_path: Path, etcd: EmbeddedEtcd, reference: Any) -> None:
    """Its nodes are registered still, its plan is an old one, and its failure is on the board."""
    faults = [{"how": "kill", "step": 1, "worker": worker} for worker in range(4)]
    ended = run(tmp_path, etcd=at(etcd), job="again", fault_injection=faults)
    assert set(ended.codes.values()) == {-signal.SIGKILL}
    look = Look(etcd.endpoint, job="again")
    assert len(look.list(keys.NODES)) == 4
    look.put(keys.failure("job"), b"{}")
    ended = run(tmp_path, etcd=at(etcd), job="again")
    assert losses(ended) == dict.fromkeys(range(4), reference()), ended.output[-6000:]
    assert look.get(keys.failure("job")) is None


def test_wrong_endpoints_are_named_on_every_worker(tmp_path: Path) -> None:
    begin = time.monotonic()
    endpoint = f"127.0.0.1:{free_port()}"
    ended = run(tmp_path, workers=2, etcd={"endpoints": [endpoint], "timeout_seconds": 1})
    said_by_all(ended, f"bamboo.etcd.endpoints = {endpoint}: ")
    assert time.monotonic() - begin < 15


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"1": {"config": {"gradient_clipping": 1.0}}}, "gradient_clipping = "),
        ({"1": {"layers": 6}}, "num_layers = "),
        ({"1": {"bamboo": {"etcd": None}}}, "bamboo.etcd = "),
    ],
)
def test_a_config_that_differs_is_refused_by_the_name_of_the_key(
    tmp_path: Path, etcd: EmbeddedEtcd, own: dict[str, Any], words: str
) -> None:
    """Whoever comes first publishes, so either side may be the one that is refused."""
    ended = run(tmp_path, "--own", json.dumps(own), workers=2, etcd=at(etcd), job="config")
    said_by_all(ended, words)


def test_an_etcd_that_one_worker_cannot_reach_ends_all(tmp_path: Path, etcd: EmbeddedEtcd) -> None:
    """How a worker logs in is its own affair, so that is not compared."""
    own = {"1": {"bamboo": {"etcd": {**at(etcd), "ca": "/no/such/file"}}}}
    ended = run(tmp_path, "--own", json.dumps(own), workers=2, etcd=at(etcd), job="login")
    said_by_all(ended, "bamboo.etcd.endpoints = ")


def test_a_second_model_of_another_shape_is_refused(tmp_path: Path, etcd: EmbeddedEtcd) -> None:
    ended = run(tmp_path, "--engines", 2, "--second-stages", 1, workers=2, etcd=at(etcd), job="shape")
    said_by_all(ended, "this model makes 1 stages x 2 pipelines, but the job's plan")


def fail(folder: Path, etcd: EmbeddedEtcd, how: str, *, rank: int, timeout_seconds: float) -> Ended:
    block = {"timeout_seconds": timeout_seconds, "ttl_seconds": TTL_SECONDS, "job": how, "etcd": at(etcd)}
    ended = launch_forked(
        "failing.py", "--how", how, "--rank", rank, "--config", json.dumps({"bamboo": block}), workers=4,
        deadline_seconds=DEADLINE_SECONDS, temporary=folder / "temporary",
    )  # fmt: skip
    assert ended.left == [], ended.output[-6000:]
    look = Look(etcd.endpoint, job=how)
    assert not look.list(keys.NODES), "nobody has to wait for their leases"
    assert look.get(keys.failure("job")) is not None
    return ended


def test_a_workers_own_error_ends_the_job_and_is_shown_once(tmp_path: Path, etcd: EmbeddedEtcd) -> None:
    ended = fail(tmp_path, etcd, "layer", rank=1, timeout_seconds=30)
    assert ended.codes == dict.fromkeys(range(4), 1), ended.output[-6000:]
    assert ended.output.count("Traceback") == 1
    assert ended.output.count("ends: worker 1 failed: ValueError: the user's layer broke") == 3


def test_a_script_that_ends_early_on_one_worker_ends_the_job(tmp_path: Path, etcd: EmbeddedEtcd) -> None:
    ended = fail(tmp_path, etcd, "exit", rank=1, timeout_seconds=4)
    assert ended.codes == {0: 1, 1: 0, 2: 1, 3: 1}, ended.output[-6000:]
    assert "worker 1 left: the script ended there while others still trained" in ended.output
