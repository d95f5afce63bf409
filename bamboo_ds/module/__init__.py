"""Owns layers: the own stage and the redundant one."""

from bamboo_ds.module.grid import PlanGrid
from bamboo_ds.module.layers import seed_all, untouched_randomness
from bamboo_ds.module.module import BambooPipelineModule, adopt

__all__ = ["BambooPipelineModule", "PlanGrid", "adopt", "seed_all", "untouched_randomness"]
