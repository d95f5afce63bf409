"""Deliberate faults (`bamboo.fault_injection`): shows a user what a job does when a worker dies at a given moment."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence

from bamboo_ds.config import Fault
from bamboo_ds.elastic.namespaces import cut_own_link
from bamboo_ds.plan import Place

_log = logging.getLogger(__name__)  # DeepSpeed's is quiet on all workers but one


class FaultInjector:
    """Carries out the faults that are meant for this worker.

    Args:
        faults: of the whole job.
        worker: id of this worker.
        home: its place in the first plan; None if it had none. Whoever comes to that place later is another one.
    """

    def __init__(self, faults: Sequence[Fault], *, worker: int, home: Place | None) -> None:
        wanted = (worker, None, None) if home is None else (worker, home.pipeline, home.stage)
        self._faults = {
            (fault.step, fault.instruction): fault
            for fault in faults
            if all(given in (None, own) for given, own in zip(_target(fault), wanted, strict=True))
        }

    def before(self, *, step: int, instruction: int) -> None:
        """Do what is asked for before the instruction of an index in a step."""
        if self._faults and (fault := self._faults.pop((step, instruction), None)) is not None:
            _log.warning("fault injection: %s before instruction %d of step %d", fault.how, instruction, step)
            _carry_out(fault)


def _carry_out(fault: Fault) -> None:
    """Do it.

    Raises:
        ConfigError: the node has no link of its own to cut.
    """
    if fault.how == "cut":
        cut_own_link()
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)


def _target(fault: Fault) -> tuple[int | None, int | None, int | None]:
    return fault.worker, fault.pipeline, fault.stage
