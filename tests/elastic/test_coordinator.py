"""The coordinator's decisions, one story each, in a store and by a clock that the test moves."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.coordinator import CoordinatorSettings
from bamboo_ds.elastic.events import read_events
from bamboo_ds.errors import ConfigError
from bamboo_ds.plan import static_plan
from bamboo_ds.plan.codec import encode
from bamboo_ds.plan.commit import Ballot, Decision, Outcome, settle
from bamboo_ds.plan.job import JobSettings
from bamboo_ds.plan.plan import NOBODY
from bamboo_ds.plan.roster import StartRule
from tests.elastic.coordinating import SPEC, TTL_SECONDS, Job, ballot, eight


def with_start(start_workers: int | None, patience_seconds: float) -> Job:
    return Job(CoordinatorSettings(ttl_seconds=TTL_SECONDS, start=StartRule(start_workers, patience_seconds)))


# ---- the roster ------------------------------------------------------------------------------------------------------


def test_the_roster_closes_the_moment_enough_workers_are_ready() -> None:
    job = with_start(3, 1e6)
    chair = job.elect()
    job.join("n1", 7, 3)
    job.join("n2", 5, ready=False)
    chair.run()
    assert job.roster is None
    job.ready(5)
    assert chair.run() == ["worker_ready", "roster"]
    assert job.roster is not None
    assert job.roster.workers == (3, 5, 7)
    assert job.roster.cause == "3 workers are ready, 3 were asked for"


def test_patience_counts_from_the_last_who_joined_and_says_when_it_ends() -> None:
    job = with_start(None, 10.0)
    chair = job.elect()
    job.clock.advance(50)
    assert chair.run() == ["coordinator"]
    job.join("n1", 1)
    chair.run()
    job.clock.advance(6)
    job.join("n2", 2)
    chair.run()
    job.clock.advance(9.5)
    assert chair.run() == []
    assert chair.coordinator.seconds_to_next == pytest.approx(0.5)
    job.clock.advance(0.5)
    assert chair.run() == ["roster"]
    assert job.roster is not None
    assert job.roster.workers == (1, 2)


def test_who_has_ended_left_or_lapsed_is_not_in_the_roster() -> None:
    job = with_start(2, 1e6)
    chair = job.elect()
    job.join("n1", 1, 2, 3)
    job.end(1)
    job.leave(2)
    job.join("n4", 4)
    job.lapse("n4")
    job.ready(9)
    chair.run()
    assert job.roster is None
    job.join("n5", 5)
    chair.run()
    assert job.roster is not None
    assert job.roster.workers == (3, 5)


def test_a_roster_of_whom_nobody_is_left_is_made_anew() -> None:
    job = with_start(2, 5.0)
    chair = job.elect()
    job.join("n1", 0, 1)
    chair.run()
    job.end(0)
    job.lapse("n1")
    job.join("n2", 2)
    chair.run()
    assert job.roster is not None
    assert job.roster.workers == (0, 1), "one is not enough yet"
    job.join("n3", 3)
    assert "roster" in chair.run()
    assert job.roster.workers == (2, 3)
    job.publish(replace(SPEC, num_stages=2, pipelines=1))
    chair.run()
    assert job.plan.workers == (2, 3)


# ---- the first plan --------------------------------------------------------------------------------------------------


def test_the_first_plan_is_made_when_roster_and_specification_are_there() -> None:
    job = Job()
    chair = job.elect()
    for number in range(8):
        job.join(f"n{number}", number)
    chair.run()
    assert not job.has(keys.PLAN)
    job.join("late", 8)
    chair.run()
    job.publish()
    assert chair.run() == ["plan"]
    assert job.plan.owners == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert job.plan.number == (0, 0)


def test_workers_that_were_lost_after_the_roster_get_no_stage() -> None:
    job = Job()
    chair = job.elect()
    for number in range(8):
        job.join(f"n{number}", number)
    chair.run()
    job.end(2)
    job.lapse("n5")
    job.publish()
    chair.run()
    assert job.plan.workers == (0, 1, 3, 4)
    assert job.plan.num_pipelines == 1


def test_standbys_fill_in_for_those_who_were_to_begin_when_they_are_too_few() -> None:
    job = with_start(2, 1e6)
    chair = job.elect()
    job.join("n0", 0)
    job.join("n1", 1)
    chair.run()
    job.join("n2", 2)
    job.join("n3", 3)
    job.publish(replace(SPEC, min_stages=2))
    job.end(1)
    chair.run()
    assert job.plan.workers == (0, 2, 3)


def test_too_few_workers_wait_and_that_is_told_once() -> None:
    job = with_start(1, 1e6)
    chair = job.elect()
    job.join("n0", 0)
    job.publish(replace(SPEC, min_stages=3))
    assert chair.run()[-1] == "wait"
    job.join("n1", 1, ready=False)
    chair.run()
    assert job.events("wait") == ["1 worker(s) are there, and min_stages = 3: waiting for nodes"]
    job.ready(1)
    job.join("n2", 2)
    assert chair.run()[-1] == "plan"
    assert job.plan.workers == (0, 1, 2)


def test_the_plan_of_a_launcher_is_taken_when_all_of_its_workers_are_there() -> None:
    job = with_start(4, 1e6)
    chair = job.elect()
    launched = static_plan(world_size=4, num_stages=2)
    job.join("host", 0, 1, 2, 3)
    chair.run()
    job.publish(replace(SPEC, num_stages=2, launched=launched))
    chair.run()
    assert job.plan.owners == launched.owners
    assert job.plan.cause == "the launcher has placed 4 workers"


def test_the_plan_of_a_launcher_waits_for_workers_that_were_never_there_but_not_for_those_that_are_gone() -> None:
    launched = static_plan(world_size=4, num_stages=2)
    job = with_start(3, 1e6)
    chair = job.elect()
    job.join("a", 0, 1, 2)
    job.publish(replace(SPEC, num_stages=2, launched=launched))
    chair.run()
    assert not job.has(keys.PLAN)
    assert job.events("wait") == ["worker(s) 3 of the launcher's plan are not there"]
    job.end(1)
    chair.run()
    assert job.plan.owners == ((0, 2),)


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_a_worker_whose_agent_saw_it_end_is_lost() -> None:
    job, chair = eight()
    job.end(2)
    assert chair.run() == ["failover"]
    assert job.plan.owners == ((0, 0, 4, 6), (1, 3, 5, 7))
    assert (job.plan.number, job.plan.dead) == ((0, 1), {2})
    assert job.events("failover") == ["worker 2: killed: worker 0 takes over stage 1 of pipeline 0"]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (
            b'{"signal": "SIGKILL", "reason": "worker 2 of node n2 was ended by SIGKILL"}',
            "worker 2 of node n2 was ended",
        ),
        (b'{"signal": null, "reason": "refused: num_stages = 5 here"}', "worker 2: refused: num_stages = 5 here"),
        (b'{"signal": "SIGKILL", "reason": ""}', "its agent saw worker 2 end"),
        (b"gibberish", "its agent saw worker 2 end"),
    ],
)
def test_the_cause_of_a_plan_is_what_the_agent_said(told: bytes, reason: str) -> None:
    job, chair = eight()
    job.store.put(keys.ended(2), told)
    chair.run()
    assert job.plan.cause.startswith(reason)


def test_the_workers_of_a_node_whose_lease_is_gone_are_lost_together() -> None:
    job, chair = eight(each=2)
    before = job.plan
    job.lapse("n1")
    assert chair.run() == ["node_lost", "failover"]
    assert job.plan.dead == {2, 3}
    assert job.plan.version == before.version + 1


def test_a_node_that_comes_back_with_other_workers_has_lost_its_former_ones() -> None:
    job, chair = eight()
    job.lapse("n2")
    job.join("n2", 8)
    chair.run()
    assert job.plan.dead == {2}


def test_two_neighbours_that_report_a_worker_are_believed() -> None:
    job, chair = eight()
    job.report("2>4")
    chair.run()
    assert job.plan.version == 0
    job.report("6>4")
    assert "failover" in chair.run()
    assert job.plan.dead == {4}


def test_of_two_that_accuse_each_other_and_both_answer_one_is_evicted_by_rule() -> None:
    job, chair = eight()
    job.report("2>4 4>2")
    assert chair.run() == ["roll"]
    assert job.roll == 1
    job.answer(2)
    assert chair.run() == []
    job.answer(4)
    assert chair.run() == ["failover", "evicted"]
    assert job.plan.dead == {4}
    (text,) = job.events("evicted")
    assert text.endswith("worker 4 goes: it joined after worker 2")
    assert [event.node for event in read_events(job.store) if event.kind == "evicted"] == ["n4"]


def test_an_answer_to_an_earlier_roll_does_not_count() -> None:
    job, chair = eight()
    job.report("2>4")
    chair.run()
    job.answer(2, 4, roll=0)
    assert chair.run() == []
    job.answer(4)
    chair.run()
    job.report("3>5")  # a new report, a new roll: worker 4 has not answered that
    assert chair.run() == ["roll"]
    assert job.roll == 2
    job.answer(2)
    job.answer(4, roll=1)
    assert chair.run() == []
    job.answer(4)
    assert "evicted" in chair.run()


def test_answers_count_only_for_the_plan_they_were_asked_under() -> None:
    job, chair = eight()
    job.report("2>4")
    chair.run()
    job.answer(2)
    job.end(7)
    chair.run()
    assert job.plan.version == 1
    job.answer(4)
    job.report("2>4")
    assert chair.run() == ["roll"]
    assert job.plan.version == 1


def test_a_report_that_is_repeated_calls_no_other_roll() -> None:
    job, chair = eight()
    job.report("2>4")
    chair.run()
    for _ in range(3):
        job.report("2>4")
        assert chair.run() == []
    assert job.roll == 1
    chair.die()
    job.elect("c1").run()
    assert job.roll == 1, "the next coordinator knows by the revisions that it was called"


def test_a_report_that_was_on_its_way_when_the_roll_was_called_is_answered_by_it() -> None:
    """The desk is heard later than the board: the order in the store counts, not that of hearing."""
    job, chair = eight()
    job.report("2>4")
    chair.view.refresh()
    job.report("4>2")  # not heard yet
    chair.coordinator.step()
    assert job.roll == 1
    job.answer(2, 4)
    assert chair.run() == ["failover", "evicted"]


def test_reports_of_another_plan_and_of_those_who_left_are_void() -> None:
    job, chair = eight()
    job.report("2>4 6>4", number=(0, 7))
    job.leave(0)
    job.report("2>0 6>0")
    assert chair.run() == []
    assert job.plan.version == 0
    assert job.roll == 0


def test_who_has_left_is_not_lost_when_its_process_and_its_node_go() -> None:
    job, chair = eight()
    job.leave(2, 3)
    job.lapse("n2")
    job.end(3)
    chair.run()
    assert job.plan.version == 0


def test_a_lost_standby_changes_no_plan() -> None:
    job, chair = eight()
    job.join("n8", 8)
    chair.run()
    assert job.events("worker_ready")[-1] == "worker(s) 8 joined and have no stage yet"
    job.end(8)
    job.lapse("n8")
    assert chair.run() == ["node_lost"]
    assert job.plan.version == 0


def test_a_failure_that_was_written_before_its_node_forgot_the_worker_ends_the_job_and_is_no_loss() -> None:
    """The view hears the desk first; the store knows better."""
    job, chair = eight()
    chair.view.refresh()
    job.fail()
    job.list_workers("n3")
    chair.view._apply(tuple(event for event in chair.view._ears._watches[1].next(0)))
    assert 3 not in chair.view.registered
    assert not chair.view.over
    assert chair.coordinator.step() == ()
    assert job.plan.version == 0
    job.end(4)
    assert chair.run() == []
    assert chair.view.over


# ---- after an abort --------------------------------------------------------------------------------------------------


def decided(job: Job, commit: int) -> Decision:
    """Return the decision of a commit that is decided."""
    outcome = job.outcome(commit)
    assert outcome is not None
    assert outcome.decision is not None
    return outcome.decision


def test_a_loss_before_the_first_decision_of_an_epoch_aborts_it_as_shadows_may_lack_layers() -> None:
    job, chair = eight(settled=False)
    job.end(2)
    assert chair.run() == ["abort", "reconfigure"]
    assert job.plan.number == (1, 0)
    assert 2 not in job.plan.workers
    job.end(3)
    assert chair.run()[:2] == ["abort", "reconfigure"]
    assert job.plan.number == (2, 0)


def test_the_first_decision_settles_an_epoch() -> None:
    job, chair = eight(settled=False)
    job.vote(0, 0, 1)
    chair.run()
    assert chair.view.settled == 0
    job.end(2)
    assert chair.run() == ["failover"]


def test_a_node_that_joins_is_waited_for_at_a_boundary_and_gets_its_place_there() -> None:
    job, chair = eight()
    job.vote(0, 0, 1)
    job.end(2)
    chair.run()
    job.vote(1, 0, 1)
    chair.run()
    assert not decided(job, 1).reshape, "seven workers are as fast merged as four that are whole"
    job.join("n8", 8)
    chair.run()
    job.vote(2, 0, 1)
    chair.run()
    assert decided(job, 2).reshape
    assert job.plan.number == (0, 1), "whoever joins knows nothing of what scripts do after a step"
    job.meet(3, 0)
    assert chair.run() == []
    job.meet(3, 1)
    assert chair.run() == ["decision", "reconfigure"]
    assert (job.plan.number, job.plan.workers) == ((1, 0), (0, 1, 3, 4, 5, 6, 7, 8))
    assert job.outcome(3) is not None
    plan, decision = job.store.get(keys.PLAN), job.store.get(keys.decision(0, 3))
    assert plan is not None
    assert decision is not None
    assert plan.revision == decision.revision, "nobody sees one without the other"


def test_a_boundary_that_is_not_needed_any_more_changes_nothing() -> None:
    job, chair = eight()
    job.vote(0, 0, 1)
    job.end(2)
    job.join("n8", 8)
    chair.run()
    job.vote(1, 0, 1)
    chair.run()
    job.lapse("n8")
    chair.run()
    job.meet(2, 0, 1)
    assert chair.run() == ["decision"]
    assert job.plan.number == (0, 1)


def test_no_pipeline_gets_a_place_without_work() -> None:
    job, chair = eight(spec=replace(SPEC, pipelines=None))
    job.store.put(keys.settings(0), encode(JobSettings(0, micro_batches=2)))
    job.join("n8", *range(8, 12))
    job.vote(0, 0, 1)
    chair.run()
    assert not decided(job, 0).reshape, "M = 2 is work for two pipelines"


def test_a_script_with_two_engines_keeps_its_shape() -> None:
    job, chair = eight()
    job.vote(0, 0, 1, engine=1)
    job.vote(0, 0, 1)
    job.end(2)
    job.join("n8", 8)
    chair.run()
    job.vote(1, 0, 1, engine=1)
    job.vote(1, 0, 1)
    chair.run()
    assert not decided(job, 1).reshape


def test_an_aborted_plan_is_followed_by_a_new_epoch_of_the_survivors() -> None:
    job, chair = eight()
    job.end(2, 4)
    assert chair.run() == ["abort", "reconfigure"]
    assert job.plan.number == (1, 0)
    assert job.plan.num_pipelines == 1
    assert job.plan.dead == {2, 4}
    assert not job.plan.from_checkpoint


def test_a_new_epoch_takes_only_workers_that_are_ready_and_have_not_left() -> None:
    job, chair = eight()
    job.join("n8", 8)
    job.join("n9", 9, ready=False)
    job.leave(7)
    job.end(2, 4)
    chair.run()
    assert job.plan.num_pipelines == 1
    assert not {7, 9} & set(job.plan.workers)
    assert job.plan.dead == {2, 4, 7}


def test_too_few_survivors_wait_for_nodes_and_go_on_when_they_come() -> None:
    job, chair = eight(spec=replace(SPEC, min_stages=4))
    job.end(0, 1, 2, 3, 4)
    assert chair.run() == ["abort", "wait"]
    assert job.plan.aborted
    assert NOBODY in job.plan.owners[0]
    job.join("n8", 8, ready=False)
    assert chair.run() == ["node_joined"]
    job.ready(8)
    assert "reconfigure" in chair.run()
    assert job.plan.workers == (5, 6, 7, 8)
    assert job.plan.from_checkpoint
    assert json.loads(job.store.list("events/").entries[-1].value)["action"] == "restore"


def test_old_reports_do_not_keep_an_aborted_job_from_going_on() -> None:
    job, chair = eight()
    job.end(2, 4)
    chair.step()
    assert job.plan.aborted
    job.report("0>6")
    chair.run()
    assert job.plan.epoch == 1


# ---- commits ---------------------------------------------------------------------------------------------------------


def test_a_commit_is_decided_when_all_pipelines_have_voted_and_its_traces_go() -> None:
    job, chair = eight()
    job.vote(0, 0)
    assert chair.run() == []
    job.vote(0, 1)
    assert chair.run() == ["decision"]
    assert job.outcome(0) == settle([ballot(0, 0), ballot(0, 1)])
    assert job.keys_of("desk/votes/") == []
    job.vote(1, 1, 0)
    chair.run()
    assert job.keys_of(keys.DECISIONS) == ["board/decision/0/1"]


def test_engines_commit_apart() -> None:
    job, chair = eight()
    job.vote(0, 0, 1)
    job.vote(0, 0, engine=1)
    chair.run()
    job.vote(1, 0, 1)
    chair.run()
    job.vote(0, 1, engine=1)
    chair.run()
    assert job.keys_of(keys.DECISIONS) == ["board/decision/0/1", "board/decision/1/0"]


def test_ballots_of_an_older_plan_do_not_count() -> None:
    job, chair = eight()
    job.vote(0, 0)
    job.end(2)
    chair.run()
    job.vote(0, 1)
    chair.run()
    assert job.outcome(0) is None
    job.vote(0, 0)
    chair.run()
    assert job.outcome(0) is not None
    assert job.keys_of("desk/votes/") == []


def test_a_decision_and_a_new_plan_never_cross() -> None:
    """Both are there: the ballots are counted first. A plan written in between makes the decision fail."""
    job, chair = eight()
    job.vote(0, 0, 1)
    job.end(2)
    assert chair.run() == ["decision", "failover"]
    job.vote(1, 0, 1)
    chair.view.refresh()
    job.store.put(keys.PLAN, encode(replace(job.plan, version=2)))
    assert chair.coordinator.step() == ()
    assert job.outcome(1) is None
    assert chair.run() == []
    assert chair.view.plan == job.plan
    job.vote(1, 0, 1)
    assert chair.run() == ["decision"]


def test_a_ballot_that_comes_again_after_the_decision_decides_nothing_and_is_deleted() -> None:
    job, chair = eight()
    job.vote(0, 0, 1)
    chair.run()
    job.vote(1, 0, 1)
    chair.run()
    before = job.store.list(keys.DECISIONS)
    job.vote(0, 0, 1, loss=7.0)
    job.vote(1, 0, 1, loss=7.0)
    assert chair.run() == []
    assert job.store.list(keys.DECISIONS).entries == before.entries
    chair.run()
    assert job.keys_of("desk/votes/") == []


def test_a_step_that_cannot_be_committed_is_refused_with_the_reason() -> None:
    job, chair = eight()
    job.vote(0, 0, 1, loss=math.nan)
    chair.run()
    outcome = job.outcome(0)
    assert outcome is not None
    assert outcome.decision is None
    assert "loss is nan in step 0, micro-batch 0" in outcome.refusal


def test_the_rows_of_an_evaluation_are_collected_by_pipeline() -> None:
    job, chair = eight()
    for pipeline in (1, 0):
        rows = Ballot((), rows=(f"row of {pipeline}",))
        job.store.put(keys.vote(0, 0, (0, 0), pipeline), encode(rows))
    chair.run()
    assert job.outcome(0) == Outcome(rows=("row of 0", "row of 1"))
    assert not job.has(keys.PROGRESS)


def test_the_rendezvous_of_an_engine_goes_with_its_first_decision_under_a_plan() -> None:
    job, chair = eight()
    for scope in ("engine-0", "engine-1", "user"):
        job.store.put(keys.rendezvous((0, 0), scope) + "key", b"")
    job.vote(0, 0, 1)
    chair.run()
    assert job.keys_of("rdzv/") == ["rdzv/0.0/engine-1/key", "rdzv/0.0/user/key"]
    job.store.put(keys.rendezvous((0, 0), "engine-0") + "late", b"")
    job.vote(1, 0, 1)
    chair.run()
    assert job.has("rdzv/0.0/engine-0/late")


def test_a_ballot_that_nobody_can_read_ends_the_job_and_not_only_the_coordinator() -> None:
    job, chair = eight()
    job.vote(0, 0)
    job.store.put(keys.vote(0, 0, (0, 0), 1), b"gibberish")
    with pytest.raises(ConfigError, match="a ballot in the store is no JSON"):
        chair.run()


def test_progress_is_written_once_a_second_with_the_batch_size_of_the_config() -> None:
    job, chair = eight()
    job.store.put(keys.settings(0), encode(JobSettings(0, {"train_batch_size": "64"})))
    durations: list[float] = []
    chair.coordinator._commits._on_vote = durations.append
    for commit in range(9):
        job.vote(commit, 0, loss=commit + 1.0)
        chair.run()
        job.clock.advance(0.05)
        job.vote(commit, 1, loss=commit + 1.0)
        chair.run()
        job.clock.advance(0.2)
    entry = job.store.get(keys.PROGRESS)
    assert entry is not None
    progress = json.loads(entry.value)
    assert progress.pop("time") == pytest.approx(1000 + 8 * 0.25 + 0.05)
    assert progress == {
        "step": 9,
        "loss": 9.0,
        "step_seconds": pytest.approx(0.25),
        "samples_per_second": pytest.approx(256),
        "vote_seconds": pytest.approx(0.05),
    }
    assert len(durations) == 9
    written = [event for change in job.server._history for event in change if event.key.endswith(keys.PROGRESS)]
    assert len(written) == 3


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_the_job_is_finished_when_all_workers_of_the_plan_have_left() -> None:
    job, chair = eight()
    job.join("n8", 8)
    job.end(2)
    chair.run()
    job.leave(0, 1, 3, 4, 5, 6)
    chair.run()
    assert not job.has(keys.FINISHED)
    job.leave(7)
    assert chair.run() == ["finished"]
    entry = job.store.get(keys.FINISHED)
    assert entry is not None
    assert entry.value == b"all 7 worker(s) have ended in order"


def test_the_last_one_may_be_lost_after_all_others_have_left() -> None:
    job, chair = eight()
    job.leave(0, 1, 3, 4, 5, 6, 7)
    chair.run()
    job.end(2)
    assert chair.run() == ["failover", "finished"]


def test_a_script_that_makes_no_plan_finishes_too() -> None:
    job = with_start(3, 1e6)
    chair = job.elect()
    job.join("n0", 0, 1, 2)
    chair.run()
    job.leave(0)
    job.list_workers("n0", 1, 2)
    chair.run()
    assert not job.has(keys.FINISHED)
    job.end(1)
    job.leave(2)
    job.list_workers("n0")
    assert chair.run() == ["finished"]


@pytest.mark.parametrize("end", ["fail", "finish"])
def test_nothing_is_decided_once_the_job_is_over(end: str) -> None:
    job, chair = eight()
    if end == "fail":
        job.fail()
    else:
        job.store.put(keys.FINISHED, b"")
    job.vote(0, 0, 1)
    job.end(2, 4)
    job.lapse("n6")
    assert chair.run() == []
    assert job.plan.number == (0, 0)
    assert job.outcome(0) is None


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_events_tell_the_story_in_sentences() -> None:
    job, chair = eight(each=4)
    job.join("n2", 8, zone="eu-1a")
    chair.run()
    job.lapse("n1")
    chair.run()
    told = [(event.kind, event.node, event.text) for event in read_events(job.store)]
    assert told[0] == ("coordinator", "c0", "node c0 coordinates")
    assert ("node_joined", "n2", "node n2 has joined, in zone eu-1a, with worker(s) 8") in told
    assert ("roster", "c0", "worker(s) 0, 1, 2, 3, 4, 5, 6, 7 begin: 8 workers are ready, 8 were asked for") in told
    assert ("node_lost", "n1", "node n1 is gone") in told
    assert [kind for kind, _, _ in told][-3:] == ["worker_ready", "node_lost", "failover"]


def test_a_successor_does_not_tell_again_who_is_there() -> None:
    job, chair = eight()
    chair.die()
    successor = job.elect("c1")
    assert successor.run() == ["coordinator"]
    assert len(job.events("node_joined")) == 8


def test_a_successor_of_nobody_tells_who_is_there() -> None:
    job = Job()
    job.join("n0", 0)
    assert job.elect().run() == ["coordinator", "node_joined", "worker_ready"]


# ---- what is deleted -------------------------------------------------------------------------------------------------


def test_reports_and_answers_of_older_plans_are_deleted() -> None:
    job, chair = eight()
    job.report("2>4 4>2 3>5")
    chair.run()
    job.answer(*range(8))
    chair.run()
    job.report("6>0", number=(0, 0))  # from one that has not heard of the new plan
    chair.run()
    chair.run()
    assert job.plan.version == 1
    assert job.keys_of(keys.SUSPECTS, keys.ANSWERS) == []


def test_the_rendezvous_of_older_plans_goes_once_a_newer_one_has_decided() -> None:
    job, chair = eight()
    chair.die()
    chair = job.elect("c1")  # knows nothing of former plans
    numbers = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (11, 0)]
    for number in numbers:
        job.store.put(keys.rendezvous(number, "user") + "key", b"")
    job.store.put(keys.PLAN, encode(replace(job.plan, epoch=1, version=2)))
    chair.run()
    assert len(job.keys_of("rdzv/")) == 6
    job.vote(0, 0, 1)
    chair.run()
    assert job.keys_of("rdzv/") == ["rdzv/1.2/user/key", "rdzv/11.0/user/key"]


def test_the_keys_of_a_worker_are_kept_for_a_while_after_it_is_gone() -> None:
    job, chair = eight()
    job.join("n8", 8)
    chair.run()
    job.end(2)
    job.list_workers("n2")
    job.lapse("n8")
    job.leave(3)
    job.list_workers("n3")
    chair.run()
    job.advance(59)
    chair.run()
    assert {keys.ready(2), keys.ended(2), keys.ready(8)} <= set(job.keys_of("desk/"))
    assert chair.coordinator.seconds_to_next <= 1.0
    job.advance(1)
    chair.run()
    assert job.keys_of("desk/ended/") == []
    assert job.keys_of("desk/ready/") == [keys.ready(worker) for worker in (0, 1, 3, 4, 5, 6, 7)]
    assert job.keys_of("desk/left/") == [keys.left(3)], "it has its stage until the plan says otherwise"


def test_a_node_that_comes_back_in_time_finds_its_workers_known() -> None:
    job, chair = eight()
    job.join("n8", 8)
    chair.run()
    job.lapse("n8")
    chair.run()
    job.advance(50)
    job.join("n8", 8, ready=False)
    chair.run()
    job.advance(50)
    chair.run()
    assert 8 in chair.view.present


def test_the_store_does_not_grow_with_the_run() -> None:
    job, chair = eight()
    sizes = []
    for commit in range(300):
        job.vote(commit, 0, 1)
        chair.run()
        job.clock.advance(0.5)
        sizes.append(len(job.store.list("").entries))
    assert sizes[10] == sizes[-1]


def test_events_are_trimmed_to_the_newest() -> None:
    job, chair = eight()
    for number in range(1500):
        job.store.put(f"events/{number:020d}-x", b"{}")
    job.clock.advance(6)
    chair.run()
    left = 1500 + 20
    for _ in range(3):
        job.clock.advance(60)
        chair.run()
        assert len(job.keys_of("events/")) <= left
        left = len(job.keys_of("events/"))
    assert left == 1000
    assert job.events("plan"), "the newest stay"
