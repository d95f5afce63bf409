"""`bamboo-ds status`: what a job is doing, as tables, as one JSON document, or live.

The JSON document has the fields of `bamboo_ds.elastic.report.Report` (absent things are null):

::

    {"job": "bamboo", "time": 1767225600.0,                     Unix seconds
     "etcd": ["127.0.0.1:2379"],
     "phase": "training",                 gathering, training, aborted, deserted, failed or finished
     "phase_text": "plan 0.1",            the same for people, with the cause
     "coordinator": "n0",                 name of the node that leads, or null
     "nodes": [{"name": "n0", "zone": "a", "address": "127.0.0.2", "workers": [0], "spot": true,
                "joined_seconds": 12.3}],                       all have a live lease
     "workers": [{"id": 0, "node": "n0", "zone": "a", "state": "training"}],
                                          training, standby, ready, starting, ended, dead or left
     "roster": [0, 1, 2, 3],              the workers that began, or null
     "plan": {"epoch": 0, "version": 1, "cause": "...", "aborted": false, "from_checkpoint": false,
              "num_stages": 2, "num_pipelines": 2, "dead": [3],
              "grid": [[{"owner": 0, "home": 0, "node": "n0", "zone": "a",
                         "taken_over": false, "merged": false}, ...], ...]},   by pipeline and stage
     "progress": {"step": 7, "loss": 1.5, "samples_per_second": 90.1, "step_seconds": 0.7,
                  "vote_seconds": 0.002, "age_seconds": 0.4},
     "events": [{"time": 1767225599.0, "node": "n1", "kind": "node_lost", "text": "...", "fields": {}}],
                                                                oldest first
     "fleet": {"keeper": "n0",                                  whose agent asks the cloud for nodes, or null
               "warned": {"n3": "EC2 will terminate ..."},      nodes that will be taken away, and why
               "cost": {"nodes": 8, "per_hour": 7.3, "spent": 1.2, "on_demand": 4.1,      dollars
                        "samples_per_dollar": 900.0, ...}}}     fields of `bamboo_ds.cloud.meter.Cost`, or null

`owner` is null for a stage that is lost. With `--watch --json` there is one such document per line and change.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from bamboo_ds.cli.endpoint import Endpoint, find
from bamboo_ds.cli.options import StoreOptions
from bamboo_ds.cli.status_tables import picture
from bamboo_ds.cloud.fleet_report import FleetReport, fleet_report
from bamboo_ds.elastic.mirror import Mirror
from bamboo_ds.elastic.report import Report, report
from bamboo_ds.errors import ConfigError, StoreError, StoreUnavailableError
from bamboo_ds.store import Store

__all__ = ["StatusOptions", "as_json", "status"]

_LEAST_SECONDS = 0.5  # between two pictures
_IDLE_SECONDS = 1.0  # ages grow also when nothing changes
_NO_FLEET = FleetReport()


@dataclass(frozen=True, kw_only=True)
class StatusOptions(StoreOptions):
    """The options of `bamboo-ds status`."""

    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the job until it is over, or Ctrl-C.")] = False
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False
    events: Annotated[int, typer.Option(help="How many of the last events to show.")] = 10


def status(options: StatusOptions) -> int:
    """Show who is there, who owns which stage, how far the job is, and what happened last.

    Without --etcd it shows the job that was started last in this folder.
    """
    if options.events < 0:
        raise ConfigError(f"--events {options.events}: must be at least 0")
    endpoint = find(options)
    try:
        with endpoint.open() as store, Mirror(store) as mirror:
            _refuse_unknown(endpoint, mirror)
            if options.watch:
                _follow(options, endpoint, mirror, store)
            else:
                _print(options, endpoint, _look(options, endpoint, mirror), fleet_report(store))
    except StoreUnavailableError as error:
        raise StoreUnavailableError(f"{endpoint} cannot be reached: {error}") from None
    return 0


def as_json(found: Report, endpoint: Endpoint, *, fleet: FleetReport = _NO_FLEET) -> str:
    """Return the JSON document of a report."""
    fields = asdict(found)
    head = {"job": fields.pop("job"), "time": fields.pop("time"), "etcd": endpoint.etcd.endpoints}
    return json.dumps({**head, **fields, "fleet": fleet.as_json()})


def _refuse_unknown(endpoint: Endpoint, mirror: Mirror) -> None:
    if not mirror.entries:
        raise StoreError(f"there is no {endpoint}: no key of it exists; check --job and --etcd, or wait for its start")


def _look(options: StatusOptions, endpoint: Endpoint, mirror: Mirror) -> Report:
    return report(mirror.entries, job=endpoint.job, now=time.time(), last_events=options.events)


def _print(options: StatusOptions, endpoint: Endpoint, found: Report, fleet: FleetReport) -> None:
    if options.json_:
        typer.echo(as_json(found, endpoint, fleet=fleet))
    else:
        Console(highlight=False).print(picture(found, fleet=fleet))


def _follow(options: StatusOptions, endpoint: Endpoint, mirror: Mirror, store: Store) -> None:
    """Show the job again and again, until it is over or the user has seen enough."""
    try:
        if options.json_:
            for found, trouble in _pictures(options, endpoint, mirror):
                if not trouble:
                    typer.echo(as_json(found, endpoint, fleet=fleet_report(store)))
            return
        console = Console(highlight=False)
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            for found, trouble in _pictures(options, endpoint, mirror):
                fleet = FleetReport() if trouble else fleet_report(store)
                live.update(picture(found, trouble=trouble, fleet=fleet), refresh=True)
    except KeyboardInterrupt:
        return


def _pictures(options: StatusOptions, endpoint: Endpoint, mirror: Mirror) -> Iterator[tuple[Report, str]]:
    """Yield reports as the job changes, with the store's trouble if it cannot be heard; the last one is of its end."""
    trouble = ""
    while True:
        shown_at = time.monotonic()
        found = _look(options, endpoint, mirror)
        yield found, trouble
        if found.over:
            return
        while True:
            changed, trouble = _wait(mirror, trouble)
            seconds = time.monotonic() - shown_at
            if (changed and seconds >= _LEAST_SECONDS) or seconds >= _IDLE_SECONDS:
                break


def _wait(mirror: Mirror, trouble: str) -> tuple[bool, str]:
    try:
        return mirror.follow(_LEAST_SECONDS), ""
    except StoreUnavailableError as error:
        return False, str(error)
