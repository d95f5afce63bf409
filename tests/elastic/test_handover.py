"""The coordinator hears that a node will be taken away, and hands its stage over at a commit."""

from __future__ import annotations

from dataclasses import replace

from bamboo_ds.elastic import keys
from bamboo_ds.plan.codec import encode
from tests.elastic.coordinating import ballot, eight


def test_a_warned_node_is_handed_over_at_the_next_commit() -> None:
    job, chair = eight()
    job.join("n8", 8)
    job.vote(0, 0, 1)
    chair.run()
    assert job.plan.epoch == 0
    job.store.put("desk/leaving/n3", b'{"text": "EC2 will terminate this spot instance"}', lease=job.leases["n3"])
    job.vote(1, 0, 1)
    chair.run()
    decided = job.outcome(1)
    assert decided is not None
    assert decided.decision is not None
    assert decided.decision.reshape  # all meet at a boundary now
    for pipeline in (0, 1):
        met = replace(ballot(2, pipeline), boundary=True)
        job.store.put(keys.vote(0, 2, job.plan.number, pipeline), encode(met))
    chair.run()
    assert job.plan.epoch == 1
    assert set(job.plan.workers) == {0, 1, 2, 4, 5, 6, 7, 8}
    assert job.plan.dead == frozenset()
    assert "will be taken away" in job.plan.cause


def test_a_warning_that_ended_with_its_node_is_forgotten() -> None:
    job, chair = eight()
    job.store.put("desk/leaving/n3", b"{}", lease=job.leases["n3"])
    chair.view.refresh()
    assert chair.view.leaving == {"n3"}
    job.lapse("n3")
    chair.view.refresh()
    assert chair.view.leaving == set()
