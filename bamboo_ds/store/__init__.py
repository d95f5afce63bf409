"""Remembers the small facts a cluster agrees on: who is there, who leads, what the plan is.

`Store` is what the rest of Bamboo knows (its promises: `bamboo_ds.store.contract`). `MemoryStore` serves tests and the
simulator. `bamboo_ds.store.etcd.EtcdStore` is the real one, and not imported here: it needs gRPC.
`bamboo_ds.store.embedded.EmbeddedEtcd` runs a server for one machine.
"""

from bamboo_ds.store.contract import (
    ABSENT,
    Committed,
    Condition,
    Delete,
    DeletePrefix,
    Entry,
    Event,
    EventKind,
    Fence,
    Lease,
    Put,
    Snapshot,
    Unchanged,
    Watch,
    Write,
)
from bamboo_ds.store.election import Election
from bamboo_ds.store.memory import MemoryServer, MemoryStore
from bamboo_ds.store.store import Store

__all__ = [
    "ABSENT",
    "Committed",
    "Condition",
    "Delete",
    "DeletePrefix",
    "Election",
    "Entry",
    "Event",
    "EventKind",
    "Fence",
    "Lease",
    "MemoryServer",
    "MemoryStore",
    "Put",
    "Snapshot",
    "Store",
    "Unchanged",
    "Watch",
    "Write",
]
