"""The console script `bamboo-ds`: one typer application, one module per command."""

from __future__ import annotations

import sys

import typer

from bamboo_ds.cli.bench import bench
from bamboo_ds.cli.bench.fleet import fleet
from bamboo_ds.cli.bench.validate import ValidateOptions, validate
from bamboo_ds.cli.chaos import ChaosOptions, chaos
from bamboo_ds.cli.cloud import cloud
from bamboo_ds.cli.options import command
from bamboo_ds.cli.preempt import PreemptOptions, preempt
from bamboo_ds.cli.profile import ProfileOptions, profile
from bamboo_ds.cli.run import run
from bamboo_ds.cli.run_options import RunOptions
from bamboo_ds.cli.schedule import schedule
from bamboo_ds.cli.simulate import SimulateOptions, simulate
from bamboo_ds.cli.status import StatusOptions, status
from bamboo_ds.errors import BambooError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Train on preemptible instances."
)
# What follows the script is the script's, also what looks like an option.
app.command("run", context_settings={"allow_interspersed_args": False})(command(run, RunOptions, name="run"))
app.command("status")(command(status, StatusOptions, name="status"))
app.command("preempt")(command(preempt, PreemptOptions, name="preempt"))
app.command("chaos")(command(chaos, ChaosOptions, name="chaos"))
app.command()(schedule)
app.command("simulate")(command(simulate, SimulateOptions, name="simulate"))
app.command("profile")(command(profile, ProfileOptions, name="profile"))
bench.command()(fleet)
bench.command("validate")(command(validate, ValidateOptions, name="bench validate"))
app.add_typer(bench, name="bench")
app.add_typer(cloud, name="cloud")


def main() -> None:
    """Run the command line; an error of ours is one line, not a traceback."""
    try:
        app()
    except BambooError as error:
        typer.echo(f"bamboo-ds: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
