"""What `bamboo-ds status` shows of a fleet."""

from __future__ import annotations

import io
import json

from rich.console import Console

from bamboo_ds.cli.status_tables import picture
from bamboo_ds.cloud import keys as fleet_keys
from bamboo_ds.cloud.fleet_report import FleetReport, fleet_report
from bamboo_ds.cloud.meter import Cost
from bamboo_ds.cloud.notices import Notice
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.report import report
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import encode
from bamboo_ds.store import MemoryStore

COST = Cost(0.0, 3600.0, nodes=2, per_hour=1.5, on_demand_per_hour=4.0, spent=3.0, on_demand=8.0, samples=6000)


def test_a_job_without_a_fleet_has_none() -> None:
    assert fleet_report(MemoryStore()) == FleetReport()
    assert FleetReport().as_json() == {"keeper": None, "warned": {}, "cost": None}


def test_the_oldest_candidate_keeps_the_fleet() -> None:
    store = MemoryStore()
    for node in ("n3", "n1"):
        store.elect(fleet_keys.KEEPER, node.encode(), store.lease(5.0)).campaign()
    assert fleet_report(store).keeper == "n3"


def test_a_store_out_of_reach_says_nothing() -> None:
    store = MemoryStore()
    store.server.reachable = False
    assert fleet_report(store) == FleetReport()


def test_money_and_warnings_are_in_the_picture_and_in_the_document() -> None:
    store = MemoryStore()
    for name in ("n0", "n1"):
        store.put(keys.node(name), encode(Node(name, "a", ())))
    store.put(fleet_keys.COST, COST.encode())
    store.put(fleet_keys.leaving("n1"), Notice("ec2", "EC2 will terminate this spot instance", 99.0).encode())
    found = fleet_report(store)
    document = json.loads(json.dumps(found.as_json()))
    assert document["warned"] == {"n1": "EC2 will terminate this spot instance"}
    assert (document["cost"]["spent"], document["cost"]["samples_per_dollar"]) == (3.0, 2000.0)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(picture(report(store.list().entries, job="train", now=0.0), fleet=found))
    text = console.export_text()
    assert "now $1.50/h   spent $3.00   on demand $8.00   samples/$ 2,000" in text
    (warned,) = [line for line in text.splitlines() if "warned" in line]
    assert warned.startswith("n1")
