"""The config room: what is read, what is refused, and the batch arithmetic, held against DeepSpeed's own reading."""

from __future__ import annotations

import argparse
import base64
import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, KeysView
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.config import (
    BambooConfig,
    BatchSizes,
    Fault,
    bamboo_block,
    check_supported,
    early_config,
    gradient_clipping,
    load_deepspeed_config,
    precision,
    resolve_batch_sizes,
    solo_config,
)
from bamboo_ds.config.supported import REFUSALS, REMOVED_KEYS
from bamboo_ds.errors import ConfigError, UnsupportedFeatureError

SIZES = BatchSizes(train_batch_size=32, micro_batch_size=4, micro_batches=8)


def message(call: Any, *args: Any, **kwargs: Any) -> str:
    """Return the text of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def nested(path: str, value: object) -> dict[str, Any]:
    """Make the config in which a dotted path holds a value."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


class TestTheBambooBlock:
    @pytest.mark.parametrize("block", [{}, True, {"enabled": True}])
    def test_an_empty_block_or_true_means_the_defaults(self, block: object) -> None:
        assert bamboo_block({"bamboo": block}) == BambooConfig()

    @pytest.mark.parametrize("config", [{}, {"bamboo": None}, {"bamboo": False}, {"bamboo": {"enabled": False}}])
    def test_an_absent_or_disabled_block_is_off(self, config: dict[str, Any]) -> None:
        assert bamboo_block(config) is None

    def test_the_defaults_are_the_documented_ones(self) -> None:
        assert BambooConfig().model_dump() == {
            "enabled": True,
            "job": "bamboo",
            "pipelines": None,
            "min_stages": 1,
            "reconfigure": "auto",
            "layer_costs": (),
            "redundancy": "fit",
            "activation_swap": "cpu",
            "seed": 1234,
            "timeout_seconds": 300.0,
            "data": {"shuffle": False, "drop_last": False, "num_workers": 0, "seed": None},
            "checkpoint": None,
            "etcd": None,
            "ttl_seconds": 10.0,
            "fault_injection": (),
        }

    def test_every_field_is_described(self) -> None:
        assert [name for name, field in BambooConfig.model_fields.items() if not field.description] == []

    def test_a_full_block_is_read(self) -> None:
        block = {"job": "gpt.2_x-1", "pipelines": 4, "min_stages": 2, "redundancy": "eflb", "activation_swap": "none"}
        read = bamboo_block({"bamboo": {**block, "seed": 0, "timeout_seconds": 5}})
        assert read is not None
        assert (read.job, read.pipelines, read.min_stages, read.redundancy) == ("gpt.2_x-1", 4, 2, "eflb")
        assert (read.activation_swap, read.seed, read.timeout_seconds) == ("none", 0, 5.0)

    def test_an_unknown_key_names_the_nearest_known_one(self) -> None:
        assert message(bamboo_block, {"bamboo": {"redundency": "fit"}}) == (
            'bamboo.redundency: unknown key; did you mean "redundancy"? Known keys: enabled, job, pipelines, '
            "min_stages, reconfigure, layer_costs, redundancy, activation_swap, seed, timeout_seconds, data, "
            "checkpoint, etcd, ttl_seconds, fault_injection"
        )

    def test_unknown_keys_of_inner_objects_name_their_own(self) -> None:
        block = {"etcd": {"endpoint": ["a:1"], "endpoints": ["a:1"]}, "fault_injection": [{"step": 1, "hwo": "kill"}]}
        text = message(bamboo_block, {"bamboo": block})
        assert 'bamboo.etcd.endpoint: unknown key; did you mean "endpoints"? Known keys: endpoints, user' in text
        assert 'bamboo.fault_injection.0.hwo: unknown key; did you mean "how"? Known keys: how, step' in text

    def test_costs_of_layers_are_read_and_must_be_positive(self) -> None:
        read = bamboo_block({"bamboo": {"layer_costs": [1, 2.5]}})
        assert read is not None
        assert read.layer_costs == (1.0, 2.5)
        assert "bamboo.layer_costs.1 = 0: must be greater than 0" in message(
            bamboo_block, {"bamboo": {"layer_costs": [1, 0]}}
        )

    def test_faults_are_read(self) -> None:
        read = bamboo_block({"bamboo": {"fault_injection": [{"step": 2, "instruction": 7, "stage": 1}]}})
        assert read is not None
        assert read.fault_injection == (Fault(step=2, instruction=7, stage=1),)
        wrong = message(bamboo_block, {"bamboo": {"fault_injection": [{"step": 1, "how": "nuke"}]}})
        assert wrong == 'bamboo.fault_injection.0.how = "nuke": allowed: kill, stop, cut'

    def test_an_unknown_key_like_no_other_still_lists_the_known_ones(self) -> None:
        assert message(bamboo_block, {"bamboo": {"xyzzy": 1}}).startswith("bamboo.xyzzy: unknown key; Known keys: ena")

    def test_several_mistakes_are_told_at_once(self) -> None:
        text = message(bamboo_block, {"bamboo": {"redundency": "x", "time_out_seconds": 1, "pipelines": 0}})
        assert 'bamboo.redundency: unknown key; did you mean "redundancy"?' in text
        assert 'bamboo.time_out_seconds: unknown key; did you mean "timeout_seconds"?' in text
        assert "bamboo.pipelines = 0: must be greater than or equal to 1" in text
        assert len(text.splitlines()) == 3

    @pytest.mark.parametrize(
        ("key", "value", "text"),
        [
            ("redundancy", "maybe", 'bamboo.redundancy = "maybe": allowed: fit, eflb, lflb, off'),
            ("activation_swap", True, "bamboo.activation_swap = true: allowed: cpu, none"),
            ("pipelines", "2", 'bamboo.pipelines = "2": must be a JSON integer'),
            ("pipelines", 2.5, "bamboo.pipelines = 2.5: must be a JSON integer"),
            ("seed", True, "bamboo.seed = true: must be a JSON integer"),
            ("seed", -1, "bamboo.seed = -1: must be greater than or equal to 0"),
            ("min_stages", 0, "bamboo.min_stages = 0: must be greater than or equal to 1"),
            ("timeout_seconds", 0, "bamboo.timeout_seconds = 0: must be greater than 0"),
            ("timeout_seconds", float("inf"), "bamboo.timeout_seconds = Infinity: must be a finite number"),
            ("timeout_seconds", 1e300, "bamboo.timeout_seconds = 1e+300: must be less than or equal to 604800"),
            ("enabled", "yes", 'bamboo.enabled = "yes": must be a JSON boolean'),
            ("job", "a/b", 'bamboo.job = "a/b": must be 1 to 63 letters, digits'),
            ("job", "", 'bamboo.job = "": must be 1 to 63 letters, digits'),
            ("job", "x" * 64, f'bamboo.job = "{"x" * 64}": must be 1 to 63 letters, digits'),
        ],
    )
    def test_a_wrong_value_is_named_with_what_is_allowed(self, key: str, value: object, text: str) -> None:
        assert message(bamboo_block, {"bamboo": {key: value}}).startswith(text)

    @pytest.mark.parametrize("block", ["on", 1, [], 0])
    def test_a_block_that_is_no_object_is_refused(self, block: object) -> None:
        assert "must be an object" in message(bamboo_block, {"bamboo": block})

    def test_the_block_is_frozen(self) -> None:
        with pytest.raises(Exception, match="frozen"):
            BambooConfig().seed = 3  # type: ignore[misc]


