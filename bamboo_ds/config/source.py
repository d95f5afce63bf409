"""Finds the DeepSpeed config wherever the caller put it, in the order ``deepspeed.initialize`` looks for it.

Unlike DeepSpeed this neither changes ``args`` nor the caller's dict: what it returns is a deep copy.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bamboo_ds.config.keys import show
from bamboo_ds.errors import ConfigError

ConfigSource = Mapping[str, Any] | str | os.PathLike[str]

CONFIG_VARIABLE = "BAMBOO_CONFIG"
"""Names the config file of a job whose script does not say it among its arguments."""


def load_deepspeed_config(
    args: object = None, config: ConfigSource | None = None, config_params: ConfigSource | None = None
) -> dict[str, Any]:
    """Load the DeepSpeed config from the arguments of ``initialize``.

    Args:
        args: The script's parsed arguments; ``deepscale_config`` and ``deepspeed_config`` are looked at.
        config: A dict, a path to a JSON or Hjson file, or the JSON text in url-safe base64.
        config_params: The older name of ``config``; used when ``config`` is None.

    Returns:
        A deep copy that the caller may change.

    Raises:
        ConfigError: There is no config or more than one, its file is missing or is no JSON (the message has path and
            line), or a key occurs twice.
    """
    source = config if config is not None else config_params
    from_args = _source_in_args(args)
    if source is not None and from_args is not None:
        raise ConfigError(
            f"two DeepSpeed configs: --deepspeed_config {from_args} and the config argument of initialize(); drop one"
        )
    source = source if source is not None else from_args
    if source is None:
        raise ConfigError("no DeepSpeed config: pass --deepspeed_config FILE or initialize(config=...)")
    return _load(source)


def encoded(config: Mapping[str, Any]) -> str:
    """Return a config in the form in which DeepSpeed takes it in place of a file: JSON in base64."""
    return base64.urlsafe_b64encode(json.dumps(config).encode()).decode()


def early_config() -> dict[str, Any] | None:
    """Return the config as far as it can be known before `initialize` is called.

    That is the file that `bamboo-ds run --config FILE` names, or `--deepspeed_config FILE` among the script's
    arguments; None when there is neither.

    Raises:
        ConfigError: the file is missing or no JSON.
    """
    path = os.environ.get(CONFIG_VARIABLE) or _config_argument(sys.argv[1:])
    return None if path is None else _load(path)


def _config_argument(arguments: list[str]) -> str | None:
    for index, argument in enumerate(arguments):
        name, separator, value = argument.partition("=")
        if name.replace("-", "_") == "__deepspeed_config":
            return value if separator else next(iter(arguments[index + 1 :]), None)
    return None


def _source_in_args(args: object) -> ConfigSource | None:
    old: ConfigSource | None = getattr(args, "deepscale_config", None)
    new: ConfigSource | None = getattr(args, "deepspeed_config", None)
    if old is not None and new is not None:
        raise ConfigError(f"both --deepscale_config {old} and --deepspeed_config {new} are given; drop the first")
    return new if new is not None else old


def _load(source: ConfigSource) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"the DeepSpeed config must be a dict, a path or base64 text, not {type(source).__name__}")
    path = Path(source)
    if _is_there(path):
        return _parse(_read(path), name=str(path))
    return _parse(_decode(str(source)), name="the base64 config")


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # base64 text may be too long for a file name
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the DeepSpeed config {path}: {error}") from error


def _decode(text: str) -> str:
    """Decode base64, strictly: DeepSpeed skips foreign characters, so a misspelt path decodes to rubbish there."""
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"no such DeepSpeed config file: {show(text)} (and it is no base64 of one either)") from error


def _parse(text: str, *, name: str) -> dict[str, Any]:
    import hjson  # comes with deepspeed; a superset of JSON that allows comments

    try:
        config = hjson.loads(text, object_pairs_hook=_object_without_duplicates)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(f"{name}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from error
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{name}: must hold a JSON object, holds {show(config)}")
    return config


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise ConfigError(f"duplicate keys: {', '.join(repeated)}; keep one of each")
    return dict(pairs)
