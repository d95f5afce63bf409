"""Reads etcd's errors: what certainly did not happen, what may have, and what to do about it.

When in doubt the answer is "may have happened". Only failures listed here are known to come before anything is written.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]

from bamboo_ds.errors import CompactedError, LeaseLostError, StoreError, StoreUnavailableError

__all__ = ["AlreadyGrantedError", "Failure", "Outcome", "read_failure"]


class Outcome(enum.Enum):
    """What a failed request came to."""

    REFUSED = "refused"  # did not happen, and would be refused again
    NOT_DONE = "not done"  # did not happen; another try or another server may do it
    STALE_TOKEN = "stale token"  # did not happen; log in again
    UNKNOWN = "unknown"  # may have happened


class AlreadyGrantedError(StoreError):
    """Report that the lease we ask for exists: an earlier try of ours was heard. Never leaves the adapter."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed request: what it came to, and the error to raise if nothing more can be done."""

    outcome: Outcome
    error: StoreError


_REMEDIES = {
    "user name is empty": "the server wants a login: give user and password",
    "authentication failed": "user or password is wrong",
    "permission denied": "grant the user's role readwrite on the prefix",
    "database space exceeded": "compact and defragment etcd, raise its quota, then disarm the alarm",
    "request is too large": "write less in one transaction (etcd: --max-request-bytes)",
    "larger than max": "write less in one transaction (etcd: --max-request-bytes)",
    "too many operations": "write less in one transaction (etcd: --max-txn-ops)",
}

_NOT_DONE = (
    "failed to connect to all addresses",  # gRPC, before it sends anything
    "no leader",  # etcd, before it proposes anything
    "too many requests",
)

_STALE_TOKEN = (
    "invalid auth token",
    "revision in header is old",
    "revision of auth store is old",
)

_REFUSED_CODES = {
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "PERMISSION_DENIED",
    "NOT_FOUND",
    "OUT_OF_RANGE",
    "RESOURCE_EXHAUSTED",
    "UNIMPLEMENTED",
    "UNAUTHENTICATED",
}


def read_failure(error: grpc.RpcError, *, what: str, server: str) -> Failure:
    """Return what a gRPC error means.

    Args:
        error: as raised by a call.
        what: was asked for; begins the message.
        server: that was asked.
    """
    code, details = _code_and_details(error)
    text = f"{what}: etcd at {server}: {details or code} ({code})"
    if any(part in details for part in _STALE_TOKEN):
        return Failure(Outcome.STALE_TOKEN, StoreError(text))
    if any(part in details for part in _NOT_DONE):
        return Failure(Outcome.NOT_DONE, StoreUnavailableError(text))
    if code in _REFUSED_CODES:
        return Failure(Outcome.REFUSED, _refusal(details, text))
    return Failure(Outcome.UNKNOWN, StoreUnavailableError(text))


def _refusal(details: str, text: str) -> StoreError:
    if "requested lease not found" in details:
        return LeaseLostError(f"{text}: nothing was written; take a new lease")
    if "lease already exists" in details:
        return AlreadyGrantedError(text)
    if "has been compacted" in details:
        return CompactedError(text)
    for part, remedy in _REMEDIES.items():
        if part in details:
            return StoreError(f"{text}; {remedy}")
    return StoreError(text)


def _code_and_details(error: Any) -> tuple[str, str]:
    """Return code and details of an error; those of a channel that was closed under a call have neither."""
    code = error.code() if hasattr(error, "code") else None
    details = error.details() if hasattr(error, "details") else str(error)
    return (code.name if code is not None else "UNKNOWN"), details or ""
