"""Tells the state of learning rate schedules and loss scalers as JSON, and understands it again.

Pickle would do, and would run whatever a stranger has put into the file. JSON alone turns tuples into lists and
numbers that are keys into text, so what it cannot tell is marked.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import torch

from bamboo_ds.errors import ConfigError

_KIND, _OF = "!", "of"


def to_plain(value: Any, *, name: str) -> Any:
    """Return a value as JSON can tell it.

    Args:
        value: numbers, texts, tensors, and lists, tuples, sets and dictionaries of those.
        name: of the value, for the error.

    Raises:
        ConfigError: it holds something else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [to_plain(one, name=f"{name}[{index}]") for index, one in enumerate(value)]
    if isinstance(value, tuple | set | frozenset | Counter):
        return _marked(value, name)
    if isinstance(value, dict):
        return _dictionary(value, name)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()  # a number of NumPy's
    raise ConfigError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold; it takes numbers, texts, tensors, and "
        "lists, tuples, sets and dictionaries of those"
    )


def from_plain(told: Any) -> Any:
    """Return the value that `to_plain` told."""
    if isinstance(told, list):
        return [from_plain(one) for one in told]
    if not isinstance(told, dict):
        return told
    if _KIND not in told:
        return {key: from_plain(one) for key, one in told.items()}
    return _UNDERSTOOD[told[_KIND]](told)


def _marked(value: Any, name: str) -> dict[str, Any]:
    members = list(value.items()) if isinstance(value, Counter) else list(value)
    kind = next(kind for kind in (Counter, tuple, set, frozenset) if isinstance(value, kind))
    return {_KIND: kind.__name__, _OF: to_plain(members, name=name)}


def _dictionary(value: dict[Any, Any], name: str) -> dict[str, Any]:
    if all(isinstance(key, str) for key in value) and _KIND not in value:
        return {key: to_plain(one, name=f"{name}[{key!r}]") for key, one in value.items()}
    return {_KIND: "dict", _OF: to_plain([list(item) for item in value.items()], name=name)}


def _tensor(value: torch.Tensor) -> dict[str, Any]:
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        _KIND: "tensor",
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        _OF: base64.b64encode(data).decode(),
    }


def _tensor_of(told: dict[str, Any]) -> torch.Tensor:
    data, dtype = bytearray(base64.b64decode(told[_OF])), getattr(torch, told["dtype"])
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(told["shape"])


_UNDERSTOOD = {
    "Counter": lambda told: Counter(dict(from_plain(told[_OF]))),
    "tuple": lambda told: tuple(from_plain(told[_OF])),
    "set": lambda told: set(from_plain(told[_OF])),
    "frozenset": lambda told: frozenset(from_plain(told[_OF])),
    "dict": lambda told: dict(from_plain(told[_OF])),
    "tensor": _tensor_of,
}
