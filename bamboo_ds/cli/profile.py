"""`bamboo-ds profile`: time each layer of a model on the accelerator at hand, for `bamboo-ds simulate`.

Each layer runs by itself, with the output of the one before as its input, so what is timed is what a stage of it costs.
The last one is timed with the loss.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.workload import Layer, Workload

if TYPE_CHECKING:
    import torch

    from bamboo_ds.module.layers import StageLayers

__all__ = ["ProfileOptions", "profile"]

MOMENT_BYTES, MASTER_BYTES = 8, 4
"""Per parameter: the two fp32 moments of Adam; an fp32 master where weights are of less."""

_DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What is measured."""

    target: Annotated[
        str,
        typer.Argument(
            help="FILE.py:FUNCTION or MODULE:FUNCTION that returns (layers, loss_fn, (inputs, labels)): layers as for "
            "PipelineModule, one micro-batch.",
            show_default=False,
        ),
    ]
    output: Annotated[Path, typer.Option(help="The JSON file to write.")] = Path("workload.json")
    stages: Annotated[
        int | None, typer.Option(help="P.  [default: a stage per layer, 8 at most]", show_default=False)
    ] = None
    pipelines: Annotated[int, typer.Option(help="D.")] = 4
    micro_batches: Annotated[
        int | None, typer.Option(help="M, of the global batch.  [default: 2 P D]", show_default=False)
    ] = None
    precision: Annotated[str, typer.Option(help=f"Of weights and activations: {', '.join(_DTYPES)}.")] = "fp32"
    repeats: Annotated[int, typer.Option(help="Medians are over so many, after two to warm up.")] = 10
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object only.")] = False


def profile(options: ProfileOptions) -> None:
    """Time forward and backward of each layer, and measure activations, gradients and state in bytes."""
    if options.repeats < 1:
        raise ConfigError(f"--repeats {options.repeats}: must be at least 1")
    if options.precision not in _DTYPES:
        raise ConfigError(f"--precision {options.precision}: must be one of {', '.join(_DTYPES)}")
    subject = _subject(options)
    layers = measure(subject, repeats=options.repeats)
    stages = options.stages or min(len(layers), 8)
    workload = Workload(
        name=options.target.rpartition(":")[2],
        layers=tuple(layers),
        micro_batch_samples=subject.samples,
        micro_batches=options.micro_batches or 2 * stages * options.pipelines,
        num_stages=stages,
        pipelines=options.pipelines,
        source=f"bamboo-ds profile on {subject.device}, {options.precision}, median of {options.repeats}",
    )
    workload.write(options.output)
    if not options.as_json:
        Console(width=None if sys.stdout.isatty() else 120).print(_table(workload, options.output))
    typer.echo(json.dumps({**asdict(workload), "output": str(options.output)}))


@dataclass(slots=True)
class Subject:
    """A model and a micro-batch, on their device.

    Attributes:
        built: its layers.
        loss_fn: of (outputs, labels).
        inputs: of the first layer.
        labels: of the loss.
        samples: rows of the micro-batch.
        device: name of the accelerator.
        synchronize: waits until the accelerator is done.
    """

    built: StageLayers
    loss_fn: Callable[[Any, Any], torch.Tensor]
    inputs: Any
    labels: Any
    samples: int
    device: str
    synchronize: Callable[[], Any]


def measure(subject: Subject, *, repeats: int) -> list[Layer]:
    """Return what each layer costs and weighs.

    Args:
        subject: what is measured.
        repeats: how many passes the medians are over.
    """
    found = []
    value = subject.inputs
    counted: set[int] = set()
    for index, function in enumerate(subject.built.functions):
        last = index == len(subject.built.functions) - 1
        run = _with_loss(function, subject) if last else function
        times = [_pass(run, value, subject.synchronize) for _ in range(repeats + 2)][2:]
        output = function(_fresh(value))
        module = subject.built.modules.get(index)
        weights = [] if module is None or id(module) in counted else list(module.parameters())
        counted.add(id(module))
        found.append(
            Layer(
                name=f"{index}: {_name(function, module)}",
                forward_seconds=statistics.median(forward for forward, _ in times),
                backward_seconds=statistics.median(backward for _, backward in times),
                activation_bytes=sum(each.numel() * each.element_size() for each in _tensors(output)),
                gradient_bytes=sum(each.numel() * each.element_size() for each in weights if each.requires_grad),
                state_bytes=sum(_state_bytes(each) for each in weights),
            )
        )
        value = output
    return found


