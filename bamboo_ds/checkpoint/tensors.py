"""Reads and writes files of the safetensors format.

They are written here, tensor by tensor: the library first copies all of them into one piece of memory, and holds the
interpreter's lock meanwhile, so training in the next thread stands still (1.4 s for 100 MB on a busy machine). Reading
is the library's business: it is what has to be careful.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from bamboo_ds.checkpoint.storage import DamagedError, Sink

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Dtypes that the format has had from the beginning; others are written as bytes, and the metadata says what of."""

_METADATA, _RAW = "bamboo", "bamboo_raw"
_CHUNK_BYTES = 4 << 20


def write_tensors(sink: Sink, tensors: Mapping[str, torch.Tensor], metadata: Any) -> None:
    """Write tensors, and metadata that JSON can tell."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    raw = {
        key: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for key, tensor in ordered
        if tensor.dtype not in _NAMES
    }
    header: dict[str, Any] = {"__metadata__": {_METADATA: json.dumps(metadata), _RAW: json.dumps(raw)}}
    offset = 0
    for key, tensor in ordered:
        size = tensor.numel() * tensor.element_size()
        dtype, shape = ("U8", [size]) if key in raw else (_NAMES[tensor.dtype], list(tensor.shape))
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sink.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        _write_bytes_of(sink, tensor)


def _write_bytes_of(sink: Sink, tensor: torch.Tensor) -> None:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), _CHUNK_BYTES):
        sink.write(data[start : start + _CHUNK_BYTES])


def read_tensors(data: bytes) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the tensors and the metadata of a file.

    Raises:
        DamagedError: it is none that `write_tensors` wrote.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        told = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        metadata, raw = json.loads(told[_METADATA]), json.loads(told[_RAW])
        for key, kind in raw.items():
            tensors[key] = tensors[key].view(getattr(torch, kind["dtype"])).reshape(kind["shape"])
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise DamagedError(f"it cannot be read as safetensors: {error}") from None
    return tensors, metadata
