"""What goes wrong in a job: the first cause is shown once and at once, the other workers say one line, all end."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.dropin.launching import Ended, launch_forked

DEADLINE_SECONDS = 90
LIMIT_SECONDS = 10.0
BUSY_SECONDS = 5.0  # what a busy machine may add to a limit


def run(folder: Path, *, how: str = "", rank: int = 0, workers: int = 3, stages: int = 3, **more: Any) -> Ended:
    """Run `failing.py`; every worker but those that a signal ends must end with exit code 1, leaving nothing."""
    config, layers, abandoned = more.pop("config", {}), more.pop("layers", 6), more.pop("abandoned", [])
    ended = launch_forked(
        "failing.py", "--how", how, "--rank", rank, "--stages", stages, "--layers", layers, "--config",
        json.dumps(config), workers=workers, deadline_seconds=DEADLINE_SECONDS, temporary=folder, abandoned=abandoned,
        **more,
    )  # fmt: skip
    assert ended.left == [], ended.output[-6000:]
    return ended


def seconds_to_the_end(ended: Ended) -> float:
    """Time from the last worker's first sign to the end of the job."""
    begins = [float(second) for second in re.findall(r"BEGIN (\d+\.\d+)", ended.output)]
    return time.time() - max(begins) if begins else ended.seconds


def lines_of(ended: Ended) -> list[str]:
    return [re.sub(r"^\[rank\d+\]: ?", "", line) for line in ended.output.splitlines()]


def shows_one_cause(ended: Ended, last_line: str, *, others: int) -> None:
    """One traceback, which ends in `last_line`; every other worker says one line that names the worker or the error."""
    lines = lines_of(ended)
    assert lines.count("Traceback (most recent call last):") == 1, ended.output[-6000:]
    assert sum(line.endswith("failed first, with:") for line in lines) == 1, ended.output[-6000:]
    shown = [line for line in lines if last_line in line and not re.match(r"bamboo: |\s+(raise|File) ", line)]
    assert len(shown) == 1, ended.output[-6000:]
    ends = [line for line in lines if re.match(r"bamboo: worker \d+ ends: ", line)]
    assert len(ends) == others, ended.output[-6000:]


WRONG_CONFIGS: list[tuple[Mapping[str, Any], Mapping[str, Any], str]] = [
    ({"bamboo": {"redundency": "fit"}}, {}, 'bamboo.redundency: unknown key; did you mean "redundancy"?'),
    ({"bamboo": {"pipelines": 2}}, {}, "InfeasiblePlanError: 3 workers make 1 pipeline(s) of 3 stages"),
    ({"zero_optimization": {"stage": 2}}, {}, "zero_optimization.stage = 2"),
    ({"zero_optimization": {"stage": 1}}, {}, "zero_optimization.stage = 1"),
    ({"train_batch_size": 15}, {}, "train_batch_size (15) is not a multiple of train_micro_batch_size_per_gpu (2)"),
    ({"bamboo": None}, {}, "a BambooPipelineModule needs a `bamboo` block"),
    ({}, {"stages": 2}, "InfeasiblePlanError: 3 workers do not make"),
    ({}, {"layers": 2}, "ConfigError: 2 layers cannot fill 3 stages"),
]


@pytest.mark.parametrize(("config", "arguments", "message"), WRONG_CONFIGS)
def test_a_wrong_config_is_named_once(
    tmp_path: Path, config: Mapping[str, Any], arguments: Mapping[str, Any], message: str
) -> None:
    ended = run(tmp_path, config=config, **arguments)
    assert set(ended.codes.values()) == {1}, ended.output[-6000:]
    shows_one_cause(ended, message, others=2)
    assert seconds_to_the_end(ended) < LIMIT_SECONDS


USER_ERRORS = [
    ("layer", 1, "ValueError: the user's layer broke"),
    ("layer", 0, "ValueError: the user's layer broke"),
    ("dataset", 0, "LookupError: the user's data set broke"),
    ("dataset", 2, "LookupError: the user's data set broke"),
    ("between", 2, 'KeyError: "the user\'s script broke between steps"'),
    ("between", 0, 'KeyError: "the user\'s script broke between steps"'),
    ("before", 1, "ArithmeticError: the user's script broke before initialize"),
    ("before", 0, "ArithmeticError: the user's script broke before initialize"),
    ("interrupt", 1, "KeyboardInterrupt"),
]


