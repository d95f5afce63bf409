"""Pretend time: what a training costs on a spot market, by the plans and schedules of the real thing.

A trace says when the market gives and takes nodes. `bamboo` plays the job on it: every plan comes from `plan.policy`,
every step time from `schedule.timing`. `restarting`, `dropping` and `replicas` are other ways to train on the same
trace, as rough models; `comparison` runs them side by side. Nothing here loads torch.
"""

from __future__ import annotations