class TestFindingTheConfig:
    CONFIG = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}

    def sources(self, folder: Path) -> Iterator[dict[str, Any]]:
        path = folder / "ds.json"
        path.write_text(json.dumps(self.CONFIG))
        encoded = base64.urlsafe_b64encode(json.dumps(self.CONFIG).encode()).decode()
        for config in (self.CONFIG, str(path), path, encoded):
            yield {"config": config}
            yield {"config_params": config}
        yield {"args": argparse.Namespace(deepspeed_config=str(path))}
        yield {"args": argparse.Namespace(deepspeed_config=None, deepscale_config=str(path))}
        yield {"args": argparse.Namespace(deepspeed_config=None), "config": self.CONFIG}

    def test_every_source_that_deepspeed_takes_is_read(self, tmp_path: Path) -> None:
        for source in self.sources(tmp_path):
            assert load_deepspeed_config(**source) == self.CONFIG, source

    def test_config_comes_before_config_params(self) -> None:
        assert load_deepspeed_config(config={"a": 1}, config_params={"a": 2}) == {"a": 1}

    def test_what_is_returned_is_a_deep_copy(self) -> None:
        mine = copy.deepcopy(self.CONFIG)
        load_deepspeed_config(config=mine)["optimizer"]["params"]["lr"] = 9
        assert mine == self.CONFIG

    def test_the_arguments_are_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "ds.json").write_text("{}")
        args = argparse.Namespace(deepspeed_config=None, deepscale_config=str(tmp_path / "ds.json"))
        before = copy.deepcopy(vars(args))
        load_deepspeed_config(args)
        assert vars(args) == before

    def test_hjson_comments_are_allowed(self, tmp_path: Path) -> None:
        (tmp_path / "ds.hjson").write_text('{\n  # the global batch\n  "train_batch_size": 8 // samples\n}')
        assert load_deepspeed_config(config=tmp_path / "ds.hjson") == {"train_batch_size": 8}

    def test_the_text_is_read_as_deepspeed_reads_it(self, tmp_path: Path) -> None:
        from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

        path = tmp_path / "ds.json"
        path.write_text('{"a": [1, 2.5e3, null, true], "b": {"c": "auto", "d": {}}, # why\n e: plain text\n}')
        assert load_deepspeed_config(config=str(path)) == load_ds_config(str(path))

    @pytest.mark.parametrize(
        ("args", "config"),
        [
            (argparse.Namespace(deepspeed_config="a.json"), {"train_batch_size": 1}),
            (argparse.Namespace(deepspeed_config="a.json", deepscale_config="b.json"), None),
        ],
    )
    def test_two_configs_are_refused(self, args: object, config: dict[str, Any] | None) -> None:
        assert "drop" in message(load_deepspeed_config, args, config=config)

    def test_no_config_is_refused(self) -> None:
        assert "--deepspeed_config FILE" in message(load_deepspeed_config, argparse.Namespace())

    @pytest.mark.parametrize("name", ["ds_conifg.json", "abc", "nowhere/ds.json", "e.30=", "x" * 5000, "a\0b"])
    def test_a_missing_file_is_named(self, name: str) -> None:
        assert "no such DeepSpeed config file" in message(load_deepspeed_config, config=name)

    def test_a_folder_is_no_config(self, tmp_path: Path) -> None:
        assert f"cannot read the DeepSpeed config {tmp_path}" in message(load_deepspeed_config, config=tmp_path)

    def test_a_syntax_error_is_told_with_path_and_line(self, tmp_path: Path) -> None:
        path = tmp_path / "ds.json"
        path.write_text('{\n  "train_batch_size": 8,\n  "optimizer": {"type" "SGD"}\n}')
        assert message(load_deepspeed_config, config=path).startswith(f"{path}:3:")

    @pytest.mark.parametrize("text", ['{"a": 1, "b": 2, "a": 3}', '{"x": {"a": 1, "a": 3}}'])
    def test_a_key_that_occurs_twice_is_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "ds.json"
        path.write_text(text)
        assert message(load_deepspeed_config, config=path) == f"{path}: duplicate keys: a; keep one of each"

    def test_a_file_that_holds_no_object_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "ds.json").write_text("[1, 2]")
        assert "must hold a JSON object" in message(load_deepspeed_config, config=tmp_path / "ds.json")

    def test_a_number_is_no_config(self) -> None:
        assert "must be a dict, a path or base64 text, not int" in message(load_deepspeed_config, config=3)


