"""The main job: its pure parts here, and the whole of it with two workers under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bamboo_ds.models.gpt import GPT_SIZES
from bamboo_ds.models.text import ByteWindows

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpt_report  # noqa: E402
import train_gpt  # noqa: E402

SUMMARY_KEYS = {
    "loss_first", "loss_last", "validation_loss", "steps", "samples_per_second", "tokens_per_second", "stages",
    "pipelines", "redundancy", "plot", "seconds", "parameters", "text_bytes", "sample",
}  # fmt: skip
DEADLINE_SECONDS = 110


def config_file(folder: Path, **changes: Any) -> Path:
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gpt": {"size": "tiny", "layers": 2, "hidden": 32, "sequence_length": 32},
        "bamboo": {},
        **changes,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def run_job(workers: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parent)}
    return subprocess.run(
        [*launcher, str(SCRIPTS / "train_gpt.py"), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


def test_a_named_size_is_changed_by_the_other_keys_of_the_block() -> None:
    size = train_gpt.resolve_size({"size": "gpt2", "dropout": 0.0}, name=None)
    assert (size.layers, size.hidden, size.dropout) == (12, 768, 0.0)


def test_the_command_line_replaces_the_block() -> None:
    assert train_gpt.resolve_size({"size": "gpt2", "dropout": 0.0}, name="small") == GPT_SIZES["small"]
    assert train_gpt.resolve_size({}, name=None) == GPT_SIZES["tiny"]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"size": "huge"}, "gpt.size = 'huge': not known; known sizes: tiny, small"),
        ({"width": 3, "depth": 4}, "gpt block: unknown keys depth, width; known keys: size, layers, hidden"),
        ({"vocabulary": 128}, "gpt.vocabulary = 128: the text is bytes, which need at least 256"),
        ({"heads": 5}, "is not a multiple of gpt.heads (5)"),
    ],
)
def test_a_wrong_block_is_refused_by_key(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        train_gpt.resolve_size(block, name=None)
    assert message in str(caught.value)


def test_micro_batches_follow_the_text_and_start_again_at_its_end() -> None:
    windows = ByteWindows(torch.arange(21, dtype=torch.uint8), sequence_length=4)
    batches = list(train_gpt.read_micro_batches(windows, iter([0, 2]), size=2))
    assert [tokens[:, 0].tolist() for tokens, _ in batches] == [[0, 4], [16, 0]]
    assert [labels[:, 0].tolist() for _, labels in batches] == [[1, 5], [17, 1]]


def test_the_summary_means_the_ends_of_the_curve_and_rates_all_steps() -> None:
    curves = gpt_report.Curves(first_step=1, batch_size=8)
    for loss in (6, 5, 4, 3, 2, 1):
        curves.add(float(loss), seconds=0.5)
    curves.validation = {3: 4.5, 6: 1.23456}
    assert curves.summary() == {
        "loss_first": 4.0, "loss_last": 3.0, "validation_loss": 1.2346, "steps": 6, "samples_per_second": 16.0,
    }  # fmt: skip


def test_a_run_without_steps_has_a_summary_and_a_plot(tmp_path: Path) -> None:
    curves = gpt_report.Curves(first_step=11, batch_size=8)
    assert curves.summary()["loss_last"] is None
    assert gpt_report.plot_losses(curves, title="nothing", path=tmp_path / "loss.png") == str(tmp_path / "loss.png")


def test_lines_come_at_the_interval_with_validations_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    lines = gpt_report.Lines(steps=7, interval=3)
    curves = gpt_report.Curves(first_step=1, batch_size=8, validation={4: 2.5})
    for step in range(1, 8):
        curves.add(3.0, seconds=0.5)
        lines.show(step, curves)
    shown = capsys.readouterr()
    assert [line.split()[1] for line in shown.err.splitlines()] == ["3/7", "4/7", "6/7", "7/7"]
    assert "step 4/7  loss 3.0000  validation 2.5000  16.0 samples/s  ETA 2 s" in shown.err
    assert shown.out == ""


def test_a_worker_shows_nothing_before_it_reports_and_then_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Another has reported so far; it died."""
    curves = gpt_report.Curves(first_step=1, batch_size=8)
    with gpt_report.Progress(steps=7, interval=3) as progress:
        for step in range(1, 8):
            curves.add(3.0, seconds=0.5)
            if step > 3:
                progress.show(step, curves)
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["6/7", "7/7"]


def test_losses_in_a_file_keep_their_bits(tmp_path: Path) -> None:
    curves = gpt_report.Curves(first_step=3, batch_size=8, training=[0.1 + 0.2, 1e-310], validation={4: 2.5})
    path = tmp_path / "folder/losses.json"
    curves.write(path)
    assert gpt_report.Curves.read(path) == curves
    assert [path.name for path in path.parent.iterdir()] == ["losses.json"]


def test_a_byte_is_drawn_by_its_seed_from_what_follows_the_position() -> None:
    logits = torch.full((2, 3, 300), -100.0)
    logits[0, 1, [7, 9]] = 0.0
    logits[..., 299] = 1000.0  # padding of the vocabulary is no byte
    labels = torch.zeros(0)
    drawn = [float(train_gpt.draw_byte(logits, labels, position=1, seed=seed)) for seed in range(20)]
    assert {*drawn} == {7.0, 9.0}
    assert drawn == [float(train_gpt.draw_byte(logits, labels, position=1, seed=seed)) for seed in range(20)]


def test_stdout_holds_the_report_alone() -> None:
    program = """
import os, sys, train_gpt
print("before")
stdout = train_gpt.claim_stdout()
print("a library prints")
os.system("echo a child prints")
print("the report", file=stdout, flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=SCRIPTS, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "before\nthe report\n"
    assert sorted(done.stderr.splitlines()) == ["a child prints", "a library prints"]


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--stages", "two"], ["--unknown"]])
def test_a_wrong_argument_ends_the_script_before_the_heavy_imports(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train_gpt.parse_arguments(arguments)
    assert caught.value.code == 2


@pytest.mark.slow
def test_two_workers_train_generate_and_report(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 400)
    job = ["--deepspeed_config", config_file(tmp_path), "--stages", 2, "--text", text, "--steps", 60]
    job += ["--eval-interval", 25, "--sample-bytes", 12, "--prompt", "the quick br", "--out", tmp_path / "out"]
    job += ["--losses", tmp_path / "losses.json"]
    done = run_job(2, *job)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == 1, done.stdout
    summary = json.loads(done.stdout)
    assert set(summary) == SUMMARY_KEYS
    assert (summary["stages"], summary["pipelines"], summary["steps"]) == (2, 1, 60)
    assert summary["text_bytes"] == text.stat().st_size
    assert summary["loss_last"] < 0.5 < 4 < summary["loss_first"]
    assert summary["validation_loss"] < 0.5
    assert summary["sample"] == "the quick brown fox jump", "it learnt one sentence by heart"
    assert Path(summary["plot"]).read_bytes().startswith(b"\x89PNG")
    assert "step 25/60" in done.stderr
    assert done.stderr.count("step 60/60") == 1, "more than one worker reports"
    curves = gpt_report.Curves.read(tmp_path / "losses.json")
    assert (len(curves.training), list(curves.validation)) == (60, [25, 50, 60])
