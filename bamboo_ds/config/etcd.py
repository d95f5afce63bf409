"""How a job reaches etcd: `bamboo.etcd` of the DeepSpeed JSON, and the agent's `--etcd...` options."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EtcdConfig(BaseModel):
    """The etcd servers of a job, and what they ask for."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    endpoints: tuple[str, ...] = Field(min_length=1)
    """The servers, as ``host:port``, ``http://host:port`` or ``https://host:port``."""

    user: str = ""
    """A user of etcd, if it wants one."""

    password: str = Field(default="", repr=False)
    """Its password."""

    ca: str | None = None
    """File (PEM) of the authorities to trust; absent: the system's."""

    cert: str | None = None
    """File (PEM) of our own certificate, if the servers ask for one; `key` goes with it."""

    key: str | None = None
    """File (PEM) of its key."""

    timeout_seconds: float = Field(default=5.0, gt=0, le=60)
    """Deadline of one request, and how long a watch bears silence."""