SUPPORTED: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True, "check_grad_overflow": False},
    "fp16": {"enabled": False},
    "zero_optimization": {"stage": 0},
    "tensorboard": {"enabled": True, "output_path": "runs"},
    "csv_monitor": {"enabled": True, "output_path": "runs"},
    "wandb": {"enabled": False},
    "comet": {"enabled": False},
    "wall_clock_breakdown": True,
    "steps_per_print": 10,
    "dump_state": True,
    "memory_breakdown": False,
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
    "pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False},
    "dataloader_drop_last": True,
    "zero_allow_untested_optimizer": True,
    "gradient_allreduce_op": "mean",
    "gradient_predivide_factor": 1.0,
    "prescale_gradients": False,
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": "auto"},
    "checkpoint": {"tag_validation": "Ignore"},
    "flops_profiler": {"enabled": False},
    "comms_logger": {"enabled": False},
    "compile": {"deepcompile": False},
    "hybrid_engine": {"enabled": False},
    "data_efficiency": {"enabled": False},
    "autotuning": {"enabled": False},
    "tensor_parallel": {"autotp_size": 1},
    "sequence_parallel_size": 1,
    "timers": {"throughput": {"enabled": True}},
    "disable_python_gc": False,
    "vocabulary_size": 256,
    "log_level": "warning",
    "bamboo": {},
    "gpt": {"layers": 4, "stage": 3},
}

