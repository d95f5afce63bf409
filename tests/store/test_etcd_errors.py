"""Definite or not: what each error of etcd and gRPC means."""

from __future__ import annotations

import grpc
import pytest

from bamboo_ds.errors import CompactedError, LeaseLostError, StoreError, StoreUnavailableError
from bamboo_ds.store.etcd_errors import AlreadyGrantedError, Outcome, read_failure


class Error(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


CODE = grpc.StatusCode

CASES = [
    (CODE.UNAVAILABLE, "failed to connect to all addresses; last error: …", Outcome.NOT_DONE, StoreUnavailableError),
    (CODE.UNAVAILABLE, "etcdserver: no leader", Outcome.NOT_DONE, StoreUnavailableError),
    (CODE.RESOURCE_EXHAUSTED, "etcdserver: too many requests", Outcome.NOT_DONE, StoreUnavailableError),
    (CODE.UNAVAILABLE, "Socket closed", Outcome.UNKNOWN, StoreUnavailableError),
    (CODE.UNAVAILABLE, "etcdserver: leader changed", Outcome.UNKNOWN, StoreUnavailableError),
    (CODE.UNAVAILABLE, "etcdserver: request timed out", Outcome.UNKNOWN, StoreUnavailableError),
    (CODE.DEADLINE_EXCEEDED, "Deadline Exceeded", Outcome.UNKNOWN, StoreUnavailableError),
    (CODE.UNKNOWN, "raft: stopped", Outcome.UNKNOWN, StoreUnavailableError),
    (CODE.CANCELLED, "", Outcome.UNKNOWN, StoreUnavailableError),
    (CODE.UNAUTHENTICATED, "etcdserver: invalid auth token", Outcome.STALE_TOKEN, StoreError),
    (CODE.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", Outcome.STALE_TOKEN, StoreError),
    (CODE.PERMISSION_DENIED, "etcdserver: permission denied", Outcome.REFUSED, StoreError),
    (CODE.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", Outcome.REFUSED, StoreError),
    (CODE.INVALID_ARGUMENT, "etcdserver: too many operations in txn request", Outcome.REFUSED, StoreError),
    (CODE.NOT_FOUND, "etcdserver: requested lease not found", Outcome.REFUSED, LeaseLostError),
    (CODE.FAILED_PRECONDITION, "etcdserver: lease already exists", Outcome.REFUSED, AlreadyGrantedError),
    (CODE.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted", Outcome.REFUSED, CompactedError),
]


@pytest.mark.parametrize(("code", "details", "outcome", "error"), CASES, ids=[case[1] or "cancelled" for case in CASES])
def test_each_error_is_read_as_what_it_means(
    code: grpc.StatusCode, details: str, outcome: Outcome, error: type[StoreError]
) -> None:
    failure = read_failure(Error(code, details), what="put 'x'", server="h:1")
    assert failure.outcome is outcome
    assert type(failure.error) is error
    assert str(failure.error).startswith("put 'x': etcd at h:1: ")
    assert details in str(failure.error)


def test_an_error_without_a_code_is_indefinite() -> None:
    assert read_failure(grpc.RpcError("?"), what="put", server="h:1").outcome is Outcome.UNKNOWN
