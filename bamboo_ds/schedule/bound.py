"""The least that eager redundancy for every micro-batch can cost: a lower bound from the free windows.

Derivation. All workers keep the 1F1B order of their forwards and backwards. So however redundant forwards (FRC) are
placed, no operation starts before its start in the step without redundancy (more work never makes anything earlier),
and after an operation at least its *tail* follows: the longest chain of later operations up to the end of the step.

Now look at one stage alone, as if no other stage ran an FRC, and even let its FRCs be split at will. Its worker does
one thing at a time, so the best it can do is to run each FRC in idle time once its source exists, the earliest deadline
first, and what is left of it when its own backward is due in line, right then: any other way leaves idle time unused or
gives it to an FRC that is due later, so no operation can end earlier than this. The step lasts at least

    max over stages s, operations o of s:  end_s(o) + tail(o)

With equal costs this is the step without redundancy plus, for the worst stage, the cost of those FRCs that find no free
window before their deadline. On the last stage, whose only windows are before its first forward, these are
M - (P-1) x f / r; with b = 2f and r = f, P = 4, M = 8 that makes 33 + 5 of 33.
"""

from __future__ import annotations

from collections.abc import Iterator

from bamboo_ds.schedule.costs import StageCosts
from bamboo_ds.schedule.operations import Kind, Operation
from bamboo_ds.schedule.timing import Event, Timeline


def least_eager_seconds(plain: Timeline, costs: StageCosts) -> float:
    """Return a lower bound of the step time with a redundant forward of every micro-batch on every stage.

    Args:
        plain: The step without redundancy under these costs.
        costs: Seconds per operation of every stage; at least two stages.
    """
    tails = _tails(plain, last_stage=costs.stages - 1)
    ends = (
        end + tails[operation]
        for stage, events in plain.events.items()
        for operation, end in _relaxed_ends(stage, events, costs)
    )
    return max(plain.step_seconds, *ends)


def _tails(plain: Timeline, *, last_stage: int) -> dict[Operation, float]:
    """Return for each operation the longest chain of operations that must follow it, in seconds."""
    tails: dict[Operation, float] = {}
    events = [
        (event, follower)
        for own in plain.events.values()
        for event, follower in zip(own, (*own[1:], None), strict=True)
    ]
    seconds = {event.operation: event.finish_seconds - event.start_seconds for event, _ in events}
    # Costs are above zero, so whatever follows an operation starts later.
    for event, follower in sorted(events, key=lambda pair: pair[0].start_seconds, reverse=True):
        following = [] if follower is None else [follower.operation]
        following += _readers(event.operation, last_stage)
        tails[event.operation] = max((seconds[o] + tails[o] for o in following), default=0.0)
    return tails


def _readers(operation: Operation, last_stage: int) -> list[Operation]:
    """Return the operation of another worker that reads the result."""
    kind, stage, micro_batch = operation
    if kind is Kind.FORWARD:
        return [Operation(kind, stage + 1, micro_batch)] if stage < last_stage else []
    return [Operation(kind, stage - 1, micro_batch)] if stage > 0 else []


def _relaxed_ends(stage: int, events: tuple[Event, ...], costs: StageCosts) -> Iterator[tuple[Operation, float]]:
    """Yield the earliest end of each operation of one stage that runs all its redundant forwards, splitting them."""
    micro_batches = len(events) // 2
    left = [costs.redundant[stage]] * micro_batches
    sourced = micro_batches if stage == costs.stages - 1 else 0
    now = 0.0
    for (kind, _, micro_batch), start, finish in events:
        for candidate in range(sourced):
            spent = min(left[candidate], max(start - now, 0.0))
            left[candidate] -= spent
            now += spent
        now = max(now, start)
        if kind is Kind.BACKWARD:
            now += left[micro_batch]
            left[micro_batch] = 0.0
        elif stage < costs.stages - 1:
            sourced = micro_batch + 1
        now += finish - start
        yield Operation(kind, stage, micro_batch), now
