"""`bamboo.data`: defaults, and messages for what is wrong in it."""

from __future__ import annotations

from typing import Any

import pytest

from bamboo_ds.config import BambooConfig, bamboo_block
from bamboo_ds.config.data import DataConfig
from bamboo_ds.errors import ConfigError


def read(data: Any) -> DataConfig:
    block = bamboo_block({"bamboo": {"data": data}})
    assert isinstance(block, BambooConfig)
    return block.data


def test_the_defaults_are_what_deepspeeds_pipelines_do() -> None:
    expected = DataConfig(shuffle=False, drop_last=False, num_workers=0, seed=None)
    assert read({}) == BambooConfig().data == expected


def test_every_key_is_read() -> None:
    values = {"shuffle": True, "drop_last": True, "num_workers": 3, "seed": 5}
    assert read(values).model_dump() == values


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"shuffles": True}, 'bamboo.data.shuffles: unknown key; did you mean "shuffle"? Known keys: shuffle, drop'),
        ({"shuffle": 1}, "bamboo.data.shuffle = 1: must be a JSON boolean"),
        ({"drop_last": "yes"}, 'bamboo.data.drop_last = "yes": must be a JSON boolean'),
        ({"num_workers": -1}, "bamboo.data.num_workers = -1: must be greater than or equal to 0"),
        ({"num_workers": 1.5}, "bamboo.data.num_workers = 1.5: must be a JSON integer"),
        ({"num_workers": 5000}, "bamboo.data.num_workers = 5000: must be less than or equal to 1024"),
        ({"seed": -1}, "bamboo.data.seed = -1: must be greater than or equal to 0"),
        (True, "bamboo.data = true: must be"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_allowed(data: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(data)
    assert str(caught.value).startswith(text)
