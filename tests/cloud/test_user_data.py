"""What a node runs when it boots: a script that shellcheck passes, whatever the job is called and runs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bamboo_ds.cloud.user_data import Boot, user_data
from bamboo_ds.config.cloud import CloudConfig, Ec2Config, load_cloud_config
from bamboo_ds.errors import ConfigError

CLOUD = CloudConfig(provider="ec2", ec2=Ec2Config(subnets={"eu-west-1a": "subnet-1"}), nodes=8)
BOOT = Boot(
    job="train",
    etcd="10.0.0.1:2379,10.0.0.2:2379",
    command=["train.py", "--text", "a b's $HOME"],
    cloud=CLOUD,
    options=["--etcd-ca", "/etc/bamboo/ca.pem"],
    setup="aws s3 cp --recursive s3://bucket/code .",
)


def shellcheck(script: str, folder: Path) -> str:
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("there is no shellcheck")
    path = folder / "script.sh"
    path.write_text(script)
    done = subprocess.run([program, "--shell=bash", str(path)], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr


def written_files(script: str, folder: Path) -> dict[str, str]:
    """Run the part of the script that writes files, below a folder, and return them."""
    blocks = re.findall(r"^cat > \S+ <<'(BAMBOO_END_*)'\n.*?\n\1$", script, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    text = script[script.index("cat > ") : script.index("systemctl daemon-reload")]
    moved = re.sub(r"^cat > /", f"cat > {folder}/", text, flags=re.MULTILINE)
    for name in ("etc/bamboo", "etc/systemd/system"):
        (folder / name).mkdir(parents=True)
    subprocess.run(["bash", "-euc", moved], check=True, timeout=30)
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("system_packages", [False, True])
@pytest.mark.parametrize("setup", ["", "aws s3 cp --recursive s3://bucket/code ."])
def test_shellcheck_has_nothing_to_say(setup: str, system_packages: bool, tmp_path: Path) -> None:
    boot = Boot(
        job="train", etcd=BOOT.etcd, command=BOOT.command, cloud=CLOUD, setup=setup, system_packages=system_packages
    )
    script = user_data(boot)
    assert shellcheck(script, tmp_path) == ""
    for name, text in written_files(script, tmp_path / "root").items():
        if name.endswith(".sh"):
            assert shellcheck(text, tmp_path) == ""


def test_shellcheck_would_find_something(tmp_path: Path) -> None:
    assert "SC2086" in shellcheck("#!/bin/bash\nrm $1\n", tmp_path)


def test_the_agent_gets_what_it_was_given_word_by_word(tmp_path: Path) -> None:
    files = written_files(user_data(BOOT), tmp_path / "root")
    command = files["etc/bamboo/agent.sh"].splitlines()[-1]
    words = shlex.split(command)
    assert words[:3] == ["exec", "/opt/bamboo/venv/bin/bamboo-ds", "run"]
    assert words[words.index("--etcd") + 1] == BOOT.etcd
    assert words[words.index("--etcd-ca") + 1] == "/etc/bamboo/ca.pem"
    assert "--started-for-job" in words  # it may come when the job is over
    assert words[-3:] == ["train.py", "--text", "a b's $HOME"]
    assert load_cloud_config(tmp_path / "root/etc/bamboo/cloud.json") == CLOUD


def test_the_unit_starts_a_lost_node_again_and_ends_the_machine_with_the_job(tmp_path: Path) -> None:
    files = written_files(user_data(BOOT), tmp_path / "root")
    unit = files["etc/systemd/system/bamboo-agent.service"]
    assert "Restart=always" in unit
    assert "RestartPreventExitStatus=0 1 2" in unit
    called = tmp_path / "called"
    fake = tmp_path / "bin" / "systemctl"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/bash\necho "$@" >> {called}\n')
    fake.chmod(0o755)
    stopped = tmp_path / "root/etc/bamboo/stopped.sh"
    for code, status in (("exited", "3"), ("killed", "KILL"), ("exited", "143")):
        environment = {"PATH": f"{fake.parent}:/usr/bin:/bin", "EXIT_CODE": code, "EXIT_STATUS": status}
        subprocess.run(["bash", str(stopped)], env=environment, check=True, timeout=30)
        assert not called.exists()
    environment = {"PATH": f"{fake.parent}:/usr/bin:/bin", "EXIT_CODE": "exited", "EXIT_STATUS": "0"}
    subprocess.run(["bash", str(stopped)], env=environment, check=True, timeout=30)
    assert called.read_text() == "--no-block poweroff\n"


def test_a_script_that_ec2_would_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="let --setup fetch"):
        user_data(Boot(job="train", etcd=BOOT.etcd, command=["train.py"], cloud=CLOUD, setup="# x\n" * 5000))