REFUSED: dict[str, object] = {
    "zero_optimization": True,
    "zero_optimization.stage": 2,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_param.device": "nvme",
    "zero_optimization.cpu_offload": True,
    "zero_optimization.cpu_offload_param": True,
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "tensor_parallel.autotp_size": 2,
    "tensor_parallel.tp.tp_size": 2,
    "tensor_parallel.tensor_parallel.tp_size": 2,
    "sequence_parallel_size": 2,
    "expert_parallel.enabled": True,
    "use_data_before_expert_parallelism": True,
    "compile.deepcompile": True,
    "compile.enabled": True,
    "hybrid_engine.enabled": True,
    "torch_autocast.enabled": True,
    "fp16.auto_cast": True,
    "weight_quantization": {"post_init_quant": {"fc": {"num_bits": 8}}},
    "activation_checkpointing.contiguous_memory_optimization": True,
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
    "gradient_allreduce_op": "sum",
    "communication_data_type": "fp16",
    "data_types.grad_accum_dtype": "bf16",
    "data_types.buffer_dtype": "bf16",
    "data_types.keep_in_fp32_modules": ["norm"],
    "bf16.immediate_grad_update": True,
    "bf16.bf16_master_weights_and_grads": True,
    "bf16.bf16_optimizer_states": True,
    "fp16.fp16_master_weights_and_grads": True,
    "managed_gradient_accumulation": False,
    "optimizer.params.max_grad_norm": 1.0,
    "comms_logger.enabled": True,
    "flops_profiler.enabled": True,
    "autotuning.enabled": True,
    "data_efficiency.enabled": True,
    "checkpoint.use_node_local_storage": True,
    "checkpoint.load_universal": True,
    "checkpoint.writer": {"type": "FAST"},
    "datastates_ckpt": {"host_cache_size": 1},
}

FINE_TOP_LEVEL_KEYS = {
    *SUPPORTED,
    "gradient_accumulation_steps",  # batch.py
    "bfloat16",  # the old spelling of bf16
    "disable_allgather",  # read by DeepSpeed, used nowhere
    "seq_parallel_communication_data_type",  # means nothing without sequence parallelism, which is refused
    "zero_force_ds_cpu_optimizer",  # means nothing without offloading, which is refused
    "aio",  # sizes of buffers for offloading, which is refused
    "data_parallel_size",  # read together with sequence_parallel_size only, which is refused
}


class RecordingConfig(dict):  # type: ignore[type-arg]
    """A config that remembers which of its keys were asked for."""

    asked: set[str] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        return KeysView(self)


