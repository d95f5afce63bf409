"""`bamboo-ds schedule`, as a user runs it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from bamboo_ds.cli.schedule import schedule

GOLDEN = Path(__file__).parents[1] / "schedule" / "golden"


def run(*arguments: str) -> Result:
    app = typer.Typer(add_completion=False)
    app.command()(schedule)
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("redundancy", "step", "share"),
    [
        ("off", "33 (1.000 x off)", "0% 0% 0% 0%"),
        ("fit", "33 (1.000 x off)", "50% 50% 50% 88%"),
        ("eflb", "38 (1.152 x off)", "100% 100% 100% 100%"),
    ],
)
def test_the_picture_comes_with_legend_and_figures(redundancy: str, step: str, share: str) -> None:
    result = run("--stages", "4", "--micro-batches", "8", "--redundancy", redundancy)
    assert result.exit_code == 0
    picture, words = result.output.split("\n\n")
    assert picture + "\n" == (GOLDEN / f"p4_m8_{redundancy}.txt").read_text()
    lines = words.splitlines()
    assert lines[0].startswith("F forward   B backward   r redundant forward")
    assert lines[1] == f"step time    {step}"
    assert lines[3].startswith(f"FRC share    {share} ")


def test_fit_is_the_default() -> None:
    arguments = ("--stages", "4", "--micro-batches", "8")
    assert run(*arguments).output == run(*arguments, "--redundancy", "fit").output


def test_json_is_one_object_that_says_the_same() -> None:
    result = run("--stages", "2", "--micro-batches", "2", "--redundancy", "eflb", "--redundant", "0.5", "--json")
    shown = json.loads(result.output)
    assert list(shown) == [
        "stages",
        "micro_batches",
        "redundancy",
        "step_seconds",
        "vs_off",
        "bubble_share",
        "frc_share",
        "orders",
        "timeline",
    ]
    assert (shown["stages"], shown["micro_batches"], shown["redundancy"]) == (2, 2, "eflb")
    assert shown["frc_share"] == [1.0, 1.0]
    assert shown["step_seconds"] == pytest.approx(9 * shown["vs_off"])
    assert sorted(shown["orders"]["0"]) == sorted(["0F0", "0F1", "1R0", "1R1", "0B0", "0B1"])
    busy = sum(event["finish"] - event["start"] for event in shown["timeline"])
    assert busy == pytest.approx(2 * (2 * 3 + 2 * 0.5))
    assert shown["bubble_share"] == pytest.approx(1 - busy / (2 * shown["step_seconds"]))
    first = {"stage": 1, "operation": "0R0", "start": 0.0, "finish": 0.5}
    assert first in shown["timeline"]


LOSS = ("--stages", "3", "--micro-batches", "3", "--victim", "1", "--before")


def test_a_loss_shows_the_disturbed_step_and_what_the_shadow_runs() -> None:
    result = run(*LOSS, "1SG0")
    assert result.exit_code == 0
    picture, words, failover = result.output.split("\n\n")
    assert picture.splitlines() == [
        "0  F0 F1 F2 r0 r1 r2 .  b0--- B0--- b1--- B1--- b2--- B2---",
        "1  .  F0 F1 r0 .  B0--- x",
        "2  r0 .  F0 B0--- F1 B1--- F2 B2--- r1 r2 .  .  .  .  .  .",
    ]
    assert words.splitlines()[1:] == [
        "x worker lost   f b forward and backward of the lost stage, by the worker that took it over",
        "lost         the worker of stage 1 at 7, before 1SG0",
        "step time    19 = 15 undisturbed +2 for lost work +2 as one worker runs two stages",
        "later steps  18 until the pipeline is reconfigured",
    ]
    assert failover.splitlines() == [
        "the worker of stage 0 goes on with",
        "1P2 1SA2",
        "1P0",
        "1P1",
        "1RG0 1B0",
        "0B0",
        "1RG1 1B1",
        "0B1",
        "1RG2 1B2",
        "0B2",
        "REDUCE STEP",
    ]


def test_the_moment_of_a_loss_may_be_a_number() -> None:
    assert run(*LOSS, "9").output == run(*LOSS, "1SG0").output


def test_a_loss_as_json_says_the_same() -> None:
    shown = json.loads(run(*LOSS, "1SG0", "--json").output)
    assert list(shown) == ["stages", "micro_batches", "redundancy", "step_seconds", "failover", "orders", "timeline"]
    failover = shown["failover"]
    assert failover.pop("schedule")[0] == "1P2 1SA2"
    assert failover == {
        "victim": 1,
        "before": "1SG0",
        "shadow": 0,
        "lost_seconds": 7.0,
        "undisturbed_seconds": 15.0,
        "pause_seconds": 2.0,
        "merged_seconds": 2.0,
        "next_step_seconds": 18.0,
        "held_by_successor": 2,
    }
    assert shown["step_seconds"] == 19.0
    assert shown["orders"]["1"] == ["1F0", "1F1", "2R0", "1B0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*LOSS[:4], "--victim", "1"), "--victim and --before belong together"),
        ((*LOSS[:4], "--before", "1B1"), "--victim and --before belong together"),
        ((*LOSS[:4], "--victim", "3", "--before", "0"), "--victim 3: must be a stage, 0 to 2"),
        ((*LOSS, "22"), "--before 22: must be 0 to 21 or one of 1RA0 1F0 1SA0 "),
        ((*LOSS, "0F0"), "--before 0F0: must be 0 to 21"),
        ((*LOSS, "first"), "--before first: must be 0 to 21"),
        (("--stages", "1", "--micro-batches", "3", "--victim", "0", "--before", "0"), "nobody can take over its work"),
        (("--micro-batches", "8"), "--stages is missing"),
        (("--stages", "4"), "--micro-batches is missing"),
        (("--stages", "0", "--micro-batches", "8"), "--stages 0: must be at least 1"),
        (("--stages", "4", "--micro-batches", "-1"), "--micro-batches -1: must be at least 1"),
        (("--stages", "4", "--micro-batches", "8", "--redundancy", "all"), "must be one of off, lflb, fit, eflb"),
        (("--stages", "4", "--micro-batches", "8", "--backward", "0"), "backward cost of stage 0 is 0.0"),
        (("--stages", "4", "--micro-batches", "8", "--redundant", "nan"), "redundant cost of stage 0 is nan"),
    ],
)
def test_a_bad_argument_is_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1
    assert result.output.startswith("bamboo-ds schedule: ")
    assert message in result.output


def test_long_pictures_do_not_wrap_where_there_is_no_terminal() -> None:
    lines = run("--stages", "2", "--micro-batches", "60").output.splitlines()
    assert [line[:3] for line in lines[:3]] == ["0  ", "1  ", ""]
    assert len(lines[0]) > 500


def test_a_terminal_gets_colours_and_panels_that_fit_it() -> None:
    code = (
        "import typer\nfrom bamboo_ds.cli.schedule import schedule\n"
        "app = typer.Typer(add_completion=False)\napp.command()(schedule)\napp()"
    )
    command = [sys.executable, "-c", code, "--stages", "4", "--micro-batches", "8"]
    environment = {**os.environ, "COLUMNS": "60", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    shown = _on_a_terminal(command, environment)
    assert "\x1b[30;46mF0\x1b[0m" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    rows = [line for line in plain.splitlines() if re.match(r" \d  ", line)]
    assert len(rows) == 8  # two panels of four rows
    assert all(len(line) <= 60 for line in rows)
    whole = ["".join(rows[stage + panel][4:] for panel in (0, 4)).rstrip() for stage in range(4)]
    assert whole == [line[3:] for line in (GOLDEN / "p4_m8_fit.txt").read_text().splitlines()]


def _on_a_terminal(command: list[str], environment: dict[str, str]) -> str:
    """Return what a command writes when its output is a terminal."""
    master, slave = pty.openpty()
    with subprocess.Popen(command, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        read = b""
        try:
            while chunk := os.read(master, 65536):
                read += chunk
        except OSError:  # Linux reports the end of a terminal as an input/output error
            pass
        assert process.wait(timeout=30) == 0
    os.close(master)
    return read.decode().replace("\r\n", "\n")
