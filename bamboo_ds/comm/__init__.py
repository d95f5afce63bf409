"""Moves tensors: links (one directed edge each), groups, waits that end."""

from bamboo_ds.comm.groups import Group, SeatGroup
from bamboo_ds.comm.links import Message, make_message
from bamboo_ds.comm.network import Network
from bamboo_ds.comm.transfer import Courier, Parcel, all_at_once
from bamboo_ds.comm.wire import Address, Header, Kind, TensorMeta

__all__ = [
    "Address",
    "Courier",
    "Group",
    "Header",
    "Kind",
    "Message",
    "Network",
    "Parcel",
    "SeatGroup",
    "TensorMeta",
    "all_at_once",
    "make_message",
]
