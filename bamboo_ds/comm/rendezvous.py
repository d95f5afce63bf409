"""The key-value store under our process groups; it lives in `world`, whose groups form by it too."""

from bamboo_ds.world.rendezvous import KeyValue, RendezvousStore, WatchedKeyValue, keys_below

__all__ = ["KeyValue", "RendezvousStore", "WatchedKeyValue", "keys_below"]
