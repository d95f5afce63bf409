"""The money in Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from bamboo_ds.cloud.cost_metrics import CostMetrics
from bamboo_ds.cloud.meter import Cost


def test_what_is_known_is_shown() -> None:
    registry = CollectorRegistry()
    metrics = CostMetrics(registry, job="train", node="n0")
    assert generate_latest(registry) == b""
    metrics.show(Cost(0.0, 0.0, nodes=3, per_hour=1.5, spent=2.0, samples=100))
    metrics.show(Cost(0.0, 0.0, nodes=4, per_hour=2.0, spent=4.0, samples=100, on_demand=8.0))
    labels = {"job_name": "train", "node": "n0"}
    shown = {
        name: registry.get_sample_value(f"bamboo_{name}", labels)
        for name in ("dollars_per_hour", "dollars_spent", "dollars_on_demand", "samples_per_dollar", "fleet_nodes")
    }
    assert shown == {
        "dollars_per_hour": 2.0,
        "dollars_spent": 4.0,
        "dollars_on_demand": 8.0,
        "samples_per_dollar": 25.0,
        "fleet_nodes": 4.0,
    }
