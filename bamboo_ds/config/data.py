"""How `training_data` is read: `bamboo.data` of the DeepSpeed JSON."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DataConfig(BaseModel):
    """The order of the training data, and who draws it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    shuffle: bool = False
    """Take the samples of each epoch in an order of its own. DeepSpeed's pipelines read them in order."""

    drop_last: bool = False
    """Leave out of each epoch what does not fill a global batch, instead of filling it from the next epoch."""

    num_workers: int = Field(default=0, ge=0, le=1024)
    """Processes that load ahead, of each worker that draws; 0: the worker loads when it needs a micro-batch."""

    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Seed of the shuffle. Absent: ``bamboo.seed``."""
