"""Refuses, by name and at start, what DeepSpeed offers and Bamboo does not (yet) do.

The trick is a table: one row per key, with the values it refuses and why. It was written against every key that
DeepSpeed 0.19.8 reads. A key that DeepSpeed does not know either is nobody's business here (scripts keep their own
settings in the same file).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bamboo_ds.config.keys import Config, did_you_mean, is_on, show, value_at
from bamboo_ds.errors import UnsupportedFeatureError


@dataclass(frozen=True, slots=True)
class Refusal:
    """One key of the DeepSpeed config that Bamboo refuses for some of its values."""

    key: str
    refused: Callable[[object], bool]
    why: str


def _given(value: object) -> bool:
    return value not in (None, False, {}, [], "")


def _more_than_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _is_off(value: object) -> bool:
    return not is_on(value)


def _other_than(*accepted: object) -> Callable[[object], bool]:
    def refused(value: object) -> bool:
        return (value.lower() if isinstance(value, str) else value) not in accepted

    return refused


_ZERO_1 = "ZeRO-1 is not supported yet; use stage 0"
_ZERO_2 = "ZeRO-2 and ZeRO-3 are incompatible with pipelines; use stage 0"
_OFFLOAD = "offloading belongs to ZeRO, which is not supported yet"
_TENSOR = "tensor slicing is not supported yet; use more stages"
_SEQUENCE = "sequence parallelism is not supported yet; use more stages"
_EXPERT = "expert parallelism is not supported yet"
_COMPILE = "compiled layers are not supported yet"
_ONE_SUM = "gradients are summed once, in fp32, already divided by the micro-batches of the global batch; leave it out"
_ZERO_ONLY = "DeepSpeed allows it with ZeRO only, which is not supported yet"
_FP32 = ("fp32", "float32", "float", "torch.float32")

REFUSALS = (
    # ZeRO and its relatives: DeepSpeed sees a world of one, so there is nothing it could shard.
    Refusal("zero_optimization", lambda value: value is True, _ZERO_1),
    Refusal("zero_optimization.stage", lambda value: value == 1, _ZERO_1),
    Refusal("zero_optimization.stage", lambda value: value not in (0, 1), _ZERO_2),
    Refusal("zero_optimization.offload_optimizer.device", _other_than("none"), _OFFLOAD),
    Refusal("zero_optimization.offload_param.device", _other_than("none"), _OFFLOAD),
    Refusal("zero_optimization.cpu_offload", is_on, _OFFLOAD),
    Refusal("zero_optimization.cpu_offload_param", is_on, _OFFLOAD),
    Refusal("zero_optimization.zenflow", _given, "ZenFlow is not supported yet"),
    # Other ways to cut a model.
    Refusal("tensor_parallel.autotp_size", _more_than_one, _TENSOR),
    Refusal("tensor_parallel.tp.tp_size", _more_than_one, _TENSOR),
    Refusal("tensor_parallel.tensor_parallel.tp_size", _more_than_one, _TENSOR),
    Refusal("sequence_parallel_size", _more_than_one, _SEQUENCE),
    Refusal("expert_parallel.enabled", is_on, _EXPERT),
    Refusal("use_data_before_expert_parallelism", is_on, _EXPERT),
    # What changes how layers run.
    Refusal("compile.deepcompile", is_on, _COMPILE),
    Refusal("compile.enabled", is_on, _COMPILE),
    Refusal("hybrid_engine.enabled", is_on, "the hybrid engine has no pipelines"),
    Refusal("torch_autocast.enabled", is_on, "autocast is not supported yet; use bf16 or fp16"),
    Refusal("fp16.auto_cast", is_on, "inputs are not cast; return them as fp16 from the data loader"),
    Refusal("weight_quantization", _given, "quantized weights are not supported yet"),
    Refusal(
        "activation_checkpointing.contiguous_memory_optimization",
        is_on,
        "its buffers are one per process, and redundant layers would write into those of the own layers; leave it out",
    ),
    # What changes how gradients are added up.
    Refusal("prescale_gradients", is_on, _ONE_SUM),
    Refusal("gradient_predivide_factor", _other_than(1), _ONE_SUM),
    Refusal("gradient_allreduce_op", _other_than("mean"), "a sum would depend on the number of pipelines; use mean"),
    Refusal("communication_data_type", _other_than(*_FP32), _ONE_SUM),
    Refusal("data_types.grad_accum_dtype", _other_than(*_FP32), "gradients are accumulated in fp32; leave it out"),
    Refusal("data_types.buffer_dtype", _given, "buffers keep the type they were made with; leave it out"),
    Refusal("data_types.keep_in_fp32_modules", _given, "exceptions from fp16 and bf16 are not supported yet"),
    Refusal("bf16.immediate_grad_update", is_on, "gradients are added after each micro-batch; leave it out"),
    Refusal("bf16.bf16_master_weights_and_grads", is_on, _ZERO_ONLY),
    Refusal("bf16.bf16_optimizer_states", is_on, _ZERO_ONLY),
    Refusal("fp16.fp16_master_weights_and_grads", is_on, _ZERO_ONLY),
    Refusal("managed_gradient_accumulation", _is_off, "DeepSpeed has no pipelines without it"),
    Refusal("optimizer.params.max_grad_norm", _given, "DeepSpeed refuses it; use gradient_clipping"),
    # What measures or steers DeepSpeed's own machinery.
    Refusal("comms_logger.enabled", is_on, "DeepSpeed's collectives have no peers under Bamboo: it would log nothing"),
    Refusal("flops_profiler.enabled", is_on, "the flops profiler is not supported yet"),
    Refusal("autotuning.enabled", is_on, "autotuning has no pipelines"),
    Refusal("data_efficiency.enabled", is_on, "curriculum and random-LTD are not supported yet"),
    # Checkpoints.
    Refusal("checkpoint.use_node_local_storage", is_on, "layers move between nodes; use storage that all nodes share"),
    Refusal("checkpoint.load_universal", is_on, "universal checkpoints are not supported yet"),
    Refusal("checkpoint.writer", _given, "the fast checkpoint writer is not supported yet; leave it out"),
    Refusal("datastates_ckpt", _given, "DataStates checkpoints are not supported yet"),
)

REMOVED_KEYS = {
    "amp": "use bf16 or fp16",
    "compression_training": "leave it out",
    "curriculum_learning": "leave it out",
    "eigenvalue": "leave it out",
    "elasticity": "the bamboo block takes its place",
    "graph_harvesting": "leave it out",
    "nebula": "leave it out",
    "progressive_layer_drop": "leave it out",
    "quantize_training": "leave it out",
    "sparse_attention": "leave it out",
    "sparse_gradients": "leave it out",
}
"""Keys that DeepSpeed 0.19 removed and refuses even where they are switched off."""

DEEPSPEED_OPTIMIZERS = ("adam", "adamw", "adagrad", "lamb", "lion")
"""The optimizers of DeepSpeed's own list that we run; DeepSpeed takes these names in any case."""

