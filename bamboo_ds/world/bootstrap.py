"""Finds this process's place among the others, and the store through which they meet.

The launchers differ (`deepspeed`, `torchrun`, `srun`) but all describe the job in environment variables. A missing
one is named here, at once: DeepSpeed would fall into MPI discovery and ask for mpi4py.

The default process group of `torch.distributed` belongs to the user's code: its rank and size are the true ones.
Nothing of a training step runs on it.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import deepspeed.comm.comm as deepspeed_comm
import torch
import torch.distributed as torch_distributed
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d

from bamboo_ds.errors import ConfigError
from bamboo_ds.importing import forbid_shared_memory_op
from bamboo_ds.world.exit import end_in_order, job_board, world_store

_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_SLURM_PORT, _SLURM_PORTS = 29500, 1000
_SLURM_HOST = re.compile(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?")


@dataclass(frozen=True, slots=True)
class World:
    """This process among all processes of the job.

    Attributes:
        rank: 0 <= rank < size; in a static job this is the worker id.
        size: number of processes.
        store: key-value store that all processes share.
    """

    rank: int
    size: int
    store: torch_distributed.Store


def init_distributed(timeout_seconds: float = 300.0) -> World:
    """Join the job's processes.

    It is safe to call again, and after `deepspeed.init_distributed` or `torch.distributed.init_process_group`.

    Args:
        timeout_seconds: how long to wait for the other processes, and the limit of later user collectives on the
            default group.

    Raises:
        ConfigError: the launcher's environment variables are missing or wrong.
    """
    forbid_shared_memory_op()
    end_in_order()
    if not torch_distributed.is_initialized():
        complete_environment()
        distributed_c10d.default_pg_timeout = timedelta(seconds=timeout_seconds)
        torch_distributed.init_process_group(backend=_backend(), timeout=timedelta(seconds=timeout_seconds))
    if not deepspeed_comm.is_initialized():
        deepspeed_comm.init_distributed(verbose=False, auto_mpi_discovery=False)
    job_board()
    return World(rank=torch_distributed.get_rank(), size=torch_distributed.get_world_size(), store=world_store())


def name_missing_variables() -> None:
    """Let `deepspeed.init_distributed` in a script find srun's variables, and name missing ones.

    Stock DeepSpeed falls into MPI discovery then, and asks for mpi4py.
    """
    stock = deepspeed_comm.mpi_discovery
    if getattr(stock, "names_missing_variables", False):
        return

    def discover(*args: Any, **kwargs: Any) -> None:
        if importlib.util.find_spec("mpi4py") is None or "SLURM_STEP_ID" in os.environ:
            complete_environment()
        else:
            stock(*args, **kwargs)

    discover.names_missing_variables = True  # type: ignore[attr-defined]
    deepspeed_comm.mpi_discovery = discover


def _backend() -> str:
    """Gloo beside the accelerator's backend, so that user code may also reduce host tensors."""
    device, backend = get_accelerator().device_name(), get_accelerator().communication_backend_name()
    return (
        "gloo"
        if device == "cpu" or not torch_distributed.is_backend_available(backend)
        else f"cpu:gloo,{device}:{backend}"
    )


def complete_environment() -> None:
    """Fill in what `srun` names differently; then name what is missing.

    Raises:
        ConfigError: a variable is missing, or is no number.
    """
    _adopt_slurm()
    _require(_REQUIRED)
    _check_numbers()


def _adopt_slurm() -> None:
    if "SLURM_STEP_ID" not in os.environ:
        return
    for name, slurm_name in _SLURM.items():
        if slurm_name in os.environ:
            os.environ.setdefault(name, os.environ[slurm_name])
    if "SLURM_STEP_NODELIST" in os.environ:
        os.environ.setdefault("MASTER_ADDR", _first_host(os.environ["SLURM_STEP_NODELIST"]))
        os.environ.setdefault("MASTER_PORT", str(_slurm_port()))


def _require(names: Sequence[str]) -> None:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"environment variable {', '.join(missing)} not set: start the script with a launcher, for example "
            "`torchrun --nproc-per-node N script.py` or `deepspeed --num_gpus N script.py` (or `srun`), or set "
            f"{', '.join(_REQUIRED)} in each process"
        )


def _check_numbers() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not os.environ[name].isdigit():
            raise ConfigError(f"environment variable {name} = {os.environ[name]!r}: expected a whole number")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= size:
        raise ConfigError(f"RANK = {rank} but WORLD_SIZE = {size}: ranks go from 0 to WORLD_SIZE - 1")


def _slurm_port() -> int:
    """Return a port that all processes of a job agree on, and that jobs on one node rarely share."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return _SLURM_PORT + (int(job) % _SLURM_PORTS if job.isdigit() else 0)


def _first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list: `gpu03` of `gpu[03-05,9],other`."""
    before, number, after = _SLURM_HOST.match(node_list).groups("")  # type: ignore[union-attr]  # matches anything
    return f"{before}{number}{after}"


def local_device() -> torch.device:
    """Return the device of this process.

    Raises:
        ConfigError: nothing says which accelerator of the machine is this process's.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    _adopt_slurm()  # a script that has made the process group itself may have done without
    _require(["LOCAL_RANK"])
    return torch.device(accelerator.device_name(int(os.environ["LOCAL_RANK"])))
