"""How a bench speaks: progress on stderr, a table, one JSON object as the last line, the verdict as exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bamboo_ds.cli.bench.workers import WorkerError

Item = TypeVar("Item")

_PIPED_COLUMNS = 120  # of a table that goes to a file

JSON_OPTION = typer.Option(False, "--json", help="Print the JSON object only, without the table.")
QUICK_OPTION = typer.Option(False, "--quick", help="Run a part of it, in under a minute.")


def progress(items: Sequence[Item], title: str) -> Iterator[Item]:
    """Iterate with a progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    yield from track(items, title, console=console, disable=not console.is_terminal, transient=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, caption: str = "") -> Table:
    """Lay rows out; floats are shortened, True and False become words."""
    result = Table(*columns, title=title, caption=caption or None)
    for row in rows:
        result.add_row(*(_cell(value) for value in row))
    return result


def finish(report: dict[str, Any], tables: Sequence[Table], *, as_json: bool) -> None:
    """Print the report and end the command.

    Args:
        report: Must hold `ok`; is printed as the last line.
        tables: Shown before it.
        as_json: Leave the tables out.

    Raises:
        typer.Exit: Always; code 0 when ok, else 1.
    """
    console = Console() if sys.stdout.isatty() else Console(width=_PIPED_COLUMNS)
    for each in () if as_json else tables:
        console.print(each)
    typer.echo(json.dumps(report))
    raise typer.Exit(0 if report["ok"] else 1)


@contextmanager
def reported_failure() -> Iterator[None]:
    """Report a failed worker as every outcome is reported: the traceback on stderr, a last line that is not ok.

    Raises:
        typer.Exit: A worker failed; code 1.
    """
    try:
        yield
    except WorkerError as problem:
        typer.echo(str(problem), err=True)
        finish({"ok": False, "error": str(problem).partition("\n--- log")[0]}, [], as_json=True)


def tails(folder: Path, *, lines: int = 12) -> str:
    """Return the end of what agents and workers have written below a folder, and of what two of the nodes have seen."""
    return "\n".join(
        f"{path.name}: " + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
        for path in [*sorted(folder.rglob("*.log")), *sorted(folder.rglob("events.jsonl"))[:2]]
    )


def rounded(value: float) -> float:
    """Shorten a measured figure to four significant digits, which is more than any of ours is worth."""
    return float(f"{value:.4g}")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "[bold red]no[/]"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"
    return "" if value is None else str(value)
