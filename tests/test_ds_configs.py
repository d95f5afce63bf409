"""Every shipped DeepSpeed config loads, is supported, and adds up; DeepSpeed itself accepts what we make of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from bamboo_ds.config import (
    bamboo_block,
    check_supported,
    gradient_clipping,
    load_deepspeed_config,
    precision,
    resolve_batch_sizes,
    solo_config,
)

FOLDER = Path(__file__).resolve().parents[1] / "ds_configs"
FILES = sorted(FOLDER.iterdir())


def strict_json(text: str) -> Any:
    """Parse JSON as other tools do: no comments, no NaN, no key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if repeated:
            raise ValueError(f"duplicate keys {repeated}")
        return dict(pairs)

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, object_pairs_hook=once, parse_constant=no_constant)


def test_there_are_configs_and_nothing_else() -> None:
    assert FILES
    assert [path.name for path in FILES if path.suffix != ".json"] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
class TestAShippedConfig:
    def test_it_is_strict_json_and_loads_as_such(self, path: Path) -> None:
        assert load_deepspeed_config(config=path) == strict_json(path.read_text(encoding="utf-8"))

    def test_its_bamboo_block_is_on_and_valid(self, path: Path) -> None:
        assert bamboo_block(load_deepspeed_config(config=path)) is not None

    def test_all_it_asks_for_is_supported(self, path: Path) -> None:
        check_supported(load_deepspeed_config(config=path))

    @pytest.mark.parametrize("pipelines", [1, 2])
    def test_deepspeed_accepts_the_world_of_one_made_of_it(self, path: Path, pipelines: int) -> None:
        config = load_deepspeed_config(config=path)
        sizes = resolve_batch_sizes(config, pipelines)
        stock = DeepSpeedConfig(solo_config(config, sizes, reporter=True, on_cpu=True))
        assert stock.gradient_accumulation_steps == sizes.micro_batches
        assert stock.gradient_clipping == gradient_clipping(config)
        assert stock.bfloat16_config.enabled == (precision(config) == "bf16")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a": 1, "a": 2}', "duplicate keys"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": 1,}', "property name|trailing comma"),
        ('{"a": 1} # why', "Extra data"),
    ],
)
def test_text_that_is_no_strict_json_is_found(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        strict_json(text)
