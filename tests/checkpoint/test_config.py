"""`bamboo.checkpoint`: what is read, and what a wrong value is told."""

from __future__ import annotations

from typing import Any

import pytest

from bamboo_ds.config import bamboo_block
from bamboo_ds.config.checkpoint import CheckpointConfig
from bamboo_ds.errors import ConfigError


def read(**block: Any) -> CheckpointConfig | None:
    config = bamboo_block({"bamboo": {"checkpoint": block}})
    return config.checkpoint if config is not None else None


def test_without_the_block_there_are_no_checkpoints() -> None:
    config = bamboo_block({"bamboo": {}})
    assert config is not None
    assert config.checkpoint is None


def test_the_defaults_are_the_documented_ones() -> None:
    found = read(path="/shared/run")
    assert found is not None
    assert found.model_dump() == {
        "path": "/shared/run",
        "interval_steps": None,
        "interval_seconds": None,
        "keep": 2,
        "asynchronous": True,
    }


@pytest.mark.parametrize("path", ["runs/a", "/shared/run", "s3://bucket", "s3://bucket/deep/prefix"])
def test_folders_and_buckets_are_places(path: str) -> None:
    found = read(path=path, interval_seconds=60)
    assert found is not None
    assert (found.path, found.interval_seconds) == (path, 60.0)


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({}, "bamboo.checkpoint.path = {}: Field required"),
        ({"path": ""}, 'bamboo.checkpoint.path = "": '),
        ({"path": "gs://bucket"}, 'bamboo.checkpoint.path = "gs://bucket": must be a folder or s3://bucket/prefix'),
        ({"path": "s3:///prefix"}, 'bamboo.checkpoint.path = "s3:///prefix": must be a folder or s3://'),
        (
            {"path": "a", "interval_steps": 1, "interval_seconds": 1.0},
            'bamboo.checkpoint = {"path": "a", "interval_steps": 1, "interval_seconds": 1.0}: give interval_steps or '
            "interval_seconds, not both",
        ),
        ({"path": "a", "interval_steps": 0}, "bamboo.checkpoint.interval_steps = 0: must be greater than or equal"),
        ({"path": "a", "interval_seconds": 0}, "bamboo.checkpoint.interval_seconds = 0: must be greater than 0"),
        ({"path": "a", "keep": 0}, "bamboo.checkpoint.keep = 0: must be greater than or equal to 1"),
        ({"path": "a", "asynchronous": "no"}, 'bamboo.checkpoint.asynchronous = "no": must be a JSON boolean'),
        ({"path": "a", "kep": 1}, 'bamboo.checkpoint.kep: unknown key; did you mean "keep"? Known keys: path, interv'),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(block: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**block)
    assert str(caught.value).startswith(told)