def _pass(run: Callable[[Any], Any], value: Any, synchronize: Callable[[], Any]) -> tuple[float, float]:
    """Run a layer forward and backward once, and return the seconds of both."""
    import torch

    inputs = _fresh(value)
    synchronize()
    started = time.perf_counter()
    output = run(inputs)
    synchronize()
    between = time.perf_counter()
    outputs = [each for each in _tensors(output) if each.requires_grad]
    if not outputs:  # nothing to learn and nothing before it to learn for
        return between - started, 0.0
    gradients = [torch.ones_like(each) for each in outputs]
    synchronize()
    begun = time.perf_counter()
    torch.autograd.backward(outputs, gradients)
    synchronize()
    return between - started, time.perf_counter() - begun


def _with_loss(function: Callable[[Any], Any], subject: Subject) -> Callable[[Any], torch.Tensor]:
    return lambda value: subject.loss_fn(function(value), subject.labels)


def _fresh(value: Any) -> Any:
    """Return tensors as they come from another stage: without history; those that can be learnt through ask for it."""
    if isinstance(value, tuple | list):
        return type(value)(_fresh(each) for each in value)
    if not hasattr(value, "detach"):
        return value
    learnt = value.requires_grad and value.is_floating_point()
    return value.detach().requires_grad_(learnt)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "numel"):
        yield value


def _state_bytes(weight: torch.Tensor) -> int:
    """Return what moves with a weight: itself and, if it is trained, the state of Adam and an fp32 master."""
    per_value = weight.element_size()
    if weight.requires_grad:
        per_value += MOMENT_BYTES + (MASTER_BYTES if per_value < 4 else 0)
    return weight.numel() * per_value


def _name(function: Callable[[Any], Any], module: torch.nn.Module | None) -> str:
    return type(module).__name__ if module is not None else getattr(function, "__name__", "function")


# ---- what is profiled ------------------------------------------------------------------------------------------------


def _subject(options: ProfileOptions) -> Subject:
    import torch
    from deepspeed.accelerator import get_accelerator

    from bamboo_ds.module.layers import build_stage, seed_all

    layers, loss_fn, (inputs, labels) = _returned(options.target)
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.precision]
    built = build_stage(list(layers), stage=0, bounds=(0, len(layers)), tied={}, seed_layer=seed_all)
    for module in built.modules.values():
        module.to(device=device, dtype=dtype)
    name = accelerator.device_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return Subject(
        built=built,
        loss_fn=loss_fn,
        inputs=_moved(inputs, device, dtype),
        labels=_moved(labels, device, None),
        samples=len(next(_tensors(inputs))),
        device=name,
        synchronize=accelerator.synchronize,
    )


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_moved(each, device, dtype) for each in value)
    floats = dtype if value.is_floating_point() else None
    return value.to(device=device, dtype=floats)


def _returned(target: str) -> tuple[Sequence[Any], Callable[[Any, Any], Any], tuple[Any, Any]]:
    """Call the function that is named.

    Raises:
        ConfigError: it cannot be found, or returns something else.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{target}: must be FILE.py:FUNCTION or MODULE:FUNCTION")
    function = getattr(_module(place), name, None)
    if not callable(function):
        raise ConfigError(f"{target}: {place} has no function {name}")
    found = function()
    try:
        layers, loss_fn, (inputs, labels) = found
    except (TypeError, ValueError):
        raise ConfigError(f"{target}: must return (layers, loss_fn, (inputs, labels)), not {found!r}") from None
    if not isinstance(layers, Iterable) or not callable(loss_fn) or not list(_tensors(inputs)):
        raise ConfigError(f"{target}: must return layers, a function of (outputs, labels), and tensors")
    return list(layers), loss_fn, (inputs, labels)


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(place)
        except ImportError as error:
            raise ConfigError(f"cannot import {place}: {error}") from None
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"{place}: no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _table(workload: Workload, output: Path) -> Table:
    columns = ("layer", "forward ms", "backward ms", "activations MB", "gradients MB", "state MB")
    table = Table(*columns, title=f"{workload.name}: {workload.source}", caption=f"written to {output}")
    for column in table.columns[1:]:
        column.justify = "right"
    for layer in workload.layers:
        sizes = (layer.activation_bytes, layer.gradient_bytes, layer.state_bytes)
        times = (1e3 * layer.forward_seconds, 1e3 * layer.backward_seconds)
        table.add_row(layer.name, *(f"{each:.3f}" for each in times), *(f"{size / 1e6:.3f}" for size in sizes))
    return table
