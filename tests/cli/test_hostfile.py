"""The hostfile and the flags that choose from it, as DeepSpeed's launcher reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bamboo_ds.cli.hostfile import Host, Hosts, parse_hostfile, read_hostfile, select, this_machine
from bamboo_ds.errors import ConfigError

HOSTS = parse_hostfile("worker-0 slots=4\nworker-1 slots=4 zone=b\n", name="hosts")


def slots(hosts: Hosts) -> dict[str, tuple[int, ...]]:
    return {name: host.slots for name, host in hosts.items()}


def test_hosts_keep_their_order_comments_and_what_else_mpi_says_are_read_over(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# all\n\n  w2   slots=2 max_slots=8\nw1\tslots=1 zone=eu-1a # fast\n")
    assert read_hostfile(path) == {"w2": Host((0, 1)), "w1": Host((0,), "eu-1a")}
    assert list(read_hostfile(path)) == ["w2", "w1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w0 slots=2\nw1", '--hostfile f:2: "w1" must be such as "worker-0 slots=4"'),
        ("w0 slots=two", '--hostfile f:1: "w0 slots=two" must be such as'),
        ("w0 slots=2x", '--hostfile f:1: "w0 slots=2x" must be such as'),
        ("w0 slots=0", "--hostfile f:1: w0 has no slot"),
        ("w0 slots=1\n\nw0 slots=2", "--hostfile f:3: w0 occurs twice"),
        ("# nobody\n", "--hostfile f: names no host"),
    ],
)
def test_a_wrong_line_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_hostfile(text, name="f")
    assert str(error.value).startswith(message)


def test_a_missing_hostfile_is_an_error_and_no_job_on_this_machine_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read it: No such file"):
        read_hostfile(tmp_path / "none")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3)}),
        ({"include": "worker-1@worker-0:2,0"}, {"worker-0": (0, 2), "worker-1": (0, 1, 2, 3)}),
        ({"include": "worker-1:3@worker-1:1"}, {"worker-1": (1, 3)}),
        ({"exclude": "worker-1:0"}, {"worker-0": (0, 1, 2, 3), "worker-1": (1, 2, 3)}),
        ({"exclude": "worker-0"}, {"worker-1": (0, 1, 2, 3)}),
        ({"exclude": "worker-0:0,1,2,3@worker-1:1"}, {"worker-1": (0, 2, 3)}),
        ({"num_nodes": 1}, {"worker-0": (0, 1, 2, 3)}),
        ({"num_gpus": 2}, {"worker-0": (0, 1), "worker-1": (0, 1)}),
        ({"num_nodes": 1, "num_gpus": 1}, {"worker-0": (0,)}),
    ],
)
def test_flags_choose_hosts_and_slots(flags: dict[str, str | int], expected: dict[str, tuple[int, ...]]) -> None:
    assert slots(select(HOSTS, **flags)) == expected  # type: ignore[arg-type]


def test_a_chosen_host_keeps_its_zone() -> None:
    assert select(HOSTS, include="worker-1:0")["worker-1"] == Host((0,), "b")


@pytest.mark.parametrize("spec", ["worker-0@worker-1:0,2", "worker-1:0"])
@pytest.mark.parametrize("flag", ["include", "exclude"])
def test_it_chooses_as_deepspeed_does(flag: str, spec: str) -> None:
    from deepspeed.launcher.runner import parse_resource_filter

    everything = {name: list(host.slots) for name, host in HOSTS.items()}
    theirs = parse_resource_filter(everything, **{f"{flag}_str": spec})
    ours = select(HOSTS, **{flag: spec})  # type: ignore[arg-type]
    assert {name: list(numbers) for name, numbers in slots(ours).items()} == dict(theirs)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"include": "a", "exclude": "b"}, "--include a and --exclude b are both given"),
        ({"include": "worker-0", "num_gpus": 1}, "--num_gpus 1 and --include worker-0 are both given"),
        ({"exclude": "worker-0", "num_nodes": 1}, "--num_nodes 1 and --exclude worker-0 are both given"),
        ({"include": "worker-9"}, '--include worker-9: no host "worker-9"; there are: worker-0, worker-1'),
        ({"include": "worker-0:7"}, "--include worker-0:7: worker-0 has no slot 7; it has: 0, 1, 2, 3"),
        ({"exclude": "worker-0:x"}, '--exclude worker-0:x: "x" must be numbers of slots'),
        ({"include": "worker-0:"}, '--include worker-0:: "" must be numbers of slots'),
        ({"exclude": "worker-0@worker-1"}, "--exclude worker-0@worker-1: leaves no slot at all"),
        ({"num_nodes": 3}, "--num_nodes 3: there are only 2 hosts: worker-0, worker-1"),
        ({"num_gpus": 5}, "--num_gpus 5: worker-0 has only 4 slot(s)"),
    ],
)
def test_a_choice_that_cannot_be_made_is_named(flags: dict[str, str | int], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        select(HOSTS, **flags)  # type: ignore[arg-type]
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("visible", "number"), [("0,1,3", 3), ("5", 1), ("GPU-a,GPU-b", 2), ("0,-1,1", 1), ("", 1), ("-1", 1)]
)
def test_visible_devices_are_the_slots_of_this_machine(
    visible: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert this_machine().slots == tuple(range(number))


@pytest.mark.parametrize(
    ("program", "number"),
    [("echo 'GPU 0: A100 (UUID: GPU-1)'; echo 'GPU 1: A100 (UUID: GPU-2)'", 2), ("echo broken; exit 9", 1), (None, 1)],
)
def test_else_nvidia_smi_counts_them(
    program: str | None, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin" if program else str(tmp_path))
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert this_machine().slots == tuple(range(number))


def test_on_cpu_and_where_the_number_is_given_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert this_machine(accelerators=5).slots == (0, 1, 2, 3, 4)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert this_machine().slots == (0,)
