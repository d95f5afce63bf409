"""What the agents of a job must know of the cloud they run in: the file of `bamboo-ds run --cloud FILE`.

It is no part of the DeepSpeed JSON: training does not depend on it, and a fleet may be asked for by other people than
those who train in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from bamboo_ds.config.keys import did_you_mean, show
from bamboo_ds.errors import ConfigError

__all__ = ["CloudConfig", "Ec2Config", "LocalMarketConfig", "PriceConfig", "load_cloud_config"]

Share = Annotated[float, Field(ge=0, le=1)]
Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Ec2Config(_Model):
    """Where and how to ask EC2 for nodes. Credentials, and what is absent here, come from where boto3 finds them."""

    region: str | None = None
    """Absent: boto3's own."""

    group: str | None = None
    """An existing Auto Scaling group, whose desired capacity is set. Absent: EC2 Fleet is asked, order by order."""

    launch_template: str | None = None
    """Name of the launch template of the nodes; absent: ``bamboo-JOB``, as ``bamboo-ds cloud launch-template`` makes
    it. A group has its own."""

    instance_types: tuple[str, ...] = ()
    """Types that may be mixed, each with as many accelerators as the others; absent: the launch template's."""

    subnets: dict[str, str] = Field(default_factory=dict)
    """A subnet for each zone that may be used: ``{"eu-west-1a": "subnet-..."}``. EC2 Fleet needs at least one."""

    max_price: Dollars | None = None
    """Most dollars per hour for one node; absent: the on-demand price."""

    on_demand: bool = False
    """Ask for on-demand nodes, which the cloud does not take away."""


class LocalMarketConfig(_Model):
    """The pretend market of ``--local-nodes``: what the nodes on this machine are granted and when they are taken."""

    seed: int = 0
    """Of all that is random."""

    capacity: int | None = Field(default=None, ge=0)
    """Most nodes of a zone; absent: no limit."""

    trace: str | None = None
    """File that says when nodes come and go, in any form that ``bamboo-ds simulate`` reads; absent: only a command or
    a fault takes a node away."""

    speed: float = Field(default=1.0, gt=0)
    """So many times faster than written the trace goes."""

    refuse: Share = 0.0
    """Share of orders that are refused though there is capacity."""

    partly: Share = 0.0
    """Share of orders of several nodes that are filled in part."""

    delay_seconds: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] = (0.5, 2.0)
    """Shortest and longest time from an order to its node."""


class PriceConfig(_Model):
    """What nodes cost, in dollars per hour."""

    spot: dict[str, Dollars] = Field(default_factory=dict)
    """By type and zone (``"g5.xlarge/eu-west-1a"``), by type, by zone, or by ``"*"`` for all; the first that fits in
    this order counts. What is absent is asked of EC2 if the provider is ``ec2``."""

    on_demand: dict[str, Dollars] = Field(default_factory=dict)
    """The same for what nodes would cost if the cloud did not take them away."""


class CloudConfig(_Model):
    """The fleet's settings."""

    provider: Literal["ec2", "local"] | None = None
    """Who is asked for nodes: ``ec2``, or ``local`` for the pretend market of ``--local-nodes``. Absent: nobody; the
    nodes are only counted and priced."""

    nodes: int | None = Field(default=None, ge=1)
    """Nodes that the fleet shall have; absent: P x D, for which ``bamboo.pipelines`` must be set."""

    ec2: Ec2Config = Field(default_factory=Ec2Config)
    """For the provider ``ec2``."""

    local: LocalMarketConfig = Field(default_factory=LocalMarketConfig)
    """For the provider ``local``."""

    prices: PriceConfig = Field(default_factory=PriceConfig)
    """What nodes cost."""

    look_seconds: Seconds = 15.0
    """How often to look at what the cloud has given."""

    retry_seconds: Seconds = 15.0
    """After a refusal a zone is asked again after so long, then after twice as long, and so on."""

    retry_max_seconds: Seconds = 60.0
    """At most after so long."""

    release_seconds: Seconds = 300.0
    """Nodes above P x D without a stage are given back after so long."""

    boot_seconds: Seconds = 900.0
    """An instance whose agent has not joined the job by then is given back."""

    notice_file: str | None = None
    """A file that says that this node will be taken away, for other clouds and schedulers; see docs/ec2.md. The name
    of the node stands in for ``{node}``."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.provider == "ec2" and self.ec2.group is None and not self.ec2.subnets:
            raise ValueError("ec2.subnets: EC2 Fleet needs a subnet for each zone; or name an Auto Scaling group")
        if self.local.delay_seconds[0] > self.local.delay_seconds[1]:
            raise ValueError(f"local.delay_seconds = {list(self.local.delay_seconds)}: the shortest comes first")
        return self


def load_cloud_config(path: Path) -> CloudConfig:
    """Read the file of `--cloud`.

    Raises:
        ConfigError: names the file, and each wrong key and value.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold a JSON object, holds {show(found)}")
    try:
        return CloudConfig.model_validate(found)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {_explained(detail)}" for detail in error.errors())) from None


def _explained(detail: object) -> str:
    assert isinstance(detail, dict)
    place = [str(part) for part in detail["loc"]]
    if detail["type"] == "extra_forbidden":
        known = list(_model_at(place[:-1]).model_fields)
        hint = did_you_mean(place[-1], known) or ";"
        return f"{'.'.join(place)}: unknown key{hint} Known keys: {', '.join(known)}"
    if not place:
        return str(detail["msg"]).removeprefix("Value error, ")
    return f"{'.'.join(place)} = {show(detail['input'])}: {str(detail['msg']).replace('Input should', 'must')}"


def _model_at(place: list[str]) -> type[BaseModel]:
    models: dict[str, type[BaseModel]] = {"ec2": Ec2Config, "local": LocalMarketConfig, "prices": PriceConfig}
    return models[place[0]] if place else CloudConfig