class TestRefusals:
    def test_a_config_with_all_that_is_supported_passes(self) -> None:
        check_supported(SUPPORTED)

    def test_an_empty_config_and_one_full_of_auto_pass(self) -> None:
        check_supported({})
        check_supported({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto"}, "fp16": "auto"})

    def test_every_row_of_the_table_has_a_test(self) -> None:
        assert {row.key for row in REFUSALS} == set(REFUSED)

    @pytest.mark.parametrize(("key", "value"), REFUSED.items())
    def test_a_refused_key_is_named_with_the_value_found(self, key: str, value: object) -> None:
        with pytest.raises(UnsupportedFeatureError) as caught:
            check_supported(nested(key, value))
        lines = str(caught.value).splitlines()
        assert len(lines) == 2
        assert lines[1].startswith(f"  {key} = {json.dumps(value)}: ")

    @pytest.mark.parametrize(
        ("stage", "why"), [(1, "ZeRO-1 is not supported yet"), (2, "incompatible"), (3, "incompatible")]
    )
    def test_zero_1_is_not_yet_and_zero_2_never(self, stage: int, why: str) -> None:
        text = message(check_supported, {"zero_optimization": {"stage": stage}})
        assert f"zero_optimization.stage = {stage}: " in text
        assert why in text

    @pytest.mark.parametrize("key", sorted(REMOVED_KEYS))
    def test_a_key_deepspeed_has_removed_is_named(self, key: str) -> None:
        from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

        config = {"train_batch_size": 1, key: {"enabled": False}}
        assert f"  {key}: DeepSpeed has removed it" in message(check_supported, config)
        with pytest.raises(DeepSpeedConfigError):
            DeepSpeedConfig(config)

    def test_all_refusals_come_in_one_message(self) -> None:
        config = {
            "zero_optimization": {"stage": 2},
            "amp": {},
            "optimizer": {"type": "Muon"},
            "prescale_gradients": True,
        }
        lines = message(check_supported, config).splitlines()
        assert [line.split()[0].rstrip(":") for line in lines[1:]] == [
            "zero_optimization.stage",
            "prescale_gradients",
            "amp",
            "optimizer.type",
        ]

    @pytest.mark.parametrize("bf16", ["bf16", "bfloat16"])
    def test_fp16_and_bf16_together_are_refused(self, bf16: str) -> None:
        text = message(check_supported, {"fp16": {"enabled": True}, bf16: {"enabled": True}})
        assert f"fp16.enabled and {bf16}.enabled are both true" in text

    def test_a_mesh_of_processes_is_refused(self) -> None:
        text = message(check_supported, {"data_parallel_size": 2, "sequence_parallel_size": 1})
        assert "data_parallel_size = 2 with sequence_parallel_size" in text

    @pytest.mark.parametrize(
        "name", ["Adam", "adamw", "ADAGRAD", "Lamb", "lion", "SGD", "RMSprop", "NAdam", "Adafactor"]
    )
    def test_an_optimizer_deepspeed_finds_is_accepted(self, name: str) -> None:
        check_supported({"optimizer": {"type": name}})

    @pytest.mark.parametrize("name", ["Muon", "MuAdam", "LBFGS", "SparseAdam", "OneBitAdam", "sgd", "Optimizer.x", 3])
    def test_an_optimizer_that_would_fail_later_is_refused(self, name: object) -> None:
        assert f"optimizer.type = {json.dumps(name)}: " in message(check_supported, {"optimizer": {"type": name}})

    def test_a_misspelt_optimizer_names_the_nearest(self) -> None:
        assert 'unknown optimizer; did you mean "SGD"? Known: Adam,' in message(
            check_supported, {"optimizer": {"type": "sgd"}}
        )

    def test_every_key_that_deepspeed_reads_is_decided(self) -> None:
        """A newer DeepSpeed that reads a new key fails here: decide whether Bamboo keeps its meaning."""
        from deepspeed.runtime.config import DeepSpeedConfig

        config = RecordingConfig(train_batch_size=1)
        RecordingConfig.asked.clear()
        DeepSpeedConfig(config)
        decided = FINE_TOP_LEVEL_KEYS | set(REMOVED_KEYS) | {row.key.split(".")[0] for row in REFUSALS}
        assert len(RecordingConfig.asked) > 50
        assert RecordingConfig.asked - decided == set()


class TestBatchSizes:
    @pytest.mark.parametrize(
        ("keys", "pipelines", "expected"),
        [
            ({"train": 32, "micro": 4}, 3, (32, 4, 8)),
            ({"train": 32, "micro": 4, "gas": "auto"}, 8, (32, 4, 8)),
            ({"train": 32, "micro": None, "gas": 4}, 2, (32, 4, 8)),
            ({"micro": 4, "gas": 3}, 2, (24, 4, 6)),
            ({"train": 32}, 4, (32, 8, 4)),
            ({"micro": 4, "train": "auto"}, 4, (16, 4, 4)),
            ({"train": 32, "micro": 4, "gas": 4}, 2, (32, 4, 8)),
            ({"train": 1, "micro": 1}, 1, (1, 1, 1)),
        ],
    )
    def test_absent_keys_follow_from_the_others(
        self, keys: dict[str, Any], pipelines: int, expected: tuple[int, int, int]
    ) -> None:
        assert dataclasses.astuple(resolve_batch_sizes(batch_config(keys), pipelines)) == expected

    @pytest.mark.parametrize(
        ("keys", "pipelines", "text"),
        [
            (
                {"train": 100, "micro": 8},
                2,
                "train_batch_size (100) is not a multiple of train_micro_batch_size_per_gpu (8): 100 = 12 x 8 + 4",
            ),
            (
                {"train": 100, "gas": 4},
                3,
                "train_batch_size (100) is not a multiple of gradient_accumulation_steps (4) x pipelines (3) = 12: "
                "100 = 8 x 12 + 4",
            ),
            (
                {"train": 64, "micro": 4, "gas": 8},
                4,
                "train_batch_size (64) is not train_micro_batch_size_per_gpu (4) x gradient_accumulation_steps (8) x "
                "pipelines (4): 4 x 8 x 4 = 128; leave gradient_accumulation_steps out: train_batch_size does not "
                "depend on the number of pipelines, they share its 64 / 4 = 16 micro-batches",
            ),
            (
                {"train": 65, "micro": 4, "gas": 8},
                2,
                "train_batch_size (65) is not train_micro_batch_size_per_gpu (4) x gradient_accumulation_steps (8) x "
                "pipelines (2): 4 x 8 x 2 = 64",
            ),
            (
                {"train": 8, "micro": 4},
                3,
                "train_batch_size (8) / train_micro_batch_size_per_gpu (4) = 2 micro-batches for 3 pipelines: 1 would "
                "have none; use a smaller micro-batch, a larger batch, or bamboo.pipelines = 2",
            ),
            ({"gas": 4}, 2, "no batch size: set train_batch_size"),
            ({}, 2, "no batch size: set train_batch_size"),
            ({"train": 0}, 1, "train_batch_size = 0: must be a positive integer"),
            ({"train": 8.0}, 1, "train_batch_size = 8.0: must be a positive integer"),
            ({"micro": True}, 1, "train_micro_batch_size_per_gpu = true: must be a positive integer"),
            ({"train": 8, "gas": "2"}, 1, 'gradient_accumulation_steps = "2": must be a positive integer'),
        ],
    )
    def test_what_does_not_fit_is_told_as_an_equation(self, keys: dict[str, Any], pipelines: int, text: str) -> None:
        assert message(resolve_batch_sizes, batch_config(keys), pipelines).startswith(text)

    @settings(deadline=None)  # the first example imports deepspeed
    @given(
        train=st.none() | st.integers(1, 300),
        micro=st.none() | st.integers(1, 20),
        gas=st.none() | st.integers(1, 20),
        pipelines=st.integers(1, 9),
    )
    def test_sizes_multiply_and_agree_with_deepspeed_where_it_is_right(
        self, train: int | None, micro: int | None, gas: int | None, pipelines: int
    ) -> None:
        config = batch_config({"train": train, "micro": micro, "gas": gas})
        try:
            sizes = resolve_batch_sizes(config, pipelines)
        except ConfigError:
            assert stock_sizes(config, pipelines) is None
            return
        assert sizes.train_batch_size == sizes.micro_batch_size * sizes.micro_batches
        assert sizes.micro_batches >= pipelines
        stock = stock_sizes(config, pipelines)
        if sizes.micro_batches % pipelines == 0:
            per_pipeline = sizes.micro_batches // pipelines
            assert stock == (sizes.train_batch_size, sizes.micro_batch_size, per_pipeline)
        else:
            assert stock is None


def batch_config(keys: dict[str, Any]) -> dict[str, Any]:
    """Write short names as DeepSpeed's keys."""
    names = {
        "train": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "gas": "gradient_accumulation_steps",
    }
    return {names[short]: value for short, value in keys.items()}


def stock_sizes(config: dict[str, Any], pipelines: int) -> tuple[int, int, int] | None:
    """Return what DeepSpeed makes of the batch keys with as many data-parallel ranks; None where it refuses."""
    from deepspeed.runtime.config import DeepSpeedConfig

    stock = DeepSpeedConfig.__new__(DeepSpeedConfig)
    stock.world_size = pipelines
    stock._initialize_params(dict(config))
    try:
        stock._configure_train_batch_size()
    except AssertionError:
        return None
    return stock.train_batch_size, stock.train_micro_batch_size_per_gpu, stock.gradient_accumulation_steps


class TestPrecisionAndClipping:
    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({}, "fp32"),
            ({"bf16": {"enabled": True}}, "bf16"),
            ({"bfloat16": {"enabled": True}}, "bf16"),
            ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "fp32"),
            ({"fp16": {"enabled": True, "loss_scale": 0}}, "fp16"),
            ({"fp16": {}, "bf16": {"enabled": "auto"}}, "fp32"),
            ({"fp16": "auto", "bf16": "auto"}, "fp32"),
        ],
    )
    def test_the_precision_is_what_deepspeed_takes(self, config: dict[str, Any], expected: str) -> None:
        from deepspeed.runtime.config import DeepSpeedConfig

        assert precision(config) == expected
        stock = DeepSpeedConfig(solo_config(config, SIZES, reporter=True, on_cpu=True))
        read = "fp16" if stock.float16_config.enabled else "bf16" if stock.bfloat16_config.enabled else "fp32"
        assert read == expected

    def test_two_precisions_or_no_object_are_refused(self) -> None:
        assert "choose one" in message(precision, {"fp16": {"enabled": True}, "bf16": {"enabled": True}})
        assert 'bf16 = true: must be an object, such as {"enabled": true}' in message(precision, {"bf16": True})

    def test_clipping_has_deepspeed_s_default(self) -> None:
        from deepspeed.runtime.config import DeepSpeedConfig

        assert gradient_clipping({}) == DeepSpeedConfig({"train_batch_size": 1}).gradient_clipping
        assert gradient_clipping({"gradient_clipping": "auto"}) == 1.0

    @pytest.mark.parametrize(("value", "expected"), [(0, 0.0), (0.5, 0.5), (1e-3, 1e-3), (2, 2.0)])
    def test_clipping_is_read(self, value: float, expected: float) -> None:
        assert gradient_clipping({"gradient_clipping": value}) == expected

    @pytest.mark.parametrize("value", [-1, True, "1.0", float("nan"), float("inf")])
    def test_clipping_that_is_no_norm_is_refused(self, value: object) -> None:
        assert "must be a number >= 0" in message(gradient_clipping, {"gradient_clipping": value})


