"""Executes: instruction map, redundant forwards, activation swap, commit."""

from bamboo_ds.engine.engine import BambooPipelineEngine
from bamboo_ds.engine.parameters import with_redundant

__all__ = ["BambooPipelineEngine", "with_redundant"]
