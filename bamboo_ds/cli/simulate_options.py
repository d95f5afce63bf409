"""The options of `bamboo-ds simulate`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from bamboo_ds.schedule.windows import MODES
from bamboo_ds.simulator.comparison import DEFAULT_POLICIES, POLICIES
from bamboo_ds.simulator.market import Market
from bamboo_ds.simulator.models import MODELS

__all__ = ["MARKET_KEYS", "SimulateOptions"]

MARKET_KEYS = tuple(field.name for field in fields(Market))
"""What `--generate` may set."""

NODES, TRAINING, OUTPUT = "Nodes", "Training", "Output"


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """What is asked for."""

    trace: Annotated[
        Path | None,
        typer.Option(
            help="A trace: event CSV, polled counts or JSON lines.", rich_help_panel=NODES, show_default=False
        ),
    ] = None
    generate: Annotated[
        str | None,
        typer.Option(
            help=f"Draw traces instead: key=value,... of {', '.join(MARKET_KEYS)}.",
            rich_help_panel=NODES,
            show_default=False,
        ),
    ] = None
    seeds: Annotated[int, typer.Option(help="How many traces to draw; figures are means.", rich_help_panel=NODES)] = 1
    zones: Annotated[
        int,
        typer.Option(
            help="Give the nodes of a trace without zones so many: nodes that go at once get one zone.",
            rich_help_panel=NODES,
        ),
    ] = 1
    scale: Annotated[float, typer.Option(help="Times as many nodes as the trace.", rich_help_panel=NODES)] = 1.0
    cut: Annotated[
        str | None, typer.Option(help="A part of the trace, in hours: 2-8.", rich_help_panel=NODES, show_default=False)
    ] = None
    model: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(MODELS)}, or a JSON file as `bamboo-ds profile` writes.", rich_help_panel=TRAINING
        ),
    ] = "bert-large"
    stages: Annotated[
        int | None, typer.Option(help="P.  [default: the model's]", rich_help_panel=TRAINING, show_default=False)
    ] = None
    pipelines: Annotated[
        int | None,
        typer.Option(
            help="D; the batch grows with it.  [default: the model's, or what the drawn nodes make]",
            rich_help_panel=TRAINING,
            show_default=False,
        ),
    ] = None
    policies: Annotated[
        str,
        typer.Option(help=f"Ways to train to compare, of {', '.join(POLICIES)}.", rich_help_panel=TRAINING),
    ] = ",".join(DEFAULT_POLICIES)
    redundancy: Annotated[
        str, typer.Option(help=f"Of the policy bamboo: {', '.join(MODES)}.", rich_help_panel=TRAINING)
    ] = "fit"
    constants: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="NAME=VALUE of a constant of the simulation; may be repeated.", rich_help_panel=TRAINING
        ),
    ] = None
    placement: Annotated[
        str,
        typer.Option(
            help="policy: the real one; kept: workers stay where they are, for large clusters; auto.",
            rich_help_panel=TRAINING,
        ),
    ] = "auto"
    sweep: Annotated[
        str | None,
        typer.Option(
            help="NAME=V1,V2,...: several values of stages, pipelines, or of a key of --generate.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Write a PNG: nodes, throughput and time by cause; or the figures of the sweep.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    write_trace: Annotated[
        Path | None, typer.Option(help="Write the (first) trace as JSON lines.", rich_help_panel=OUTPUT)
    ] = None
    processes: Annotated[int | None, typer.Option(help="For many traces.  [default: cores]", show_default=False)] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.", rich_help_panel=OUTPUT)] = False
