"""How a key of the DeepSpeed config is read and shown: dotted paths, and ``"auto"`` meaning "not given".

Hugging Face style configs leave values to the framework with ``"auto"``; DeepSpeed reads JSON ``null`` as not given.
Both are absent here, in one place.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

Config = Mapping[str, Any]


def value_at(config: Config, path: str) -> Any:
    """Return the value at a dotted path such as ``"zero_optimization.stage"``; None when absent or ``"auto"``."""
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return None if isinstance(value, str) and value == "auto" else value


def flat_settings(config: Config, prefix: str = "") -> dict[str, str]:
    """Return the JSON text of each value of a config by its dotted key; objects are taken apart."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = json.dumps(value, default=repr, sort_keys=True)
    return flat


def is_on(value: object) -> bool:
    """Say whether a flag is switched on, in any of the spellings DeepSpeed's models accept."""
    if isinstance(value, str):
        return value.lower() in ("true", "yes", "on", "y", "t", "1")
    return bool(value)


def show(value: object) -> str:
    """Write a value as it stands in the JSON file, shortened to one line."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``'; did you mean "x"?'`` for the nearest known name, or an empty string when none is near."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f'; did you mean "{by_lower[near[0]]}"?' if near else ""
