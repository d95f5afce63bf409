"""Keeps what redundant forwards save for backward in host memory.

A redundant forward is run for the case that a node dies; until then its saved tensors would only fill the
accelerator. Saved-tensor hooks move them to pinned host memory on a stream of their own, and back if a backward is
ever run. Weights are not moved: they live on the device anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


class ActivationSwap:
    """Hooks that move saved tensors to the host, and the count of what was moved.

    Args:
        enabled: False leaves saved tensors where they are and only counts them.
        parameters: yields the parameters that are held anyway and never moved.
    """

    def __init__(self, *, enabled: bool, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._enabled, self._parameters = enabled, parameters
        self._held: set[int] | None = None
        self._seen: set[int] = set()
        self._stream: Any = None
        self.saved_bytes = 0

    def begin_step(self) -> None:
        """Forget the counts; parameters may have moved since the last step."""
        self._held = None
        self._seen = set()
        self.saved_bytes = 0

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which saved tensors are swapped."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._held is None:
            # Only now: a step without redundant forwards need not look.
            self._held = {parameter.untyped_storage().data_ptr() for parameter in self._parameters()}
        storage = tensor.untyped_storage().data_ptr()
        if storage in self._held:
            return tensor
        if storage not in self._seen:
            self._seen.add(storage)
            self.saved_bytes += tensor.numel() * tensor.element_size()
        if self._enabled and tensor.device.type != "cpu":
            return self._to_host(tensor)
        # Not the tensor itself: an output that its own graph saves would hold that graph for ever.
        return tensor.detach()

    def _to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device, Any]:
        accelerator = get_accelerator()
        self._stream = self._stream or accelerator.Stream()
        self._stream.wait_stream(accelerator.current_stream())
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with accelerator.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
        done = accelerator.Event()
        done.record(self._stream)
        return host, tensor.device, done

    @staticmethod
    def _unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        host, device, done = packed
        done.synchronize()
        return host.to(device, non_blocking=True)
