"""gRPC does not survive a fork: what is refused, what works. In processes of their own, as a fork may hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bamboo_ds.store.embedded import EmbeddedEtcd

ROOT = Path(__file__).resolve().parents[2]

BEGINNING = """
import os, sys
from bamboo_ds.errors import StoreError
from bamboo_ds.store.etcd import EtcdStore

def open_store():
    return EtcdStore([sys.argv[1]], prefix=sys.argv[2])

def child(function):
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(pid, 0)

def refused(call):
    try:
        call()
    except StoreError as error:
        print("refused", "fork" in str(error), flush=True)
"""

INHERITED = """
store = open_store()
lease, watch = store.lease(10), store.watch(from_revision=store.put("a", b""))

def use_all():
    for call in (lambda: store.get("a"), lambda: store.put("a", b""), lambda: watch.next(5), lease.revoke, open_store):
        refused(call)
    watch.close()
    store.close()

child(use_all)
assert len(watch.next(5)) == 1
assert lease.alive and store.get("a") is not None
store.close()
child(lambda: refused(open_store))  # also when all is closed: it hangs now and then
"""

FORKED_FIRST = """
def use_it():
    with open_store() as store:
        print("counted", store.add("n", 1))

child(use_it)
child(use_it)
use_it()
"""


def run(script: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_store_and_a_new_one_are_refused_in_a_forked_child_and_its_parent_goes_on(
    etcd: EmbeddedEtcd, prefix: str
) -> None:
    assert run(INHERITED, etcd.endpoint, prefix) == ["refused True"] * 6


def test_children_that_were_forked_before_anyone_opened_a_store_open_their_own(etcd: EmbeddedEtcd, prefix: str) -> None:
    assert run(FORKED_FIRST, etcd.endpoint, prefix) == ["counted 1", "counted 2", "counted 3"]
