"""Imports `etcd3` with whatever protobuf the user has, and gives its messages and stubs.

etcd3 0.12.0 does not import with protobuf 4 and later: its generated modules build descriptors by hand, which newer
protobuf forbids. Pinning protobuf is no way out, as users have tensorboard, wandb and onnx. But each of those modules
holds its file's descriptor in serialized form, which every protobuf can read. So we read that literal out of the source
(without running it), build the message classes from it, and put modules made of them in place before etcd3 is imported.

The descriptors go into a pool of their own: the files are called `rpc.proto`, `kv.proto` and `auth.proto`, and another
library with a file of such a name would make the default pool refuse one of the two.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from bamboo_ds.errors import ConfigError

__all__ = ["etcd_messages"]

_FILES = ("kv", "auth", "rpc")
"""In the order of their imports."""

_SERIALIZED = re.compile(r"^\s*serialized_pb=_b\((.+)\)\s*$", re.MULTILINE)

_lock = threading.Lock()


def etcd_messages() -> Any:
    """Return the module `etcd3.etcdrpc`: etcd's messages and gRPC stubs.

    Raises:
        ConfigError: etcd3, grpcio or protobuf is missing, or is not what we know.
    """
    with _lock:
        return _load()


@functools.cache
def _load() -> ModuleType:
    if "etcd3" not in sys.modules:
        sys.modules.update(_generated_modules())
    try:
        return importlib.import_module("etcd3.etcdrpc")
    except ImportError as error:
        raise ConfigError(f"cannot import etcd3 ({error}): pip install 'etcd3>=0.12' grpcio protobuf") from error


def _generated_modules() -> dict[str, ModuleType]:
    """Return stand-ins for the generated modules of etcd3, by their dotted names."""
    from google.protobuf import descriptor_pool  # type: ignore[import-untyped]

    pool = descriptor_pool.DescriptorPool()
    modules = {}
    for name in _FILES:
        pool.AddSerializedFile(_serialized(name))
        modules[f"etcd3.etcdrpc.{name}_pb2"] = _module(pool, name)
    return modules


def _serialized(name: str) -> bytes:
    """Return the serialized descriptor in the source of a generated module of etcd3."""
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the store needs the package etcd3: pip install 'etcd3>=0.12'")
    path = Path(spec.submodule_search_locations[0], "etcdrpc", f"{name}_pb2.py")
    found = _SERIALIZED.search(path.read_text(encoding="utf-8")) if path.exists() else None
    if found is None:
        raise ConfigError(f"no serialized descriptor in {path}: this etcd3 is not 0.12; pip install etcd3==0.12.0")
    return str(ast.literal_eval(found.group(1))).encode("latin-1")


def _module(pool: Any, name: str) -> ModuleType:
    """Return a module with the messages and enums of one file, as protoc's own would have them."""
    file = pool.FindFileByName(f"{name}.proto")
    module = ModuleType(f"etcd3.etcdrpc.{name}_pb2")
    module.__dict__["DESCRIPTOR"] = file
    for message in file.message_types_by_name.values():
        module.__dict__[message.name] = _message_class(pool, message)
    for enum in file.enum_types_by_name.values():
        module.__dict__.update({value.name: value.number for value in enum.values})
    return module


def _message_class(pool: Any, descriptor: Any) -> Any:
    from google.protobuf import message_factory

    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(pool).GetPrototype(descriptor)  # protobuf < 4.22
