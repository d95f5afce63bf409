"""Since when this process has heard the store without a break, which decides how much a silence means.

When the store was out of reach for a time, leases may have ended though their holders live: they could not renew them.
They take new ones as soon as they can. So for one TTL after a break, a node's absence proves nothing.

Without a break it does, at once. Above all to a coordinator that was elected a moment ago, as its predecessor's node
died: that node's lease has ended like any other, and whoever was elected heard the store all the time while it stood
for election. Only a process that began to listen less than a TTL ago cannot know, and waits until it can.

A break is noticed in two ways. A request or a watch fails; or our own lease, renewed every third of its time, has less
than half of it left, which means that a renewal failed. A break that ends the leases of others lasts two thirds of
their time at least (that much every lease has left when it begins), and leaves ours a third at most: if we look often
enough, none goes unnoticed. That we ourselves slept counts as a break, too, as we do not know what happened meanwhile.
"""

from __future__ import annotations

from bamboo_ds.clock import Clock
from bamboo_ds.store import Lease

__all__ = ["Hearing"]

_LONGEST_GAP_SECONDS = 1.0  # between two looks, that is no break however short the lease is


class Hearing:
    """How long this process has heard the store.

    Args:
        clock: of the store.
        ttl_seconds: how long agents have to come back after a break.

    Attributes:
        breaks: how often what was certain became uncertain.
    """

    def __init__(self, clock: Clock, *, ttl_seconds: float) -> None:
        self._clock, self._ttl_seconds = clock, ttl_seconds
        self._since = self._looked_at = clock.now()
        self.breaks = 0

    @property
    def certain(self) -> bool:
        """Whether what is gone as its lease ended is gone because nobody renewed it, not because nobody could."""
        return self.seconds_to_certainty <= 0

    @property
    def seconds_to_certainty(self) -> float:
        """How long an absence proves nothing yet."""
        return max(self._since + self._ttl_seconds - self._clock.now(), 0.0)

    def lost(self) -> None:
        """Note that the store does not answer, or did not until now."""
        self.breaks += self.certain
        self._since = self._looked_at = self._clock.now()

    def look(self, lease: Lease) -> None:
        """Look whether our own lease is renewed as it should be; every sixth of its time, or more often."""
        gap = self._clock.now() - self._looked_at
        if gap > max(lease.ttl_seconds / 2, _LONGEST_GAP_SECONDS) or lease.remaining_seconds <= lease.ttl_seconds / 2:
            self.lost()
        self._looked_at = self._clock.now()