REFUSED_OPTIMIZERS = {
    "muon": "it needs marks on parameters that redundant layers do not carry; not supported yet",
    "muadam": "it needs shapes that redundant layers do not carry; not supported yet",
    "muadamw": "it needs shapes that redundant layers do not carry; not supported yet",
    "musgd": "it needs shapes that redundant layers do not carry; not supported yet",
    "lbfgs": "it evaluates the loss several times in a step, which a pipeline cannot do",
    "sparseadam": "sparse gradients are not supported yet",
}

TORCH_OPTIMIZERS = ("Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Names for the message only: DeepSpeed takes whatever class of ``torch.optim`` has exactly the given name."""


def check_supported(config: Config) -> None:
    """Refuse every key of a DeepSpeed config that asks for something Bamboo does not do.

    Raises:
        UnsupportedFeatureError: One line for each refused key: the value found, and why or what instead.
    """
    lines = [
        *_refused_keys(config),
        *_removed_keys(config),
        *_refused_combinations(config),
        *_refused_optimizer(config),
    ]
    if lines:
        raise UnsupportedFeatureError("\n  ".join(["Bamboo does not support this DeepSpeed config:", *lines]))


def _refused_keys(config: Config) -> Iterator[str]:
    for row in REFUSALS:
        value = value_at(config, row.key)
        if value is not None and row.refused(value):
            yield f"{row.key} = {show(value)}: {row.why}"


def _removed_keys(config: Config) -> Iterator[str]:
    for key, instead in REMOVED_KEYS.items():
        if key in config:
            yield f"{key}: DeepSpeed has removed it and refuses the key; {instead}"


def _refused_combinations(config: Config) -> Iterator[str]:
    bf16_key = "bf16" if value_at(config, "bf16") is not None else "bfloat16"
    if is_on(value_at(config, "fp16.enabled")) and is_on(value_at(config, f"{bf16_key}.enabled")):
        yield f"fp16.enabled and {bf16_key}.enabled are both true: choose one"
    if "sequence_parallel_size" in config and "data_parallel_size" in config:
        yield (
            f"data_parallel_size = {show(config['data_parallel_size'])} with sequence_parallel_size: DeepSpeed would "
            "build a mesh of processes; leave both out, bamboo.pipelines bounds the pipelines"
        )


def _refused_optimizer(config: Config) -> Iterator[str]:
    name = value_at(config, "optimizer.type")
    if name is None:
        return
    if not isinstance(name, str):
        yield f"optimizer.type = {show(name)}: must be a name such as {show('AdamW')}"
    elif name.lower() in REFUSED_OPTIMIZERS:
        yield f"optimizer.type = {show(name)}: {REFUSED_OPTIMIZERS[name.lower()]}"
    elif name.lower() not in DEEPSPEED_OPTIMIZERS and name not in TORCH_OPTIMIZERS and not _torch_has(name):
        known = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", *TORCH_OPTIMIZERS)
        hint = did_you_mean(name, known) or ";"
        yield f"optimizer.type = {show(name)}: unknown optimizer{hint} Known: {', '.join(known)}"


def _torch_has(name: str) -> bool:
    """Look a name up where DeepSpeed would; imports torch, so it is asked for uncommon names only."""
    import torch

    found = getattr(torch.optim, name, None)
    return isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
