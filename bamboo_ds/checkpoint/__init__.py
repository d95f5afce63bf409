"""Keeps training outside of the workers: what a layer's state is, how it is written down and found again."""

from bamboo_ds.checkpoint.state import UnitState

__all__ = ["UnitState"]
