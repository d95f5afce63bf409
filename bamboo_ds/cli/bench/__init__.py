"""`bamboo-ds bench`: measure what the project promises, on this machine, against one process and stock DeepSpeed.

Every command prints one JSON object as its last line, with `ok`, and exits 1 when not ok.
"""

from __future__ import annotations

import typer

from bamboo_ds.cli.bench.checkpoint import checkpoint
from bamboo_ds.cli.bench.detect import detect
from bamboo_ds.cli.bench.failover import failover
from bamboo_ds.cli.bench.leak import leak
from bamboo_ds.cli.bench.overhead import overhead
from bamboo_ds.cli.bench.parity import parity
from bamboo_ds.cli.bench.pause import pause
from bamboo_ds.cli.bench.reconfigure import reconfigure
from bamboo_ds.cli.bench.store import store

bench = typer.Typer(no_args_is_help=True, help="Measure on this machine what the project promises.")
for command in (parity, overhead, leak, failover, pause, detect, store, checkpoint, reconfigure):
    bench.command()(command)

__all__ = ["bench"]
