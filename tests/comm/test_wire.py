"""A header survives the wire whatever tensors it describes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bamboo_ds.comm.links import make_message
from bamboo_ds.comm.wire import _DTYPES, HEADER_BYTES, Address, Header, Kind, TensorMeta, decode, encode, overflow_bytes
from bamboo_ds.errors import ScheduleError

METAS = st.builds(
    TensorMeta,
    dtype=st.sampled_from(_DTYPES),
    shape=st.lists(st.integers(0, 2**40), max_size=8).map(tuple),
    requires_grad=st.booleans(),
)
ADDRESSES = st.builds(
    Address,
    kind=st.sampled_from(Kind),
    epoch=st.integers(0, 2**31 - 1),
    attempt=st.integers(0, 2**31 - 1),
    step=st.integers(-(2**62), 2**62),
    stage=st.integers(0, 1000),
    micro_batch=st.integers(0, 10**6),
)


def there_and_back(header: Header) -> Header:
    head, overflow = encode(header)
    assert len(head) == HEADER_BYTES
    assert overflow_bytes(bytes(head)) == len(overflow)
    return decode(bytes(head), bytes(overflow))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ADDRESSES, st.booleans(), st.integers(0, 2**32), st.lists(METAS, max_size=60).map(tuple))
def test_any_header_survives(address: Address, is_tuple: bool, digest: int, tensors: tuple[TensorMeta, ...]) -> None:
    header = Header(address=address, is_tuple=is_tuple, digest=digest, tensors=tensors)
    assert there_and_back(header) == header


PLACE = Address(kind=Kind.ACTIVATION, epoch=0, attempt=0, step=0, stage=1, micro_batch=0)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_size_and_shape_of_every_dtype_are_told(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape, dtype=dtype)
    meta = make_message(PLACE, [tensor], is_tuple=False, requires_grad=[False]).header.tensors[0]
    assert (meta.dtype, meta.shape, meta.bytes) == (dtype, shape, tensor.numel() * tensor.element_size())


def test_a_long_tuple_needs_a_second_part_and_a_short_one_does_not() -> None:
    def overflow_of(count: int) -> int:
        tensors = (TensorMeta(dtype=torch.float32, shape=(2, 3), requires_grad=True),) * count
        return len(encode(Header(address=PLACE, is_tuple=True, digest=0, tensors=tensors))[1])

    assert overflow_of(5) == 0
    assert overflow_of(50) > 0


def test_a_dtype_without_a_number_is_named() -> None:
    meta = TensorMeta(dtype=torch.quint8, shape=(), requires_grad=False)
    with pytest.raises(ScheduleError, match=r"torch.quint8 cannot pass between stages; supported: torch.float32"):
        encode(Header(address=PLACE, is_tuple=False, digest=0, tensors=(meta,)))


def test_what_is_no_header_is_refused() -> None:
    with pytest.raises(ScheduleError, match="disagree on the protocol"):
        decode(bytes(HEADER_BYTES))


def test_a_message_holds_values_apart_from_the_graph_and_in_rows() -> None:
    """A shadow and the receiver must compute on the same memory layout, or kernels may round differently."""
    value = torch.randn(3, 4, requires_grad=True)
    message = make_message(
        PLACE, [value.t(), value.to(torch.complex64).conj()], is_tuple=True, requires_grad=[True, True]
    )
    assert all(part.is_contiguous() and not part.requires_grad and not part.is_conj() for part in message.tensors)
    assert torch.equal(message.tensors[0], value.detach().t())
    assert torch.equal(message.tensors[1].real, value.detach())
