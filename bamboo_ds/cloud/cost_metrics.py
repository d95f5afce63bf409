"""What the agent that keeps the fleet tells Prometheus of the money."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from bamboo_ds.cloud.meter import Cost

__all__ = ["CostMetrics"]

_GAUGES = {
    "bamboo_dollars_per_hour": "What the nodes cost now; of the agent that keeps the fleet, like all of these.",
    "bamboo_dollars_spent": "What they have cost since the job's first run.",
    "bamboo_dollars_on_demand": "What the same would have cost on demand.",
    "bamboo_samples_per_dollar": "Samples trained on for a dollar.",
    "bamboo_fleet_nodes": "Nodes that cost money, booting ones included.",
}


class CostMetrics:
    """The gauges. They appear with the first count: an agent that counts nothing shows none.

    Args:
        registry: of the agent.
        job: name of the job, a label of each; likewise `node`.
    """

    def __init__(self, registry: CollectorRegistry, *, job: str, node: str) -> None:
        self._registry, self._labels = registry, {"job_name": job, "node": node}
        self._gauges: dict[str, Gauge] = {}

    def show(self, cost: Cost) -> None:
        """Take in a count."""
        values = {
            "bamboo_dollars_per_hour": cost.per_hour,
            "bamboo_dollars_spent": cost.spent,
            "bamboo_dollars_on_demand": cost.on_demand,
            "bamboo_samples_per_dollar": cost.samples_per_dollar,
            "bamboo_fleet_nodes": cost.nodes,
        }
        for name, value in values.items():
            if value is not None:
                self._gauge(name).set(value)

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            gauge = Gauge(name, _GAUGES[name], list(self._labels), registry=self._registry)
            self._gauges[name] = gauge.labels(**self._labels)
        return self._gauges[name]
