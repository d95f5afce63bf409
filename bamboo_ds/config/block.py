"""The ``bamboo`` block of the DeepSpeed JSON, and the messages for one that is wrong.

An unknown key is an error, never ignored: a misspelt ``redundency`` would train without the protection it asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from bamboo_ds.config.checkpoint import CheckpointConfig
from bamboo_ds.config.data import DataConfig
from bamboo_ds.config.etcd import EtcdConfig
from bamboo_ds.config.keys import Config, did_you_mean, show
from bamboo_ds.errors import ConfigError

Redundancy = Literal["fit", "eflb", "lflb", "off"]
ActivationSwap = Literal["cpu", "none"]
Reconfigure = Literal["auto", "needed"]

WEEK_SECONDS = 7 * 24 * 3600


class Fault(BaseModel):
    """One deliberate fault, to see what a job does about it. Absent keys match everything."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    how: Literal["kill", "stop", "cut"] = "kill"
    """``kill``: SIGKILL the worker. ``stop``: SIGSTOP it. ``cut``: take its node off the network."""

    step: int = Field(ge=0)
    """Optimizer steps committed before the step in which it happens."""

    instruction: int = Field(default=0, ge=0)
    """It happens before the instruction of this index in the worker's step."""

    worker: int | None = Field(default=None, ge=0)
    """Id of the worker."""

    pipeline: int | None = Field(default=None, ge=0)
    """Pipeline of the worker in the first plan of the job."""

    stage: int | None = Field(default=None, ge=0)
    """Stage of the worker in the first plan of the job."""


class BambooConfig(BaseModel):
    """Bamboo's settings: the ``bamboo`` block of the DeepSpeed JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    enabled: bool = True
    """Switch Bamboo on. With false the job runs on stock DeepSpeed as if the block were absent."""

    job: str = Field(default="bamboo", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Name of the job. It is part of every key in the store, so two jobs that share a store need two names."""

    pipelines: int | None = Field(default=None, ge=1)
    """Upper bound of D, the number of pipelines. Absent: as many as the workers fill (workers // stages)."""

    min_stages: int = Field(default=1, ge=1)
    """Fewest stages a pipeline may shrink to: what one worker's memory still holds sets it."""

    reconfigure: Reconfigure = "auto"
    """When the job takes another shape. ``auto``: between two steps, if that pays. ``needed``: only when a step cannot
    be finished otherwise; with a ``data_iter`` of your own, samples are exact while the shape stays."""

    layer_costs: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(default=(), strict=False)
    """Time of forward and backward of each layer, in any unit: stages are cut so that they take equally long. Absent:
    the module's ``partition_method`` cuts."""

    redundancy: Redundancy = "fit"
    """When the redundant forward (FRC) runs.

    ``fit``: only in the idle windows of the schedule. ``eflb``: for every micro-batch, as in the paper. ``lflb``: not
    before a worker is lost. ``off``: no redundant layers at all, nothing survives a loss.
    """

    activation_swap: ActivationSwap = "cpu"
    """Where the tensors saved by the redundant forward wait: in host memory, or (``none``) where they were made."""

    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Seed of everything random inside a step (dropout) and of the order of ``training_data``."""

    timeout_seconds: float = Field(default=300.0, gt=0, le=WEEK_SECONDS, allow_inf_nan=False)
    """Longest time any wait for another worker may last. It must exceed the longest step of one stage."""

    data: DataConfig = DataConfig()
    """How ``training_data`` is read."""

    checkpoint: CheckpointConfig | None = None
    """Where checkpoints are written by themselves, and how often; absent: not at all."""

    etcd: EtcdConfig | None = None
    """Where the job's etcd is, for jobs started by a stock launcher (``deepspeed``, ``torchrun``, ``srun``): each
    worker then hosts an agent. ``bamboo-ds run`` says it itself and needs no such key."""

    ttl_seconds: float = Field(default=10.0, ge=1, le=600)
    """How long the agent of a stock launcher's worker may be silent before its node counts as lost."""

    fault_injection: tuple[Fault, ...] = Field(default=(), strict=False)
    """Deliberate faults; none by default."""


def bamboo_block(config: Config) -> BambooConfig | None:
    """Return the validated ``bamboo`` block of a DeepSpeed config.

    Args:
        config: The DeepSpeed config. ``"bamboo": {}`` and ``"bamboo": true`` both switch Bamboo on with its defaults.

    Returns:
        The block, or None when the key is absent or null, is false, or says ``"enabled": false``.

    Raises:
        ConfigError: Lists every wrong key and value of the block.
    """
    block = config.get("bamboo")
    if block is None or block is False:
        return None
    if block is True:
        block = {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"bamboo = {show(block)}: must be an object, such as {{}} for the defaults")
    validated = _validate(block)
    return validated if validated.enabled else None


def _validate(block: Mapping[str, Any]) -> BambooConfig:
    try:
        return BambooConfig.model_validate(dict(block))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail) for detail in error.errors())) from None


def _explain(detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in ("bamboo", *detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return _explain_unknown(key, detail["loc"])
    return f"{key} = {show(detail['input'])}: {_wanted(detail)}"


def _explain_unknown(key: str, place: tuple[int | str, ...]) -> str:
    known = list(_model_at(place[:-1]).model_fields)
    hint = did_you_mean(str(place[-1]), known) or ";"
    return f"{key}: unknown key{hint} Known keys: {', '.join(known)}"


def _model_at(place: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the model of the object at a place in the block."""
    models: dict[str, type[BaseModel]] = {
        "checkpoint": CheckpointConfig,
        "data": DataConfig,
        "etcd": EtcdConfig,
        "fault_injection": Fault,
    }
    return models.get(str(place[0]), BambooConfig) if place else BambooConfig


def _wanted(detail: ErrorDetails) -> str:
    if detail["type"] == "literal_error":
        field = _model_at(detail["loc"][:-1]).model_fields[str(detail["loc"][-1])]
        return f"allowed: {', '.join(map(str, get_args(field.annotation)))}"
    if detail["type"] == "string_pattern_mismatch":
        return "must be 1 to 63 letters, digits, '.', '_' or '-', and begin with a letter or digit"
    return detail["msg"].replace("Input should", "must").replace("a valid ", "a JSON ")
