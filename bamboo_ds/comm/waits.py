"""How the waits of a network end: on what they wait for, at the deadline, or with news of the plan.

In a fixed job nothing but a failure ends a wait early, and gloo does the waiting. In a cluster a newer plan must end it
within milliseconds, while the group goes on for those whom the change does not concern. So there the end of gloo's work
wakes the waiting thread, and so does news. A wait that news has ended may be taken up again: the work is still under
way. A broken link is no error yet but a reason to wait for what the cluster makes of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from bamboo_ds.errors import PeerLostError

_LOOK_SECONDS = 0.25  # in case news comes without a wake-up
_AT_ONCE = timedelta(milliseconds=1)


class Waits:
    """The way in which all waits of one network end.

    Args:
        check: raises when the plan has changed, or another worker has failed.
        timeout_seconds: the one time-out.
        elastic: whether the plan may change.
    """

    def __init__(self, *, check: Callable[[], None], timeout_seconds: float, elastic: bool = False) -> None:
        self.check, self.timeout_seconds, self.elastic = check, timeout_seconds, elastic
        self._changed = threading.Condition()

    @property
    def timeout(self) -> timedelta:
        """The one time-out."""
        return timedelta(seconds=self.timeout_seconds)

    def wake(self) -> None:
        """Let all waits look at the news."""
        with self._changed:
            self._changed.notify_all()

    def finish(self, work: Any) -> None:
        """Wait for a collective of gloo.

        Raises:
            RuntimeError: it broke, or did not end in time.
            BambooError: of `check`; the collective is still under way, and may be waited for again.
        """
        if self.elastic and not self._ended_in_time(work):
            work.wait(_AT_ONCE)  # raises, and ends the group: after a time-out nobody knows what its members hold
        work.wait(self.timeout)

    def _ended_in_time(self, work: Any) -> bool:
        deadline, ended = time.monotonic() + self.timeout_seconds, False

        def end(_: Any) -> None:
            nonlocal ended
            ended = True  # torch calls this shortly before the work itself says so
            self.wake()

        if not work.is_completed():
            work.get_future().add_done_callback(end)
        with self._changed:
            while not (ended or work.is_completed()):
                self.check()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._changed.wait(min(remaining, _LOOK_SECONDS))
        return True

    def lose(self, error: PeerLostError, *, within_seconds: float | None = None) -> NoReturn:
        """End a wait on a link that broke: with what the cluster says of it, or the error itself.

        Args:
            error: to raise in a fixed job, or when the cluster says nothing in time.
            within_seconds: how long the cluster has to say something; the time-out if None.
        """
        seconds = self.timeout_seconds if within_seconds is None else within_seconds
        deadline = time.monotonic() + seconds
        with self._changed:
            while self.elastic and (remaining := deadline - time.monotonic()) > 0:
                self.check()
                self._changed.wait(min(remaining, _LOOK_SECONDS))
        raise error
