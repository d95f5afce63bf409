"""The errors Bamboo raises. Each class says what the caller should do next.

::

    Exception
     +-- BambooError                  everything below; catch this to catch all of ours
          +-- ConfigError             fix the config file or the arguments  (also a ValueError)
          |    +-- UnsupportedFeatureError   asks for something Bamboo refuses by name: leave it out
          +-- InfeasiblePlanError     this number of workers does not fit the job: wait for nodes, or ask for less
          +-- ScheduleError           an order of work that cannot run: our bug, please report it
          +-- PeerLostError           a link to a peer broke or timed out: look at the peer, it failed first
          +-- DataExhaustedError      the data ended inside a step: stop, or repeat the loader (also a StopIteration)
          +-- DataMismatchError       the first and last stage hold different samples: make their loaders agree
          +-- NonFiniteLossError      a loss is NaN or infinite: look at the named step and micro-batch
          +-- EngineStoppedError      the engine failed before and was used again: make a new one
          +-- PlanChangedError        the cluster has a newer plan than the one waited under: go on under that one
          +-- StateLostError          layers that nobody has, and no checkpoint: start again from one of your own
          +-- EvictedError            the cluster declared this worker dead: stop at once, write nothing more
          +-- RefusedError            this worker's model or config is not the job's: make them equal
          +-- StoreError              the cluster's store refused: the message says what to change
               +-- ConflictError           did not happen, someone else was first: read again, then decide anew
               +-- StoreUnavailableError   may have happened: read back before you do it again
               +-- LeaseLostError          did not happen, the lease is over: stop what rests on it, take a new lease
               +-- CompactedError          the history asked for is gone: list again, watch from that revision on

A message carries the offending values and the remedy. Every constructor takes the message only, so that an error
survives pickling on its way from a worker to whoever reports it. This module imports nothing: every room may use it.
"""

from __future__ import annotations

__all__ = [
    "BambooError",
    "CompactedError",
    "ConfigError",
    "ConflictError",
    "DataExhaustedError",
    "DataMismatchError",
    "EngineStoppedError",
    "EvictedError",
    "InfeasiblePlanError",
    "LeaseLostError",
    "NonFiniteLossError",
    "PeerLostError",
    "PlanChangedError",
    "RefusedError",
    "ScheduleError",
    "StateLostError",
    "StoreError",
    "StoreUnavailableError",
    "UnsupportedFeatureError",
]


class BambooError(Exception):
    """Base of every error that Bamboo raises on purpose."""


class ConfigError(BambooError, ValueError):
    """Report a config or an argument that cannot be right: the user fixes the file.

    The message names the key, the value found and what is allowed.
    """


class UnsupportedFeatureError(ConfigError):
    """Refuse, by name and at start, a DeepSpeed feature that Bamboo does not support (yet)."""


class InfeasiblePlanError(BambooError):
    """Report that no plan fits this number of workers: wait for nodes, or ask for fewer stages or pipelines."""


class ScheduleError(BambooError):
    """Report an order of work that would deadlock, lose or repeat something: a bug of Bamboo, never of the user."""


class PeerLostError(BambooError):
    """Report a link that broke or timed out; the message describes the peer.

    It is the consequence of a failure elsewhere: a launcher's report should show the peer's own error first.
    """


class DataExhaustedError(BambooError, StopIteration):
    """Report that the data ended inside a step; the message says which step and after how many micro-batches.

    It is a ``StopIteration`` too, which is what DeepSpeed lets through in the same place.
    """


class DataMismatchError(BambooError):
    """Report that the first and the last stage of a pipeline drew different samples for one micro-batch."""


class NonFiniteLossError(BambooError):
    """Report a loss that is NaN or infinite; the message holds step, micro-batch and value."""


class EngineStoppedError(BambooError):
    """Report the use of an engine after a failure left it without a valid state."""


class PlanChangedError(BambooError):
    """Report a wait that ended because the plan it waited under was replaced; the message says by which, and why."""


class StateLostError(BambooError):
    """Report layers that no live worker has and no checkpoint gives back; the message names them."""


class EvictedError(BambooError):
    """Report that the plan calls this worker dead: it stops at once, and sends, votes and writes nothing more.

    The others train on without it. Its agent may start another worker, under another id.
    """


class RefusedError(BambooError):
    """Report a worker that the job does not take, as its model or config differs; the job goes on without it."""


class StoreError(BambooError):
    """Report a request that the cluster's store refused: it did not happen, and would be refused again as it is."""


class ConflictError(StoreError):
    """Report a write whose condition did not hold: a definite failure, nothing was written.

    The message names the key, the revision expected and the one found. A fenced write fails with it as soon as
    another candidate may lead.
    """


class StoreUnavailableError(StoreError):
    """Report a store that did not answer in time: an indefinite failure, a write may or may not have happened.

    Read back before you repeat a write. The store itself stays usable, and goes on when its servers come back.
    """


class LeaseLostError(StoreError):
    """Report a lease that ran out or was revoked: a definite failure, nothing was written."""


class CompactedError(StoreError):
    """Report a watch whose next events are no longer in the store's history: list again and watch from there."""
