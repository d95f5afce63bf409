"""Finds this process's place among the others, and the store through which they meet.

The launchers differ (`deepspeed`, `torchrun`, `srun`) but all describe the job in environment variables. A missing
one is named here, at once: DeepSpeed would fall into MPI discovery and ask for mpi4py. A worker that an agent of ours
has started joins the cluster instead, whoever asks for the world first: Bamboo or the script itself.

The default process group of `torch.distributed` belongs to the user's code: its rank and size are the true ones.
Nothing of a training step runs on it.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import deepspeed.comm.comm as deepspeed_comm
import torch
import torch.distributed as torch_distributed
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d

from bamboo_ds.config import BambooConfig
from bamboo_ds.elastic.key_value import StoreKeys
from bamboo_ds.elastic.member import Member
from bamboo_ds.elastic.membership import Membership
from bamboo_ds.errors import ConfigError
from bamboo_ds.importing import divert, forbid_shared_memory_op
from bamboo_ds.plan import Plan
from bamboo_ds.plan.job import JobSpec
from bamboo_ds.world.exit import end_in_order, job_board, world_store
from bamboo_ds.world.failure import FailureBoard, Failures, Guard
from bamboo_ds.world.group import BACKEND
from bamboo_ds.world.hosting import Meeting, host, hosted
from bamboo_ds.world.joining import join, joined, make_default_group
from bamboo_ds.world.member_failures import MemberFailures
from bamboo_ds.world.rendezvous import KeyValue

_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_SLURM_PORT, _SLURM_PORTS = 29500, 1000
_SLURM_HOST = re.compile(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?")


@dataclass(frozen=True, slots=True)
class World:
    """This process among all processes of the job.

    Attributes:
        rank: 0 <= rank < size, when the job began. Ask `torch.distributed` for that of the moment.
        size: number of processes, when the job began.
        store: key-value store that all processes share: what groups form by.
        worker: id of this worker, which never changes; the rank in a job without a cluster.
        member: this worker's seat in the cluster; None in a job without one.
        address: at which other nodes reach this one; empty for gloo's own choice.
        spec: of the job, where a launcher has placed the workers and they host their agents: all have their seats.
    """

    rank: int
    size: int
    store: KeyValue
    worker: int
    member: Member | None = None
    address: str = ""
    spec: JobSpec | None = None

    def failures(self, plan: Callable[[], Plan], *, scope: str, timeout_seconds: float) -> Failures:
        """Return where workers say why they fail.

        Args:
            plan: returns the plan under which this worker works.
            scope: name of an engine.
            timeout_seconds: how long to wait for a verdict on a broken link.
        """
        if self.member is not None:
            return MemberFailures(self.member, plan=plan, scope=scope, timeout_seconds=timeout_seconds)
        return FailureBoard(self.store, worker=self.worker, workers=plan().workers, scope=scope)


def init_distributed(timeout_seconds: float = 300.0) -> World:
    """Join the job's processes.

    It is safe to call again, and after `deepspeed.init_distributed` or `torch.distributed.init_process_group`.

    Args:
        timeout_seconds: how long to wait for the other processes, and the limit of later user collectives on the
            default group.

    Raises:
        ConfigError: the launcher's environment variables are missing or wrong.
        SystemExit: the cluster's job has finished, and this worker was never needed.
    """
    forbid_shared_memory_op()
    end_in_order()
    timeout, membership = timedelta(seconds=timeout_seconds), Membership.read()
    if membership is not None:
        make_default_group(membership, timeout=timeout)
    elif not torch_distributed.is_initialized():
        complete_environment()
        distributed_c10d.default_pg_timeout = timeout
        torch_distributed.init_process_group(backend=_backend(), timeout=timeout)
    if not deepspeed_comm.is_initialized():
        deepspeed_comm.init_distributed(verbose=False, auto_mpi_discovery=False)
    job_board()
    return _world(membership)


def host_agent(world: World, *, block: BambooConfig, settings: Mapping[str, str], spec: JobSpec, engine: int) -> World:
    """Let the workers of a stock launcher host their agents, if their config says where etcd is.

    Args:
        world: this process among the others, without a cluster.
        block: the `bamboo` block.
        settings: what the workers must have alike.
        spec: of the job, with the plan of the ranks.
        engine: number of the engine in its script.

    Returns:
        The world as it is from now on.

    Raises:
        ConfigError, StoreError: etcd cannot be used as the config says, or the workers' configs differ.
        PeerLostError: another worker has failed.
    """
    board, timeout = job_board(), block.timeout_seconds
    assert board is not None
    with Guard(board, lambda _: None):
        meeting = Meeting(
            world_store(), board, rank=world.rank, size=world.size, scope=f"engine-{engine}", timeout_seconds=timeout
        )
        if not meeting.agree(settings):
            return world
    host(meeting, block=block, spec=spec)
    job_board.cache_clear()
    job_board()
    return _world(None)


def _world(membership: Membership | None) -> World:
    rank, size = torch_distributed.get_rank(), torch_distributed.get_world_size()
    member, agent = joined(), hosted()
    if member is None:
        return World(rank=rank, size=size, store=world_store(), worker=rank)
    return World(
        rank=rank,
        size=size,
        store=StoreKeys(member.store),
        worker=member.worker,
        member=member,
        address=membership.address if membership is not None else "",
        spec=agent.spec if agent is not None else None,
    )


def answer_script() -> None:
    """Let the script's own calls find their way.

    `deepspeed.init_distributed` finds srun's variables, and a missing one is named: stock DeepSpeed falls into MPI
    discovery then, and asks for mpi4py. In a worker of an agent, it and `torch.distributed.init_process_group` join the
    cluster.
    """
    divert("deepspeed.comm.comm", "mpi_discovery", lambda: discover)
    divert("torch.distributed.distributed_c10d", "init_process_group", lambda: init_process_group)
    torch_distributed.init_process_group = distributed_c10d.init_process_group  # it keeps the name under another, too


name_missing_variables = answer_script


def discover(stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Find this process's place, in place of DeepSpeed's MPI discovery, but where MPI is meant."""
    if importlib.util.find_spec("mpi4py") is None or "SLURM_STEP_ID" in os.environ or Membership.read() is not None:
        complete_environment()
    else:
        stock(*args, **kwargs)


def init_process_group(stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Join the cluster in a worker of an agent; do what torch does elsewhere, and for our own call."""
    membership = Membership.read()
    ours = BACKEND in (*args[:1], kwargs.get("backend"))
    if membership is None or ours or torch_distributed.is_initialized():
        stock(*args, **kwargs)
        return
    end_in_order()
    make_default_group(membership, timeout=kwargs.get("timeout") or distributed_c10d.default_pg_timeout)


def _backend() -> str:
    """Gloo beside the accelerator's backend, so that user code may also reduce host tensors."""
    device, backend = get_accelerator().device_name(), get_accelerator().communication_backend_name()
    return (
        "gloo"
        if device == "cpu" or not torch_distributed.is_backend_available(backend)
        else f"cpu:gloo,{device}:{backend}"
    )


def complete_environment() -> None:
    """Fill in what `srun` names differently, or what the cluster knows; then name what is missing.

    Raises:
        ConfigError: a variable is missing, or is no number.
    """
    if (membership := Membership.read()) is not None:
        join(membership)
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
