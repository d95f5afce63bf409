"""Shows DeepSpeed a world of one.

DeepSpeed's collectives cannot survive a dead peer, so it never gets one: while DeepSpeed's own code runs, its
communication backend is a `SoloBackend`, in which every collective is the identity. Outside, `deepspeed.comm` and
`torch.distributed` answer truly to the user's code.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import deepspeed.comm.comm as deepspeed_comm
import torch
from deepspeed.comm.backend import Backend
from deepspeed.runtime.pipe import module as deepspeed_module
from deepspeed.runtime.pipe import topology as deepspeed_topology
from deepspeed.utils import logger

from bamboo_ds.errors import ScheduleError


class SoloGroup:
    """The process group of one process."""

    @staticmethod
    def size() -> int:
        """Number of members."""
        return 1

    @staticmethod
    def rank() -> int:
        """Rank in the group."""
        return 0


class _Done:
    """A collective of one process is finished when it starts."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class SoloBackend(Backend):
    """A DeepSpeed communication backend with one process; collectives return their input."""

    using_mpi = False
    has_all_reduce_coalesced = False
    has_coalescing_manager = False

    def __init__(self) -> None:
        super().__init__(name="bamboo-solo", rank=0, size=1)
        self.initialized = True
        self._world = SoloGroup()

    def get_rank(self, group: Any = None) -> int:
        """Return 0."""
        return 0

    def get_world_size(self, group: Any = None) -> int:
        """Return 1."""
        return 1

    def get_global_rank(self, group: Any, group_rank: int) -> int:
        """Return 0."""
        return 0

    def get_world_group(self) -> SoloGroup:
        """Return the group of one."""
        return self._world

    def new_group(self, ranks: Any = None) -> SoloGroup:
        """Return a group of one, whoever was asked for."""
        return SoloGroup()

    def destroy_process_group(self, group: Any = None) -> None:
        """Do nothing: the groups behind `torch.distributed` are the user's."""

    def has_all_gather_into_tensor(self) -> bool:
        """Return True."""
        return True

    def has_reduce_scatter_tensor(self) -> bool:
        """Return True."""
        return True

    def barrier(self, *args: Any, **kwargs: Any) -> _Done:
        """Be done."""
        return _Done()

    monitored_barrier = barrier

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> _Done:
        """Keep the tensor: it is its own sum."""
        return _Done()

    reduce = broadcast = inference_all_reduce = all_reduce

    def broadcast_object_list(self, object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        """Keep the list as it is."""

    def all_gather(self, tensor_list: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> _Done:
        """Copy the tensor."""
        tensor_list[0].copy_(tensor)
        return _Done()

    def all_gather_object(self, object_list: list[Any], value: Any, group: Any = None) -> None:
        """Keep the value."""
        object_list[0] = value

    def all_gather_into_tensor(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> _Done:
        """Copy the tensor."""
        output_tensor.copy_(input_tensor.view_as(output_tensor))
        return _Done()

    reduce_scatter_tensor = all_gather_into_tensor

    def send(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: there is nobody to send to."""
        raise ScheduleError("DeepSpeed sees a world of one and tried to send to a peer")

    recv = isend = irecv = send


_SOLO = SoloBackend()


class _Chatter(logging.Filter):
    """Holds back DeepSpeed's log below errors while `quiet`: changing its level would clear every logger's cache."""

    quiet = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        return not self.quiet or record.levelno >= logging.ERROR


_CHATTER = _Chatter()
logger.addFilter(_CHATTER)


@contextlib.contextmanager
def world_of_one(*, quiet: bool = False) -> Iterator[None]:
    """Run DeepSpeed code as a job of one process.

    Args:
        quiet: keep DeepSpeed's rank-0 chatter to errors, as every process believes it is rank 0. The user's own
            output is not touched.
    """
    before, was_quiet = deepspeed_comm.cdb, _CHATTER.quiet
    deepspeed_comm.cdb, _CHATTER.quiet = _SOLO, quiet or was_quiet
    try:
        # The topology it would print is that of the world of one.
        with _silent_prints(deepspeed_topology, *((deepspeed_module,) if quiet else ())):
            yield
    finally:
        deepspeed_comm.cdb, _CHATTER.quiet = before, was_quiet


@contextlib.contextmanager
def _silent_prints(*modules: ModuleType) -> Iterator[None]:
    """Shadow `print` in modules of DeepSpeed that print."""
    for module in modules:
        module.__dict__["print"] = lambda *_, **__: None
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop("print", None)
