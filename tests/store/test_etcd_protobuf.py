"""etcd3 works with whatever protobuf is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import google.protobuf
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from bamboo_ds.store.embedded import EmbeddedEtcd

ROOT = Path(__file__).resolve().parents[2]

USE_ALL = """
import sys
import google.protobuf
from bamboo_ds.store.etcd import EtcdStore
with EtcdStore([sys.argv[1]], prefix=sys.argv[2]) as store:
    revision = store.compare_and_set("a", b"1", expected=0, lease=store.lease(5))
    assert store.get("a").revision == revision
    assert [event.revision for event in store.watch(from_revision=revision).next(5)] == [revision]
    election = store.elect("coordinator", b"", store.lease(5))
    assert election.campaign()
    store.put("b", b"", fence=election.fence)
    assert store.delete_prefix("") == 3
import etcd3  # and its own client imports, too
assert etcd3.Transactions().mod("a") == "1"
print(google.protobuf.__version__)
"""

OLD_AND_NEW = ["3.20.3", "4.25.8", "5.29.5", "6.33.0", "7.36.2"]


def use_all(endpoint: str, prefix: str, *, first_on_path: str = "") -> str:
    """Use every kind of call in a new process, and return the version of protobuf it had."""
    path = os.pathsep.join(part for part in (first_on_path, str(ROOT)) if part)
    done = subprocess.run(
        [sys.executable, "-c", USE_ALL, endpoint, prefix],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_works_with_the_protobuf_that_is_installed(etcd: EmbeddedEtcd, prefix: str) -> None:
    assert use_all(etcd.endpoint, prefix) == google.protobuf.__version__


@pytest.mark.skipif(
    "BAMBOO_TEST_PROTOBUFS" not in os.environ, reason="installs five protobufs; BAMBOO_TEST_PROTOBUFS=1 asks for it"
)
@pytest.mark.slow
@pytest.mark.parametrize("version", OLD_AND_NEW)
def test_it_works_with_every_protobuf_since_3_20(etcd: EmbeddedEtcd, prefix: str, version: str, tmp_path: Path) -> None:
    install = ["install", "--quiet", "--no-deps", "--target", str(tmp_path), f"protobuf=={version}"]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, timeout=100, capture_output=True)
    used = use_all(etcd.endpoint, prefix, first_on_path=str(tmp_path))
    assert used == version


def test_a_library_with_files_of_the_same_names_does_not_get_in_the_way() -> None:
    """`rpc.proto` is a name that others use, too."""
    from bamboo_ds.store.etcd_protobuf import etcd_messages

    etcd_messages()
    file = descriptor_pb2.FileDescriptorProto(name="rpc.proto", package="theirs")
    file.message_type.add(name="RangeRequest")
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    assert pool.FindFileByName("rpc.proto").package == "theirs"


def test_without_etcd3_the_remedy_is_named() -> None:
    code = (
        "import importlib.util as u, sys; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'etcd3' else real(name, *a)\n"
        "from bamboo_ds.store.etcd_protobuf import etcd_messages; etcd_messages()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "ConfigError: the store needs the package etcd3: pip install 'etcd3>=0.12'" in done.stderr


def test_the_store_without_etcd_imports_neither_grpc_nor_etcd3() -> None:
    code = (
        "import sys, bamboo_ds.store, bamboo_ds.store.embedded;"
        "print({'grpc', 'etcd3', 'google.protobuf', 'torch', 'deepspeed'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"


def test_only_the_adapter_names_etcd3() -> None:
    naming = {
        path.name
        for path in (ROOT / "bamboo_ds").rglob("*.py")
        if '"etcd3' in path.read_text() or "import etcd3" in path.read_text()
    }
    assert naming == {"etcd_protobuf.py"}