@pytest.mark.parametrize(("how", "rank", "last_line"), USER_ERRORS)
def test_an_exception_of_one_worker_is_shown_once(tmp_path: Path, how: str, rank: int, last_line: str) -> None:
    ended = run(tmp_path, how=how, rank=rank)
    assert set(ended.codes.values()) == {1}, ended.output[-6000:]
    shows_one_cause(ended, last_line, others=2)
    assert f"bamboo: worker {rank} failed first, with:" in lines_of(ended)
    told = [line for line in lines_of(ended) if re.match(r"bamboo: worker \d+ ends: ", line)]
    assert all(f"worker {rank} failed: {last_line}" in line for line in told), told
    assert seconds_to_the_end(ended) < LIMIT_SECONDS


def test_an_exception_in_one_of_two_pipelines_is_shown_once(tmp_path: Path) -> None:
    ended = run(tmp_path, how="layer", rank=3, workers=4, stages=2)
    assert set(ended.codes.values()) == {1}, ended.output[-6000:]
    shows_one_cause(ended, "ValueError: the user's layer broke", others=3)


def test_data_that_ends_in_a_step_ends_the_job_with_step_and_micro_batch(tmp_path: Path) -> None:
    ended = run(tmp_path, how="exhausted")
    assert set(ended.codes.values()) == {1}, ended.output[-6000:]
    shows_one_cause(ended, "DataExhaustedError: data ended in step 1 after 3 of this pipeline's 8", others=2)
    assert seconds_to_the_end(ended) < LIMIT_SECONDS


def test_a_loss_that_is_not_a_number_is_reported_with_step_and_micro_batch(tmp_path: Path) -> None:
    ended = run(tmp_path, how="nan", rank=1)
    assert set(ended.codes.values()) == {1}, ended.output[-6000:]
    shows_one_cause(ended, "NonFiniteLossError: loss is nan in step 1, micro-batch 0 of the global batch", others=2)
    assert seconds_to_the_end(ended) < LIMIT_SECONDS


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_others_name_a_worker_that_was_killed(tmp_path: Path, rank: int) -> None:
    def dies() -> Ended:
        ended = run(tmp_path, how="kill", rank=rank)
        assert ended.codes == {0: 1, 1: 1, 2: 1, rank: -signal.SIGKILL}
        names_the_silent(ended, rank)
        assert seconds_to_the_end(ended) < LIMIT_SECONDS
        return ended

    # A call that is on its way when the store's host dies cannot be kept from it; there are few of them.
    tries = 3 if rank == 0 else 1
    assert any("frame #" not in dies().output for _ in range(tries)), "torch has written its stack"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_name_a_worker_that_hangs(tmp_path: Path, rank: int) -> None:
    ended = run(tmp_path, how="stop", rank=rank, config={"bamboo": {"timeout_seconds": 3}}, abandoned=[rank])
    assert {code for other, code in ended.codes.items() if other != rank} == {1}
    names_the_silent(ended, rank)
    assert "frame #" not in ended.output, "torch has written its stack"
    assert seconds_to_the_end(ended) < LIMIT_SECONDS + BUSY_SECONDS


def names_the_silent(ended: Ended, rank: int) -> None:
    """No traceback; each survivor names the worker, also one that was no neighbour of it."""
    reason = "which holds the job's store, is gone or hangs" if rank == 0 else "gave no sign of life"
    ends = [line for line in lines_of(ended) if re.match(r"bamboo: worker \d+ ends: ", line)]
    assert len(ends) == 2, ended.output[-6000:]
    assert all(re.search(rf"ends: worker {rank},? {reason}", line) for line in ends), ends
    assert "Traceback" not in ended.output


def test_a_worker_whose_script_ends_early_is_named(tmp_path: Path) -> None:
    ended = run(tmp_path, how="exit", rank=1)
    assert ended.codes == {0: 1, 1: 0, 2: 1}
    assert ended.output.count("worker 1 left: the script ended there while others still trained") == 2
    assert "Traceback" not in ended.output


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "MASTER_ADDR"])
@pytest.mark.parametrize("script", ["failing.py", "alexnet_cifar.py"])
def test_a_missing_variable_of_the_launcher_is_named(tmp_path: Path, script: str, missing: str) -> None:
    ended = launch_forked(
        script, workers=1, deadline_seconds=DEADLINE_SECONDS, temporary=tmp_path, environment={missing: None},
        patched=script != "failing.py",
    )  # fmt: skip
    assert ended.codes == {0: 1}
    assert f"ConfigError: environment variable {missing} not set: start the script with a launcher" in ended.output
    assert "No module named" not in ended.output
    assert ended.output.count("Traceback") == 1


def test_clean_runs_end_with_exit_code_0_every_time(tmp_path: Path) -> None:
    for attempt in range(5):
        ended = run(tmp_path / str(attempt), how="barrier", workers=4, stages=2)
        assert ended.codes == {0: 0, 1: 0, 2: 0, 3: 0}, ended.output[-6000:]
        assert "DONE 4" in ended.output
