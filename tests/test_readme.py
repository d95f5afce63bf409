"""What the README promises exists: names, commands, files and links; and what exists is in the README."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

import bamboo_ds
from bamboo_ds.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

ATTRIBUTE = re.compile(r"\bbamboo_ds((?:\.[A-Za-z_]\w*)+)")
FROM_IMPORT = re.compile(r"\bfrom (bamboo_ds(?:\.\w+)*) import (\([^)]*\)|[^\n#`]+)")
COMMAND = re.compile(r"\bbamboo-ds((?: [a-z][a-z-]*)+)")
PROJECT_FILE = re.compile(r"(?<![\w./-])((?:scripts|ds_configs|docs|tests|bamboo_ds)/[\w./-]*\w)(?![\w*{<])")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def is_there(dotted: str) -> bool:
    """Say whether a dotted name below ``bamboo_ds`` is a module, or a chain of attributes of one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        name = ".".join(parts[:cut])
        if find_module(name):
            return has_attributes(importlib.import_module(name), parts[cut:])
    return False


def find_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


def has_attributes(thing: object, names: list[str]) -> bool:
    for name in names:
        if not hasattr(thing, name):
            return False
        thing = getattr(thing, name)
    return True


def promised_names(text: str) -> set[str]:
    """Return every dotted name of ours that a text uses or imports."""
    names = {f"bamboo_ds{match[1]}" for match in ATTRIBUTE.finditer(text)}
    for module, imports in FROM_IMPORT.findall(text):
        for item in imports.strip("()").split(","):
            if words := item.split():
                names.add(f"{module}.{words[0]}")
    return names


def command_exists(words: list[str]) -> bool:
    """Say whether the words after ``bamboo-ds`` begin with a command, where the group they are in has commands."""
    group: Any = typer.main.get_command(app)
    for word in words:
        commands = getattr(group, "commands", None)
        if commands is None:
            return True  # the rest are arguments
        if word not in commands:
            return False
        group = commands[word]
    return True


def test_every_public_name_is_in_the_readme() -> None:
    assert [name for name in bamboo_ds.__all__ if not re.search(rf"\b{name}\b", README)] == []


def test_every_public_name_exists() -> None:
    assert [name for name in bamboo_ds.__all__ if not hasattr(bamboo_ds, name)] == []


def test_every_name_in_the_readme_exists() -> None:
    assert sorted(name for name in promised_names(README) if not is_there(name)) == []


def test_every_command_in_the_readme_exists() -> None:
    commands = {match[1].strip() for match in COMMAND.finditer(README)}
    assert commands
    assert sorted(command for command in commands if not command_exists(command.split())) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_file_a_page_names_exists(page: Path) -> None:
    named = set(PROJECT_FILE.findall(page.read_text(encoding="utf-8")))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert sorted(link for link in links if not (page.parent / link).exists()) == []


def test_a_false_promise_is_found() -> None:
    text = "`bamboo_ds.no_such_name` and\nfrom bamboo_ds.errors import (BambooError, NoSuchError as E)"
    assert {name for name in promised_names(text) if not is_there(name)} == {
        "bamboo_ds.no_such_name",
        "bamboo_ds.errors.NoSuchError",
    }
    assert not command_exists(["no-such-command"])
