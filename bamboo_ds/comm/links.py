"""Links: one directed edge between two workers, for activations (stage s to s+1) or gradients (s+1 to s).

Sends never block the schedule: the bytes leave in the background, and what was sent stays referenced until the step
commits (the *journal*). A receiver thread per inbound link feeds a queue, so a transfer overlaps the computation, and
the engine's wait for a message can end when the plan changes: it abandons link and thread. Tensors travel through
host memory; on an accelerator they are staged there, where the journal wants them anyway.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from bamboo_ds.comm.groups import Group, reason_of
from bamboo_ds.comm.wire import HEADER_BYTES, Address, Header, TensorMeta, decode, encode, overflow_bytes
from bamboo_ds.errors import BambooError, PeerLostError, ScheduleError

_FOREVER = timedelta(days=3650)
_LOOK_SECONDS = 0.25  # between two looks at the plan while a wait lasts; shorter waits never look
_JOIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Message:
    """What one stage hands to the next for one micro-batch.

    Attributes:
        header: address, and dtype and shape of each tensor.
        tensors: the tensors, in host memory when received.
    """

    header: Header
    tensors: tuple[torch.Tensor, ...]


def make_message(
    address: Address, tensors: Sequence[torch.Tensor], *, is_tuple: bool, requires_grad: Sequence[bool], digest: int = 0
) -> Message:
    """Build a message of tensors on any device, laid out as the receiver will see them.

    A shadow computes from its own copy of a message what the receiver computes from the received one. On another
    memory layout the same kernel may round otherwise, so views are resolved here, for both.
    """
    metas = tuple(
        TensorMeta(dtype=tensor.dtype, shape=tuple(tensor.shape), requires_grad=needs)
        for tensor, needs in zip(tensors, requires_grad, strict=True)
    )
    header = Header(address=address, is_tuple=is_tuple, digest=digest, tensors=metas)
    return Message(header=header, tensors=tuple(_resolved(tensor) for tensor in tensors))


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the same values; the same one where it is contiguous already."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes in host memory."""
    return tensor.cpu().reshape(-1).view(torch.uint8)


class OutboundLink:
    """The sending end of a link."""

    def __init__(self, group: Group, *, peer: str) -> None:
        self._group, self._peer = group, peer
        self._journal: list[tuple[Message, list[tuple[torch.Tensor, Any]]]] = []

    def send(self, message: Message) -> None:
        """Send without waiting; the message stays in the journal until `forget`.

        Raises:
            PeerLostError: the link is broken.
        """
        head, overflow = encode(message.header)
        parts = [torch.frombuffer(head, dtype=torch.uint8)]
        if overflow:
            parts.append(torch.frombuffer(overflow, dtype=torch.uint8))
        parts += [_raw(tensor) for tensor in message.tensors if tensor.numel()]
        try:
            works = [(part, self._group.handle.send([part], 1 - self._group.rank, 0)) for part in parts]
        except RuntimeError as error:
            raise _lost(self._peer, error) from error
        self._journal.append((message, works))

    def journal(self) -> list[Message]:
        """Return what was sent in this step, oldest first."""
        return [message for message, _ in self._journal]

    def forget(self, timeout: timedelta) -> None:
        """Drop the journal: the step has committed, so the peer has received everything.

        Raises:
            PeerLostError: it has not, within `timeout`.
        """
        journal, self._journal = self._journal, []
        for _, works in journal:
            for _, work in works:
                try:
                    work.wait(timeout)
                except RuntimeError as error:
                    raise _lost(self._peer, error) from error

    def close(self) -> None:
        """End the link; the peer's receiver raises at once."""
        self._journal = []
        self._group.close()


class InboundLink:
    """The receiving end of a link, with its receiver thread."""

    def __init__(self, group: Group, *, peer: str, timeout_seconds: float, check: Callable[[], None]) -> None:
        self._group, self._peer, self._timeout_seconds, self._check = group, peer, timeout_seconds, check
        self._arrived: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._receive_all, name=f"bamboo-{group.name}", daemon=True)
        self._thread.start()

    def receive(self, address: Address) -> Message:
        """Wait for the next message, which must be the one at `address`.

        Raises:
            PeerLostError: the peer is gone, or silent for longer than the time-out.
            ScheduleError: another message came.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            try:
                arrived = self._arrived.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                self._check()
                if time.monotonic() > deadline:
                    raise PeerLostError(
                        f"{self._peer} sent nothing for {self._timeout_seconds:g} s (waited for {_describe(address)}); "
                        "if it is only slow, raise bamboo.timeout_seconds"
                    ) from None
                continue
            return self._accept(arrived, address)

    def _accept(self, arrived: Message | Exception, address: Address) -> Message:
        if isinstance(arrived, Exception):
            self._arrived.put(arrived)  # every later wait fails alike
            raise arrived if isinstance(arrived, BambooError) else _lost(self._peer, arrived)
        if arrived.header.address != address:
            raise ScheduleError(
                f"{self._peer} sent {_describe(arrived.header.address)} where {_describe(address)} was due"
            )
        return arrived

    def _receive_all(self) -> None:
        try:
            handle = self._group.handle
            while not self._closing:
                self._arrived.put(self._receive_one(handle))
        except Exception as error:  # whatever it is, the engine must hear of it rather than wait
            self._arrived.put(error)

    def _receive_one(self, handle: Any) -> Message:
        head = self._pull(handle, HEADER_BYTES, _FOREVER)
        rest = overflow_bytes(head.numpy().tobytes())
        timeout = timedelta(seconds=self._timeout_seconds)
        overflow = self._pull(handle, rest, timeout).numpy().tobytes() if rest else b""
        header = decode(head.numpy().tobytes(), overflow)
        return Message(
            header=header, tensors=tuple(self._pull_tensor(handle, meta, timeout) for meta in header.tensors)
        )

    def _pull_tensor(self, handle: Any, meta: TensorMeta, timeout: timedelta) -> torch.Tensor:
        if not meta.bytes:
            return torch.empty(meta.shape, dtype=meta.dtype)
        return self._pull(handle, meta.bytes, timeout).view(meta.dtype).view(meta.shape)

    def _pull(self, handle: Any, size: int, timeout: timedelta) -> torch.Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        handle.recv([buffer], 1 - self._group.rank, 0).wait(timeout)
        return buffer

    def close(self) -> None:
        """End the link and its thread."""
        self._closing = True
        self._group.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)


def _lost(peer: str, error: Exception) -> PeerLostError:
    return PeerLostError(f"the link to {peer} broke: {reason_of(error)}")


def _describe(address: Address) -> str:
    return (
        f"{address.kind.name.lower()} of micro-batch {address.micro_batch} for stage {address.stage} "
        f"(step {address.step}, plan {address.epoch}.{address.version})"
    )
