"""The binary form of a message between stages: a fixed header, then the bytes of each tensor.

Dtype, shape and whether a gradient is expected travel with every message, so a shape may change from one micro-batch
to the next and a tuple may mix any dtypes. No pickle crosses the wire.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import torch

from bamboo_ds.errors import ScheduleError

HEADER_BYTES = 256
_MAGIC = 0xBA3B
_FIXED = struct.Struct(
    "<HBBiiiiqqHI"
)  # magic, kind, tuple?, epoch, attempt, stage, micro batch, step, digest, tensors, metadata bytes
_TENSOR = struct.Struct("<BBB")  # dtype, requires grad, dimensions
_ROOM = HEADER_BYTES - _FIXED.size

_DTYPES = (
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float16, torch.bfloat16, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex32,
)  # fmt: skip
_DTYPE_IDS = {dtype: index for index, dtype in enumerate(_DTYPES)}


class Kind(enum.IntEnum):
    """What a message carries."""

    ACTIVATION = 1
    GRADIENT = 2
    GOODBYE = 3
    """Nothing more will come: the sender ends in order."""
    RING = 4
    """Nothing: such a link is there to notice the death of whoever is at its other end."""


@dataclass(frozen=True, slots=True)
class Address:
    """Which message this is; both ends compute it, and a message with another address is refused.

    Attributes:
        kind: activation or gradient.
        epoch: of the plan. Not its version: a link belongs to two workers, and what they send each other stays right
            when a third one dies.
        attempt: of an evaluation, which begins anew when a worker dies; 0 in training.
        step: optimizer steps committed before (or the number of evaluation batches, negative, in evaluation).
        stage: the stage that receives.
        micro_batch: index in the pipeline's share.
    """

    kind: Kind
    epoch: int
    attempt: int
    step: int
    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Dtype, shape and whether the sender expects a gradient of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """Everything about a message but the bytes of its tensors.

    Attributes:
        address: which message it is.
        is_tuple: whether the stage's value is a tuple (else one tensor).
        digest: checksum of the batch the micro-batch came from; travels to the last stage.
        tensors: one entry per tensor.
    """

    address: Address
    is_tuple: bool
    digest: int
    tensors: tuple[TensorMeta, ...]


def encode(header: Header) -> tuple[bytearray, bytearray]:
    """Return the fixed-size header and what did not fit into it (often empty)."""
    metadata = bytearray()
    for tensor in header.tensors:
        if tensor.dtype not in _DTYPE_IDS:
            raise ScheduleError(
                f"a tensor of {tensor.dtype} cannot pass between stages; supported: {', '.join(map(str, _DTYPES))}"
            )
        metadata += _TENSOR.pack(_DTYPE_IDS[tensor.dtype], tensor.requires_grad, len(tensor.shape))
        metadata += struct.pack(f"<{len(tensor.shape)}q", *tensor.shape)
    address = header.address
    fixed = _FIXED.pack(
        _MAGIC, address.kind, header.is_tuple, address.epoch, address.attempt, address.stage, address.micro_batch,
        address.step, header.digest, len(header.tensors), len(metadata),
    )  # fmt: skip
    head = bytearray(fixed + metadata[:_ROOM])
    return head + bytearray(HEADER_BYTES - len(head)), metadata[_ROOM:]


def overflow_bytes(head: bytes) -> int:
    """Return how many metadata bytes follow the fixed header in a message of their own."""
    return max(0, _FIXED.unpack_from(head)[-1] - _ROOM)


def decode(head: bytes, overflow: bytes = b"") -> Header:
    """Rebuild the header of a message.

    Raises:
        ScheduleError: this is no header of ours.
    """
    magic, kind, is_tuple, epoch, attempt, stage, micro_batch, step, digest, count, size = _FIXED.unpack_from(head)
    if magic != _MAGIC:
        raise ScheduleError(
            f"a message began with {magic:#06x} instead of {_MAGIC:#06x}: "
            "the two ends of a link disagree on the protocol"
        )
    metadata = (head[_FIXED.size :] + overflow)[:size]
    address = Address(kind=Kind(kind), epoch=epoch, attempt=attempt, step=step, stage=stage, micro_batch=micro_batch)
    return Header(address=address, is_tuple=bool(is_tuple), digest=digest, tensors=_tensors(metadata, count))


def _tensors(metadata: bytes, count: int) -> tuple[TensorMeta, ...]:
    tensors, offset = [], 0
    for _ in range(count):
        dtype, requires_grad, dimensions = _TENSOR.unpack_from(metadata, offset)
        offset += _TENSOR.size
        shape = struct.unpack_from(f"<{dimensions}q", metadata, offset)
        offset += 8 * dimensions
        tensors.append(TensorMeta(dtype=_DTYPES[dtype], shape=shape, requires_grad=bool(requires_grad)))
    return tuple(tensors)
