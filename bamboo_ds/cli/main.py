"""The console script `bamboo-ds`: one typer application, one module per command."""

from __future__ import annotations

import sys

import typer

from bamboo_ds.cli.bench import bench
from bamboo_ds.cli.schedule import schedule
from bamboo_ds.errors import BambooError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Train on preemptible instances."
)
app.command()(schedule)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line; an error of ours is one line, not a traceback."""
    try:
        app()
    except BambooError as error:
        typer.echo(f"bamboo-ds: {error}", err=True)
        sys.exit(2)
