"""Decides: pure functions on frozen data, no input or output."""

from bamboo_ds.plan.commit import Decision, Vote, tally
from bamboo_ds.plan.plan import Place, Plan, Seat, static_plan
from bamboo_ds.plan.source import PlanSource, StaticPlanSource

__all__ = ["Decision", "Place", "Plan", "PlanSource", "Seat", "StaticPlanSource", "Vote", "static_plan", "tally"]
