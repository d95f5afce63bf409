"""The command line of `bamboo-ds run`: what options come to, what is refused, and what goes to other hosts."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from bamboo_ds.cli.main import app
from bamboo_ds.cli.options import command
from bamboo_ds.cli.run import Launch, this_node
from bamboo_ds.cli.run_options import RunOptions
from bamboo_ds.cli.ssh import agent_arguments, exported, remote_command, ssh_command
from bamboo_ds.config import EtcdConfig
from bamboo_ds.elastic.agent import AgentSettings
from bamboo_ds.elastic.spawner import Script
from bamboo_ds.errors import ConfigError

ETCD = ("--etcd", "127.0.0.1:1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, on a machine without accelerators."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name in ("CUDA_VISIBLE_DEVICES", "BAMBOO_ETCD_PASSWORD", "DS_ENV_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "hosts").write_text("w0 slots=2\nw1 slots=4 zone=b\n")
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments])


def parse(*arguments: str) -> RunOptions:
    """Return what typer makes of a command line."""
    seen: list[RunOptions] = []
    only = typer.Typer(add_completion=False)
    only.command(context_settings={"allow_interspersed_args": False})(command(seen.append, RunOptions, name="run"))
    result = CliRunner().invoke(only, arguments)
    assert result.exit_code == 0, result.output
    return seen[0]


def settings(*arguments: str) -> AgentSettings:
    """Return what the agent of this machine is told by a command line with `--etcd`."""
    launch = Launch.of(parse(*ETCD, *arguments))
    assert launch.etcd is not None
    return this_node(launch, launch.etcd)


def test_what_follows_the_script_is_the_scripts_own() -> None:
    own = ("--deepspeed_config", "c.json", "--job", "theirs", "--help", "--", "-m", "x y", "")
    told = settings("--job", "ours", "train.py", *own)
    assert told.program == Script(("train.py", *own))
    assert told.job == "ours"


def test_a_module_is_run_as_one() -> None:
    told = settings("-m", "package.train", "--lr", "3")
    assert told.program == Script(("package.train", "--lr", "3"), as_module=True)
    assert settings("--module", "package.train").program == Script(("package.train",), as_module=True)


def test_the_defaults_are_those_of_one_node_of_a_cluster() -> None:
    told = settings("train.py")
    assert told == AgentSettings(
        etcd=EtcdConfig(endpoints=("127.0.0.1:1",)),
        job="bamboo",
        node=socket.gethostname(),
        zone="default",
        program=Script(("train.py",)),
        log_folder=Path("runs/bamboo") / socket.gethostname(),
    )


def test_every_option_of_a_node_reaches_its_agent(folder: Path) -> None:
    told = settings(
        *("--job", "j", "--node", "n7", "--zone", "eu-1a", "--address", "10.0.0.7", "--on-demand"),
        *("--workers-per-node", "3", "--start-workers", "12", "--patience", "5", "--ttl", "4.5", "--outage", "20"),
        *("--logs", "out", "--metrics-port", "9100", "train.py"),
    )
    assert (told.job, told.node, told.zone, told.address, told.spot) == ("j", "n7", "eu-1a", "10.0.0.7", False)
    assert (told.workers, told.start_workers, told.patience_seconds) == (3, 12, 5)
    assert (told.ttl_seconds, told.outage_seconds, told.metrics_port) == (4.5, 20, 9100)
    assert told.log_folder == Path("out/n7")
    assert json.loads((folder / "out/endpoint.json").read_text())["job"] == "j"


def test_several_endpoints_tls_and_a_user_with_the_password_from_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (folder / name).write_text("x")
    monkeypatch.setenv("BAMBOO_ETCD_PASSWORD", "secret")
    flags = ("--etcd-user", "u", "--etcd-ca", "ca.pem", "--etcd-cert", "cert.pem", "--etcd-key", "key.pem")
    options = parse("--etcd", "a:1, https://b:2,[::1]:3", *flags, "train.py")
    assert options.etcd_config == EtcdConfig(
        endpoints=("a:1", "https://b:2", "[::1]:3"),
        user="u",
        password="secret",
        ca=str(folder / "ca.pem"),
        cert=str(folder / "cert.pem"),
        key=str(folder / "key.pem"),
    )
    assert "secret" not in repr(options.etcd_config)


def test_the_config_goes_to_the_workers_and_its_block_may_name_job_and_etcd(folder: Path) -> None:
    block = {"job": "from-block", "etcd": {"endpoints": ["b:2379"]}}
    (folder / "c.json").write_text(json.dumps({"train_batch_size": 8, "bamboo": block}))
    launch = Launch.of(parse("--config", "c.json", "train.py"))
    assert launch.etcd == EtcdConfig(endpoints=("b:2379",))
    assert (launch.job, launch.logs) == ("from-block", Path("runs/from-block"))
    assert launch.environment == {"BAMBOO_CONFIG": str(folder / "c.json")}
    told = settings("--config", "c.json", "--job", "from-flag", "train.py")
    assert (told.job, told.etcd.endpoints) == ("from-flag", ("127.0.0.1:1",))
    assert told.environment == {"BAMBOO_CONFIG": str(folder / "c.json")}
    assert Launch.of(parse("--config", "c.json", "--local-nodes", "2", "train.py")).etcd is None


@pytest.mark.parametrize(
    ("flags", "workers", "start", "devices"),
    [
        ((), 1, None, None),
        (("--workers-per-node", "2", "--nodes", "3"), 2, 6, None),
        (("--num_gpus", "4"), 4, None, "0,1,2,3"),
        (("--num_accelerators", "2", "--num_nodes", "2"), 2, 4, "0,1"),
        (("--hostfile", "hosts", "--no_ssh", "--node_rank", "0"), 2, 6, "0,1"),
        (("-H", "hosts", "--no_ssh", "--node_rank", "1", "-i", "w1:1,3"), None, None, None),
        (("-H", "hosts", "--no_ssh", "--node_rank", "0", "-i", "w1:1,3"), 2, 2, "1,3"),
        (("-H", "hosts", "--no_ssh", "--node_rank", "1", "-e", "w0:0"), 4, 5, "0,1,2,3"),
    ],
)
def test_flags_of_deepspeed_choose_the_workers_of_this_node(
    flags: tuple[str, ...], workers: int | None, start: int | None, devices: str | None
) -> None:
    if workers is None:
        with pytest.raises(ConfigError, match="--node_rank 1: there are 1 hosts"):
            settings(*flags, "train.py")
        return
    told = settings(*flags, "train.py")
    assert (told.workers, told.start_workers) == (workers, start)
    assert told.environment.get("CUDA_VISIBLE_DEVICES") == devices


def test_visible_devices_give_the_workers_and_may_be_chosen_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert settings("train.py").workers == 4
    chosen = settings("--include", "localhost:1,3", "train.py")
    assert (chosen.workers, chosen.environment["CUDA_VISIBLE_DEVICES"]) == (2, "1,3")


def test_a_host_of_the_hostfile_without_ssh_has_its_name_and_zone() -> None:
    told = settings("-H", "hosts", "--no_ssh", "--node_rank", "1", "train.py")
    assert (told.node, told.zone, told.log_folder) == ("w1", "b", Path("runs/bamboo/w1"))
    assert settings("-H", "hosts", "--no_ssh", "--node_rank", "1", "--zone", "c", "train.py").zone == "c"


def test_a_folder_of_each_ranks_log_is_the_folder_of_the_logs() -> None:
    assert settings("--enable_each_rank_log", "out", "train.py").log_folder.parent == Path("out")


WRONG = [
    ((), "SCRIPT is missing: bamboo-ds run [OPTIONS] script.py"),
    (("none.py",), "SCRIPT none.py: no such file; a module needs -m"),
    (("--config", "none.json", "train.py"), "--config none.json: no such file"),
    (("--etcd", "here", "train.py"), '--etcd here: "here" must be host:port'),
    (("--etcd", "a:123456", "train.py"), '--etcd a:123456: "a:123456" must be host:port'),
    ((*ETCD, "--job", "a/b", "train.py"), "--job a/b: must be 1 to 63 letters"),
    ((*ETCD, "--etcd-user", "u", "train.py"), "--etcd-user u: put its password into the variable BAMBOO_ETCD_PASSWORD"),
    (("--etcd-ca", "f", "train.py"), "--etcd-ca f: goes with --etcd host:port, which is missing"),
    ((*ETCD, "--workers-per-node", "0", "train.py"), "--workers-per-node 0: must be at least 1"),
    ((*ETCD, "--ttl", "0.5", "train.py"), "--ttl 0.5: must be at least 1"),
    ((*ETCD, "--ttl", "nan", "train.py"), "--ttl nan: must be at least 1"),
    ((*ETCD, "--patience", "-1", "train.py"), "--patience -1: must be at least 0"),
    ((*ETCD, "--metrics-port", "70000", "train.py"), "--metrics-port 70000: must be between 0 and 65535"),
    (("--node", "n1", "train.py"), "--node n1: goes with --etcd host:port, without which this machine is the whole"),
    (("--on-demand", "train.py"), "--on-demand: goes with --etcd"),
    (("--num_nodes", "2", "train.py"), "--num_nodes 2: goes with --etcd"),
    ((*ETCD, "--zones", "a,b", "train.py"), "--zones a,b: goes with --local-nodes N, which is missing"),
    (("--local-nodes", "2", "--zones", "a,,b", "train.py"), "--zones a,,b: must be names between commas"),
    ((*ETCD, "--namespaces", "train.py"), "--namespaces: goes with --local-nodes N, which is missing"),
    ((*ETCD, "--ssh_port", "22", "train.py"), "--ssh_port 22: goes with --hostfile FILE, which is missing"),
    ((*ETCD, "--node_rank", "0", "train.py"), "--node_rank 0: goes with --hostfile FILE, which is missing"),
    (("-H", "hosts", "--node_rank", "0", "x.py"), "--node_rank 0: goes with --no_ssh; without it every host is"),
    (("-H", "hosts", "--no_ssh", "x.py"), "--no_ssh: goes with --node_rank N, which of the hosts this is"),
    (("-H", "hosts", "--no_ssh", "--node_rank", "0", "x.py"), "--no_ssh: goes with --etcd"),
    (("-H", "none", "x.py"), "--hostfile none: cannot read it: No such file"),
    (("-H", "hosts", "-i", "w7", "x.py"), '--include w7: no host "w7"; there are: w0, w1'),
    (("-H", "hosts", "--num_nodes", "3", "x.py"), "--num_nodes 3: there are only 2 hosts"),
    (("-H", "hosts", "--zone", "a", "x.py"), "--hostfile hosts and --zone a do not go together"),
    (("-H", "hosts", "--workers-per-node", "2", "x.py"), "--workers-per-node 2 and --hostfile hosts do not go"),
    (("-H", "hosts", "--launcher_args", "'", *ETCD, "x.py"), "--launcher_args ': No closing quotation"),
    (("--local-nodes", "2", "-H", "hosts", "train.py"), "--local-nodes 2 and --hostfile hosts do not go together"),
    (("--local-nodes", "2", "--num_gpus", "2", "train.py"), "--local-nodes 2 and --num_gpus 2 do not go together"),
    ((*ETCD, "--nodes", "2", "--start-workers", "2", "train.py"), "--nodes 2 and --start-workers 2 do not go together"),
    ((*ETCD, "--num_gpus", "2", "--workers-per-node", "2", "train.py"), "--workers-per-node 2 and --num_gpus 2"),
    ((*ETCD, "--logs", "a", "--enable_each_rank_log", "b", "train.py"), "--logs a and --enable_each_rank_log b"),
    ((*ETCD, "--logs", "train.py", "train.py"), "--logs train.py: cannot write there"),
    ((*ETCD, "--launcher", "slurm", "train.py"), "--launcher: --hostfile starts the agents over ssh; under Slurm"),
    ((*ETCD, "--no_python", "train.py"), "--no_python: a worker is a Python program"),
    ((*ETCD, "--autotuning", "tune", "train.py"), "--autotuning: tune with the deepspeed launcher"),
    ((*ETCD, "--bind_cores_to_rank", "train.py"), "--bind_cores_to_rank: run each node's agent under numactl"),
    ((*ETCD, "--bind_core_list", "0-3", "train.py"), "--bind_core_list: run each node's agent under taskset"),
    ((*ETCD, "--nproc-per-node", "2", "train.py"), "--nproc-per-node: use --workers-per-node"),
    ((*ETCD, "--nnodes", "2", "train.py"), "--nnodes: use --nodes"),
    ((*ETCD, "--rdzv_endpoint", "h:1", "train.py"), "--rdzv-endpoint: use --etcd host:port"),
    (("--standalone", "train.py"), "--standalone: leave it out"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message.split(":")[0] for _, message in WRONG])
def test_wrong_input_is_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1, result.output
    assert result.output.startswith(f"bamboo-ds run: {message}")


def test_a_wrong_config_is_named_with_its_key(folder: Path) -> None:
    (folder / "c.json").write_text('{"bamboo": {"redundency": "fit"}}')
    result = run("--config", "c.json", "train.py")
    assert result.exit_code == 2
    assert result.output.startswith('bamboo-ds run: --config c.json: bamboo.redundency: unknown key; did you mean "red')
    (folder / "c.json").write_text('{"bamboo": {},')
    result = run("--config", "c.json", "train.py")
    assert (result.exit_code, "not valid JSON" in result.output) == (2, True)


@pytest.mark.parametrize(("flag", "hint"), [("--numgpus", "--num_gpus"), ("--local-node", "--local-nodes")])
def test_an_unknown_flag_names_the_nearest_one(flag: str, hint: str) -> None:
    result = run(flag, "2", "train.py")
    assert result.exit_code == 2
    assert f"No such option: {flag}" in result.output
    assert hint in result.output


def test_flags_that_say_what_is_so_anyway_are_accepted() -> None:
    told = settings("--no_local_rank", "--no_ssh_check", "--force_multi", "--log_level", "error", "train.py")
    assert told == settings("train.py")


def test_a_master_address_is_accepted_and_explained(folder: Path) -> None:
    arguments = (*ETCD, "--master_addr", "h", "--master_port", "29500", "--logs", "train.py", "train.py")
    assert "are not needed: workers meet through etcd" in run(*arguments).output
    assert "are not needed" not in run("--quiet", *arguments).output


def test_help_shows_the_flags_in_groups_and_none_that_is_refused() -> None:
    output = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    for shown in ("--etcd", "--local-nodes", "--hostfile", "Flags of the deepspeed launcher", "--master_addr"):
        assert shown in output
    for hidden in ("--no_python", "--nnodes", "--leash"):
        assert hidden not in output


# ---- over ssh ----------------------------------------------------------------------------------------------------


def test_a_host_is_told_everything_that_is_not_the_launchers_own() -> None:
    options = parse(
        *("--ttl", "4", "--outage", "20", "--patience", "5", "--metrics-port", "9100", "--config", "c.json"),
        *("-q", "--ssh_port", "7", "-H", "hosts", "-m", "package.train", "--a b", "$x"),
    )
    etcd = EtcdConfig(endpoints=("a:1", "b:2"), user="u", password="secret", ca="/ca.pem")
    own = ("--node", "w0", "--workers-per-node", "2")
    words = agent_arguments(options, own, etcd=etcd, job="j", logs=Path("out"), workers=6)
    assert "secret" not in " ".join(words)
    told = parse(*words[1:])
    assert words[0] == "run"
    assert told.leash
    assert (told.etcd, told.etcd_user, told.etcd_ca) == ("a:1,b:2", "u", Path("/ca.pem"))
    assert (told.job, told.logs, told.node, told.workers_per_node, told.start_workers) == ("j", Path("out"), "w0", 2, 6)
    assert (told.ttl, told.outage, told.patience, told.metrics_port) == (4, 20, 5, 9100)
    assert (told.config, told.module, told.says_nothing) == (Path("c.json"), True, True)
    assert (told.script, told.script_arguments) == ("package.train", ("--a b", "$x"))
    assert (told.hostfile, told.ssh_port) == (None, None)


def test_a_remote_shell_gives_each_word_as_it_was(folder: Path) -> None:
    hostile = ["a b", "$HOME", "`id`", "'", '"', "\\", "*", "-x", "", "é", "a\nb", "; exit 3", "#"]
    (folder / "odd folder").mkdir()
    show = "import json,os,sys; print(json.dumps([sys.argv[1:], os.environ['ODD'], os.getcwd()]))"
    line = remote_command(hostile, {"ODD": "v 'w' $x"}, folder=folder / "odd folder")
    prefix = line.partition(" -m bamboo_ds.cli.main ")
    line = f"{prefix[0]} -c {shlex.quote(show)} {prefix[2]}"
    words, variable, where = json.loads(subprocess.check_output(["sh", "-c", line], text=True))
    assert (words, variable, where) == (hostile, "v 'w' $x", str(folder / "odd folder"))


def test_a_virtual_environment_is_activated_first(folder: Path) -> None:
    (folder / "activate").write_text('python() { echo "$@"; }\nexport -f python 2>/dev/null; VENV=yes; export VENV\n')
    line = remote_command(["run", "x.py"], {}, folder=folder, venv=folder / "activate")
    assert line.startswith(f". {folder}/activate && cd {folder} && exec env python -m bamboo_ds.cli.main run x.py")


def test_ssh_gets_its_port_and_arguments_and_never_asks() -> None:
    options = parse("-H", "hosts", "--ssh_port", "2222", "--launcher_args", "-o 'User=a b' -4", "x.py")
    assert ssh_command("w0", "true", options) == (
        ["ssh", "-o", "User=a b", "-4", "-p", "2222", "-o", "BatchMode=yes", "w0", "true"]
    )


def test_variables_go_to_all_hosts_as_with_deepspeed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("NCCL", "PYTHON", "BAMBOO", "OMP")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PYTHONPATH", "/a:/b")
    monkeypatch.setenv("SECRET_TOKEN", "no")
    monkeypatch.setenv("BAMBOO_ETCD_PASSWORD", "no")
    monkeypatch.setenv("BAMBOO_MEMBERSHIP", "no")
    (folder / ".deepspeed_env").write_text("# mine\nHF_HOME=/cache dir\nNCCL_DEBUG=WARN\n\n")
    found = exported([folder / "nowhere", folder])
    assert found["HF_HOME"] == "/cache dir"
    assert found["NCCL_DEBUG"] == "WARN"
    assert found["PYTHONPATH"] == "/a:/b"
    assert not {"SECRET_TOKEN", "BAMBOO_ETCD_PASSWORD", "BAMBOO_MEMBERSHIP"} & found.keys()
    monkeypatch.setenv("DS_ENV_FILE", "other_env")
    (folder / "other_env").write_text("export X=1\n")
    with pytest.raises(ConfigError, match=r'other_env:1: "export X=1" must be NAME=VALUE'):
        exported([folder])


def test_without_ssh_there_is_a_clear_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    result = run(*ETCD, "-H", "hosts", "x.py")
    assert (result.exit_code, result.output) == (
        2,
        "bamboo-ds run: --hostfile: cannot start ssh: No such file or directory; install an ssh client\n",
    )
