"""`bamboo-ds chaos`: train through the preemptions of a recorded spot market, and check every number."""

from bamboo_ds.cli.chaos.command import ChaosOptions, chaos

__all__ = ["ChaosOptions", "chaos"]