class TestTheWorldOfOne:
    def world(self, config: dict[str, Any], *, reporter: bool = True, on_cpu: bool = True) -> dict[str, Any]:
        return solo_config(config, SIZES, reporter=reporter, on_cpu=on_cpu)

    def test_deepspeed_is_told_of_the_global_batch(self) -> None:
        from deepspeed.runtime.config import DeepSpeedConfig

        stock = DeepSpeedConfig(self.world({"train_batch_size": 32, "gradient_accumulation_steps": 2}))
        assert stock.world_size == 1
        assert (stock.train_batch_size, stock.train_micro_batch_size_per_gpu) == (32, 4)
        assert stock.gradient_accumulation_steps == 8

    def test_deepspeed_takes_a_config_with_all_that_is_supported(self) -> None:
        from deepspeed.runtime.config import DeepSpeedConfig

        stock = DeepSpeedConfig(self.world(SUPPORTED))
        assert stock.monitor_config.tensorboard.enabled
        assert stock.gradient_clipping == 1.0

    def test_the_user_s_config_is_not_changed(self) -> None:
        mine = copy.deepcopy(SUPPORTED)
        self.world(mine, reporter=False)["optimizer"]["params"]["lr"] = 9
        assert mine == SUPPORTED

    def test_the_type_of_gradients_is_not_passed_on(self) -> None:
        data_types = {"grad_accum_dtype": "fp32", "param_dtype": "bf16"}
        assert self.world({"bf16": {"enabled": True}, "data_types": data_types})["data_types"] == {
            "param_dtype": "bf16"
        }

    def test_the_bamboo_block_stays_and_can_be_dumped(self) -> None:
        assert json.loads(json.dumps(self.world({"bamboo": {"seed": 3}})))["bamboo"] == {"seed": 3}

    def test_only_the_reporter_monitors_and_dumps(self) -> None:
        quiet, loud = self.world(SUPPORTED, reporter=False), self.world(SUPPORTED)
        assert [quiet[key]["enabled"] for key in ("tensorboard", "csv_monitor", "wandb", "comet")] == [False] * 4
        assert (quiet["dump_state"], loud["dump_state"]) == (False, True)
        assert loud["tensorboard"] == SUPPORTED["tensorboard"]
        assert "comet" not in self.world({}, reporter=False)

    @pytest.mark.parametrize("name", ["Adam", "AdamW", "adam"])
    def test_adam_on_cpu_needs_no_compiler(self, name: str) -> None:
        config = {"optimizer": {"type": name, "params": {"lr": 1e-3, "bias_correction": True}}}
        assert self.world(config)["optimizer"]["params"] == {"lr": 1e-3, "torch_adam": True}
        assert self.world(config, on_cpu=False)["optimizer"] == config["optimizer"]

    def test_adam_without_parameters_still_needs_no_compiler(self) -> None:
        assert self.world({"optimizer": {"type": "Adam"}})["optimizer"]["params"] == {"torch_adam": True}

    @pytest.mark.parametrize("params", [{"torch_adam": False}, {"bias_correction": False}])
    def test_a_demand_for_the_fused_adam_on_cpu_is_refused(self, params: dict[str, Any]) -> None:
        with pytest.raises(UnsupportedFeatureError, match=r"optimizer\.params\."):
            self.world({"optimizer": {"type": "Adam", "params": params}})

    @pytest.mark.parametrize("name", ["Lamb", "LION"])
    def test_an_optimizer_deepspeed_would_compile_is_refused_on_cpu(self, name: str) -> None:
        config = {"optimizer": {"type": name}}
        with pytest.raises(UnsupportedFeatureError, match="on CPU use Adam, AdamW, Adagrad, SGD"):
            self.world(config)
        assert self.world(config, on_cpu=False)["optimizer"] == config["optimizer"]

    def test_other_optimizers_are_passed_on(self) -> None:
        config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
        assert self.world(config)["optimizer"] == config["optimizer"]

    def test_autos_that_deepspeed_would_trip_over_are_gone(self) -> None:
        world = self.world({"gradient_clipping": "auto", "bf16": "auto", "train_batch_size": "auto"})
        assert set(world) == {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}


