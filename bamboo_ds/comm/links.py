"""Links: one directed edge between two workers, for activations (stage s to s+1) or gradients (s+1 to s).

Sends never block the schedule: the bytes leave in the background, and what was sent stays referenced until the step
commits (the *journal*), from which it can be sent again to whoever takes the receiver's place. A receiver thread per
inbound link feeds a queue, so a transfer overlaps the computation, and the engine's wait for a message can end when the
plan changes: it abandons link and thread. Tensors travel through host memory; on an accelerator they are staged there,
where the journal wants them anyway.

A sender that ends in order says goodbye, so its receiver can tell that from a broken link, which it reports at once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import torch

from bamboo_ds.comm.groups import Group
from bamboo_ds.comm.waits import Waits
from bamboo_ds.comm.wire import HEADER_BYTES, Address, Header, Kind, TensorMeta, decode, encode, overflow_bytes
from bamboo_ds.errors import BambooError, PeerLostError, ScheduleError
from bamboo_ds.world.gloo import reason_of

_FOREVER = timedelta(days=3650)
_LOOK_SECONDS = 0.25  # between two looks at the plan while a wait lasts; shorter waits never look
_JOIN_SECONDS = 2.0
_LEFT = timedelta(seconds=2)  # the peer has received it, so it has left long ago; or the peer is dead
_FAREWELL_SECONDS = 2.0  # in which the cluster mostly knows why a peer has ended in order


class _Sign(Enum):
    """What may lie in the queue of an inbound link besides messages and errors."""

    WAKE = "look at the news"
    GOODBYE = "the peer has ended in order"


@dataclass(frozen=True, slots=True)
class Message:
    """What one stage hands to the next for one micro-batch.

    Attributes:
        header: address, and dtype and shape of each tensor.
        tensors: the tensors, in host memory when received.
    """

    header: Header
    tensors: tuple[torch.Tensor, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(meta.bytes for meta in self.header.tensors)


@dataclass(frozen=True, slots=True)
class Held:
    """How many messages of a step (of one attempt at it) a receiver has, read or not."""

    step: int = 0
    attempt: int = 0
    count: int = 0


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
    """The sending end of a link.

    Args:
        group: of the two ends.
        peer: the other end, for messages.
        waits: how waits end.
        journal: what a former link to this stage has sent in this step.
    """

    def __init__(self, group: Group, *, peer: str, waits: Waits, journal: Sequence[Message] = ()) -> None:
        self._group, self._peer, self._waits = group, peer, waits
        self._journal: list[tuple[Message, list[tuple[torch.Tensor, Any]]]] = [(message, []) for message in journal]
        self._goodbye: tuple[torch.Tensor, Any] | None = None

    def send(self, message: Message) -> None:
        """Send without waiting; the message stays in the journal until `forget`.

        Raises:
            PeerLostError: the link is broken, in a fixed job. In a cluster another worker takes the receiver's place,
                and the journal is for that one.
        """
        self._journal.append((message, self._start_all(message)))

    def resend(self, held: Held) -> int:
        """Send what the journal holds beyond what the receiver has; return how many bytes of tensors that is.

        A stage sends in the order of micro-batches, so the receiver has the first ones, whoever sent them: a worker
        that took the stage over has begun its journal with the first one that was missing then.
        """
        sent = 0
        for message, works in self._journal:
            address = message.header.address
            known = held.count if (held.step, held.attempt) == (address.step, address.attempt) else 0
            if address.micro_batch >= known:
                works += self._start_all(message)
                sent += message.bytes
        return sent

    def _start_all(self, message: Message) -> list[tuple[torch.Tensor, Any]]:
        head, overflow = encode(message.header)
        parts = [torch.frombuffer(head, dtype=torch.uint8)]
        if overflow:
            parts.append(torch.frombuffer(overflow, dtype=torch.uint8))
        parts += [_raw(tensor) for tensor in message.tensors if tensor.numel()]
        try:
            return [(part, self._start(part)) for part in parts]
        except (RuntimeError, PeerLostError) as error:
            if self._waits.elastic:
                return []
            raise error if isinstance(error, PeerLostError) else _lost(self._peer, error) from error

    def _start(self, part: torch.Tensor) -> Any:
        return self._group.handle.send([part], 1 - self._group.rank, 0)

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
                    work.wait(min(timeout, _LEFT) if self._waits.elastic else timeout)
                except RuntimeError as error:
                    if not self._waits.elastic:
                        raise _lost(self._peer, error) from error

    def say_goodbye(self) -> None:
        """Tell the peer that nothing more will come; `close` waits for it to leave."""
        address = Address(kind=Kind.GOODBYE, epoch=0, attempt=0, step=0, stage=0, micro_batch=0)
        head, _ = encode(Header(address=address, is_tuple=False, digest=0, tensors=()))
        part = torch.frombuffer(head, dtype=torch.uint8)
        with contextlib.suppress(RuntimeError, PeerLostError):
            self._goodbye = part, self._start(part)

    def close(self, *, within_seconds: float = 0.0) -> None:
        """End the link; the peer's receiver raises at once.

        Args:
            within_seconds: how long a goodbye may take to leave.
        """
        if self._goodbye is not None:
            with contextlib.suppress(RuntimeError):
                self._goodbye[1].wait(timedelta(seconds=max(within_seconds, 0.001)))
        self._journal, self._goodbye = [], None
        self._group.close()


class InboundLink:
    """The receiving end of a link, with its receiver thread.

    Args:
        group: of the two ends.
        peer: the other end, for messages.
        waits: how waits end.
        on_broken: called from the receiver thread, with what was seen, when the link breaks and neither end has closed
            it.
        carried: messages of a former link to this stage that were not read yet.
        held: how many messages of the step that one had received.

    Attributes:
        broken: what was seen when the link broke; empty while it is whole, and when either end has closed it.
    """

    def __init__(
        self,
        group: Group,
        *,
        peer: str,
        waits: Waits,
        on_broken: Callable[[str], None],
        carried: Sequence[Message] = (),
        held: Held | None = None,
    ) -> None:
        self._group, self._peer, self._waits, self._on_broken = group, peer, waits, on_broken
        self._unread, self._held = deque(carried), held or Held()
        self._arrived: queue.SimpleQueue[Message | Exception | _Sign] = queue.SimpleQueue()
        self._closing, self.broken = False, ""
        self._thread = threading.Thread(target=self._receive_all, name=f"bamboo-{group.name}", daemon=True)
        self._thread.start()

    def receive(self, address: Address) -> Message:
        """Wait for the next message, which must be the one at `address`.

        Raises:
            PeerLostError: the peer is gone, or silent for longer than the time-out.
            ScheduleError: another message came.
            PlanChangedError: there is a newer plan, in a cluster.
        """
        deadline = time.monotonic() + self._waits.timeout_seconds
        while True:
            message = self._next(address, deadline)
            if self._is_due(message.header.address, address):
                return message
            if message.header.address.attempt > address.attempt:
                # The peer has begun the evaluation anew already; news of why is on its way.
                self._unread.appendleft(message)
                self._waits.lose(PeerLostError(f"{self._peer} began an evaluation anew, and the plan has not changed"))

    def _is_due(self, arrived: Address, due: Address) -> bool:
        """Return whether a message is the one that is due; what is left of another attempt is not, and no error."""
        if arrived == due:
            return True
        same = (arrived.kind, arrived.epoch, arrived.step) == (due.kind, due.epoch, due.step)
        if not same or arrived.attempt == due.attempt:
            raise ScheduleError(f"{self._peer} sent {_describe(arrived)} where {_describe(due)} was due")
        return False

    def _next(self, address: Address, deadline: float) -> Message:
        """Return the next message that was not read yet."""
        while not self._unread:
            try:
                arrived = self._arrived.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                arrived = _Sign.WAKE
            if isinstance(arrived, Message):
                return arrived
            if arrived is not _Sign.WAKE:
                self._end(arrived)
            self._waits.check()
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"{self._peer} sent nothing for {self._waits.timeout_seconds:g} s (waited for "
                    f"{_describe(address)}); if it is only slow, raise bamboo.timeout_seconds"
                )
        return self._unread.popleft()

    def wake(self) -> None:
        """Let a wait look at the news."""
        self._arrived.put(_Sign.WAKE)

    def _end(self, end: Exception | _Sign) -> None:
        """End a wait for what will not come any more."""
        self._arrived.put(end)  # every later wait ends alike
        if isinstance(end, _Sign):
            self._waits.lose(
                PeerLostError(f"the link to {self._peer} broke: it was closed there"), within_seconds=_FAREWELL_SECONDS
            )
        if isinstance(end, BambooError) and not isinstance(end, PeerLostError):
            raise end
        self._waits.lose(end if isinstance(end, PeerLostError) else _lost(self._peer, end))

    def _receive_all(self) -> None:
        try:
            handle = self._group.handle
            while not self._closing and (message := self._receive_one(handle)) is not None:
                self._count(message.header.address)
                self._arrived.put(message)
            self._arrived.put(_Sign.GOODBYE)
        except Exception as error:  # whatever it is, the engine must hear of it rather than wait
            if not self._closing and not isinstance(error, BambooError):
                self.broken = reason_of(error)
                self._on_broken(self.broken)
            self._arrived.put(error)

    def _count(self, address: Address) -> None:
        same = (self._held.step, self._held.attempt) == (address.step, address.attempt)
        self._held = Held(address.step, address.attempt, self._held.count + 1 if same else 1)

    def _receive_one(self, handle: Any) -> Message | None:
        """Return the next message; None if it is a goodbye."""
        head = self._pull(handle, HEADER_BYTES, _FOREVER)
        rest = overflow_bytes(head.numpy().tobytes())
        timeout = self._waits.timeout
        overflow = self._pull(handle, rest, timeout).numpy().tobytes() if rest else b""
        header = decode(head.numpy().tobytes(), overflow)
        if header.address.kind is Kind.GOODBYE:
            return None
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

    def retire(self) -> None:
        """From now on, take the end of the link as ours: report nothing."""
        self._closing = True

    def close(self) -> None:
        """End the link and its thread."""
        self._closing = True
        self._group.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def abandon(self) -> tuple[list[Message], Held]:
        """End the link; return the messages that have arrived whole and were not read, and how many came in all."""
        self.close()
        unread = list(self._unread)
        with contextlib.suppress(queue.Empty):
            while True:
                arrived = self._arrived.get_nowait()
                if isinstance(arrived, Message):
                    unread.append(arrived)
        return unread, self._held


def _lost(peer: str, error: Exception) -> PeerLostError:
    lost = PeerLostError(f"the link to {peer} broke: {reason_of(error)}")
    lost.__cause__ = error
    return lost


def _describe(address: Address) -> str:
    return (
        f"{address.kind.name.lower()} of micro-batch {address.micro_batch} for stage {address.stage} "
        f"(step {address.step}, attempt {address.attempt}, epoch {address.epoch})"
    )
