"""Executes: instruction map, redundant forwards, activation swap, commit."""

from bamboo_ds.engine.engine import BambooPipelineEngine
from bamboo_ds.engine.parameters import Places, with_redundant, without_redundant

__all__ = ["BambooPipelineEngine", "Places", "with_redundant", "without_redundant"]
