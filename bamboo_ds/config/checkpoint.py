"""When checkpoints are written by themselves, and where: `bamboo.checkpoint` of the DeepSpeed JSON."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

_BUCKET = re.compile(r"s3://[A-Za-z0-9][A-Za-z0-9._-]{0,62}(/.*)?")


class CheckpointConfig(BaseModel):
    """Where the job's checkpoints are, and how often one is written."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    path: str = Field(min_length=1)
    """A folder that all nodes share, or ``s3://bucket/prefix``. A job that has lost a layer goes on from the newest
    whole checkpoint here."""

    interval_steps: int | None = Field(default=None, ge=1)
    """Write a checkpoint after every so many optimizer steps."""

    interval_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Write a checkpoint at the first step that ends so long after the one before. Give this or `interval_steps`, or
    neither: then checkpoints are written when the script calls `save_checkpoint`."""

    keep: int = Field(default=2, ge=1)
    """How many of them to keep. Checkpoints that the script saves itself are never deleted."""

    asynchronous: bool = True
    """Write while training goes on; it stops for the copy to host memory only. With false it stops for all of it."""

    @field_validator("path")
    @classmethod
    def _names_a_place(cls, path: str) -> str:
        if "://" in path and not _BUCKET.fullmatch(path):
            raise PydanticCustomError("place", "must be a folder or s3://bucket/prefix")
        return path

    @model_validator(mode="after")
    def _has_one_interval(self) -> Self:
        if self.interval_steps is not None and self.interval_seconds is not None:
            raise PydanticCustomError("intervals", "give interval_steps or interval_seconds, not both")
        return self
