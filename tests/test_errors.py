"""The error tree: its picture is true, and errors survive the trip between processes."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys

import pytest

from bamboo_ds import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]


def drawn_tree() -> dict[str, str]:
    """Read child -> parent from the indentation of the picture in the module docstring."""
    parents: dict[str, str] = {}
    open_branches: list[tuple[int, str]] = [(0, "Exception")]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([ |]*)\+-- (\w+)", line)
        if match is None:
            continue
        column, name = len(match.group(1)), match.group(2)
        while open_branches[-1][0] >= column:
            open_branches.pop()
        parents[name] = open_branches[-1][1]
        open_branches.append((column, name))
    return parents


def test_the_drawn_tree_is_the_real_tree() -> None:
    assert drawn_tree() == {cls.__name__: cls.__bases__[0].__name__ for cls in CLASSES}


def test_every_error_class_of_the_module_is_exported() -> None:
    defined = {name for name, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)}
    assert defined == set(errors.__all__)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_pickling(cls: type[errors.BambooError]) -> None:
    copy = pickle.loads(pickle.dumps(cls("step 3: loss is nan")))
    assert type(copy) is cls
    assert str(copy) == "step 3: loss is nan"


def test_python_s_own_handlers_still_work() -> None:
    with pytest.raises(ValueError, match="bad key"):
        raise errors.UnsupportedFeatureError("bad key")
    with pytest.raises(StopIteration, match="data ended"):
        raise errors.DataExhaustedError("data ended")


def test_errors_import_nothing() -> None:
    code = (
        "import sys, importlib.util as u; before = set(sys.modules);"
        f"spec = u.spec_from_file_location('errors', {errors.__file__!r}); m = u.module_from_spec(spec);"
        "spec.loader.exec_module(m); print(sorted(set(sys.modules) - before - {'__future__'}))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
