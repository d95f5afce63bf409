"""Runs a function right after a module has been imported, whoever imports it.

`import bamboo_ds` must cost nothing (the command line has to start at once), but DeepSpeed's CPU shared-memory op
must be forbidden before the user's script calls `deepspeed.init_distributed`. So the ban waits for the import of the
module that builds the op. Likewise calls of the script's own that must lead into the cluster.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Run `action(module)` now if the module is there, else once it has been imported."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, action))


def divert(module: str, function: str, handler: Callable[[], Callable[..., Any]]) -> None:
    """Let calls of a module's function go to another one, which gets the stock function before the arguments.

    May be done again: the first handler stays.

    Args:
        module: its name; it may be imported already, or later, or never.
        function: of the module.
        handler: returns where calls go; asked at each of them, so that it may import what is not loaded yet.
    """

    def replace(found: ModuleType) -> None:
        stock = getattr(found, function)
        if hasattr(stock, "bamboo_stock"):
            return

        @functools.wraps(stock)
        def diverted(*args: Any, **kwargs: Any) -> Any:
            return handler()(stock, *args, **kwargs)

        diverted.bamboo_stock = stock  # type: ignore[attr-defined]
        setattr(found, function, diverted)

    after_import(module, replace)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module through the other finders, and wraps its loader."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._action)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, action: Callable[[ModuleType], None]) -> None:
        self._inner, self._action = inner, action

    def __getattr__(self, name: str) -> Any:
        """Be the loader found first for all else: `inspect` asks it for the source, say."""
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._action(module)


def forbid_shared_memory_op() -> None:
    """Keep DeepSpeed from building its CPU shared-memory op.

    It compiles for a minute at first use, a killed process leaves a lock file that hangs the next run, and its
    collectives spin on dead peers.
    """
    after_import("deepspeed.comm.torch", lambda module: setattr(module, "build_shm_op", lambda: None))