WITHOUT_THE_FRONT_DOOR = """
import sys, types
package = sys.modules["bamboo_ds"] = types.ModuleType("bamboo_ds")
package.__path__ = [sys.argv[1]]
from bamboo_ds.config import *
config = load_deepspeed_config(config={"bamboo": {}, "train_batch_size": 8, "optimizer": {"type": "AdamW"}})
bamboo_block(config)
check_supported(config)
solo_config(config, resolve_batch_sizes(config, 2), reporter=True, on_cpu=True)
print(sorted({"torch", "deepspeed"} & set(sys.modules)))
"""


def test_reading_a_config_imports_neither_torch_nor_deepspeed() -> None:
    package = str(Path(__file__).resolve().parents[1] / "bamboo_ds")
    command = [sys.executable, "-c", WITHOUT_THE_FRONT_DOOR, package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


class TestTheEarlyConfig:
    """What a worker can know of its config before its script calls `initialize`."""

    @pytest.mark.parametrize(
        "spelling", [["--deepspeed_config", "F"], ["--deepspeed-config=F"], ["x", "--deepspeed_config=F"]]
    )
    def test_it_is_found_among_the_arguments(
        self, spelling: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "ds.json"
        path.write_text('{"bamboo": {"min_stages": 2}}')
        monkeypatch.setattr("sys.argv", ["script.py", *(part.replace("F", str(path)) for part in spelling)])
        assert early_config() == {"bamboo": {"min_stages": 2}}

    def test_the_agents_word_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "ds.json"
        path.write_text("{}")
        monkeypatch.setattr("sys.argv", ["script.py", "--deepspeed_config", "other.json"])
        monkeypatch.setenv("BAMBOO_CONFIG", str(path))
        assert early_config() == {}

    def test_it_may_be_unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.argv", ["script.py", "--stages", "4", "--deepspeed_config"])
        assert early_config() is None
