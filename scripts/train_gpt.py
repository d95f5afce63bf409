"""Train a byte-level GPT as a DeepSpeed pipeline with Bamboo underneath: the project's main job.

Starts like any DeepSpeed script, with one process per worker::

    bamboo-ds run --local-nodes 8 scripts/train_gpt.py --deepspeed_config ds_configs/gpt_tiny.json --stages 4
    torchrun --nproc-per-node 8 scripts/train_gpt.py --deepspeed_config ds_configs/gpt_tiny.json --stages 4
    deepspeed scripts/train_gpt.py --deepspeed_config ds_configs/gpt2_xl.json --stages 8

The text is the standard library of the running Python, or any files (``--text``). Progress goes to stderr. Stdout
holds one line, the JSON summary; to keep it so, stdout is handed to stderr before any library can print to it.

Workers may die while it runs (``bamboo-ds run``). So all of them keep the curves, and whoever has rank 0 at a moment
reports; and nothing is exchanged between workers but by the engine, which survives a loss in the middle of it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gpt_report import Curves, Progress, plot_losses

if TYPE_CHECKING:  # the heavy imports happen in main, after the arguments are known to be right
    import torch

    from bamboo_ds.models.gpt import GPTSize
    from bamboo_ds.models.text import ByteText, ByteWindows

DEFAULT_SIZE = "tiny"
TEMPERATURE = 0.8
"""Below 1, likely bytes are drawn more often than the model asks for."""


def main() -> None:
    """Run the job and print its summary as the last line of stdout."""
    arguments = parse_arguments()
    stdout = claim_stdout()
    begin = time.monotonic()
    summary = run(arguments)
    if summary is not None:
        summary["seconds"] = round(time.monotonic() - begin, 2)
        print(json.dumps(summary), file=stdout, flush=True)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the launcher adds ``--local_rank``."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT as a pipeline on DeepSpeed and Bamboo.")
    add = parser.add_argument
    add("--deepspeed_config", default="ds_configs/gpt_tiny.json", help="the DeepSpeed JSON (with a bamboo block)")
    add("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")), help="set by the launcher")
    add("--stages", type=positive, default=4, help="stages per pipeline; workers / stages pipelines run side by side")
    add("--size", help="tiny, small, gpt2, gpt2-medium, gpt2-large or gpt2-xl; default: the JSON's gpt block")
    add("--text", type=Path, nargs="+", default=[], help="files or folders; default: Python's standard library")
    add("--steps", type=positive, default=150, help="train until this many steps are done")
    add("--seed", type=int, default=1234, help="of the initial weights, of the order of samples, of the sample text")
    add("--eval-interval", type=positive, default=50, help="steps between two validations")
    add("--eval-batches", type=positive, default=2, help="global batches per validation")
    add("--log-interval", type=positive, default=10, help="steps between two lines when stderr is no terminal")
    add("--prompt", default="\ndef ", help="start of the text that is generated at the end")
    add("--sample-bytes", type=int, default=160, help="bytes to generate at the end; 0 for none")
    add("--out", type=Path, default=Path("runs/gpt"), help="folder for the loss plot")
    add("--journal", type=Path, help="folder to which every worker writes each step, for those who watch")
    add("--losses", type=Path, help="file for the losses of all steps, as JSON")
    add("--save", type=Path, help="folder to write a checkpoint to at the end")
    add("--load", type=Path, help="folder to read the latest checkpoint from at the start")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def claim_stdout() -> TextIO:
    """Return the real stdout; from here on whatever others print to stdout lands on stderr."""
    sys.stdout.flush()
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stdout


def run(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Train, validate, generate; return the summary on the reporting worker, None on the others."""
    import bamboo_ds
    from bamboo_ds.config import load_deepspeed_config
    from bamboo_ds.models.text import ByteWindows, load_text

    prepare_torch()
    config = load_deepspeed_config(arguments)
    size = resolve_size(config.get("gpt", {}), name=arguments.size)
    text = load_text(arguments.text)
    training = ByteWindows(text.training, sequence_length=size.sequence_length, seed=arguments.seed)
    validation = ByteWindows(text.validation, sequence_length=size.sequence_length)
    engine, *_ = bamboo_ds.initialize(args=arguments, model=build_model(size, arguments), training_data=training)
    if arguments.load:
        engine.load_checkpoint(str(arguments.load))
    curves = train(engine, validation, arguments)
    sample = generate(engine, size, prompt=arguments.prompt, count=arguments.sample_bytes, seed=arguments.seed)
    if arguments.save:
        engine.save_checkpoint(str(arguments.save))
    if not reports():
        return None
    if arguments.losses:
        curves.write(arguments.losses)
    facts = describe(engine, size, text, config)
    plot = plot_losses(curves, title=plot_title(facts), path=arguments.out / "loss.png")
    tokens = round(curves.samples_per_second(steps=len(curves.seconds)) * size.sequence_length, 1)
    return {**curves.summary(), "tokens_per_second": tokens, **facts, "plot": plot, "sample": sample}


def reports() -> bool:
    """Say whether this worker reports: it has rank 0, now. Another has it when that one dies."""
    import torch

    return torch.distributed.get_rank() == 0


def prepare_torch() -> None:
    """Share the cores out among the workers of this machine and ask for repeatable kernels."""
    import torch

    local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def resolve_size(block: Mapping[str, Any], *, name: str | None) -> GPTSize:
    """Return the model's shape: a named size, then the other keys of the JSON's ``gpt`` block.

    Args:
        block: The ``gpt`` block: ``size`` and any field of :class:`GPTSize`.
        name: The size asked for on the command line; it replaces the whole block.

    Raises:
        ValueError: If a name or a key is not known, or the values make no model.
    """
    from bamboo_ds.models.gpt import BYTES, GPT_SIZES, GPTSize

    changes = {} if name else {key: value for key, value in block.items() if key != "size"}
    chosen = name or block.get("size", DEFAULT_SIZE)
    if chosen not in GPT_SIZES:
        raise ValueError(f"gpt.size = {chosen!r}: not known; known sizes: {', '.join(GPT_SIZES)}")
    fields = [field.name for field in dataclasses.fields(GPTSize)]
    if unknown := sorted(set(changes) - set(fields)):
        raise ValueError(f"gpt block: unknown keys {', '.join(unknown)}; known keys: size, {', '.join(fields)}")
    size = dataclasses.replace(GPT_SIZES[chosen], **changes)
    if size.vocabulary < BYTES:
        raise ValueError(f"gpt.vocabulary = {size.vocabulary}: the text is bytes, which need at least {BYTES}")
    return size


def build_model(size: GPTSize, arguments: argparse.Namespace) -> Any:
    """Cut the GPT into stages; this worker builds the layers it needs and no others."""
    from bamboo_ds import BambooPipelineModule
    from bamboo_ds.models.gpt import gpt_layers, language_model_loss

    return BambooPipelineModule(
        layers=gpt_layers(size),
        num_stages=arguments.stages,
        loss_fn=language_model_loss,
        seed_layers=True,
        base_seed=arguments.seed,
    )


def train(engine: Any, validation: ByteWindows, arguments: argparse.Namespace) -> Curves:
    """Train up to the step asked for; validate in between and at the end.

    Where training is, the engine says: a worker that joins begins where the others are, and its curves do, too.
    """
    curves = Curves(first_step=engine.global_steps + 1, batch_size=engine.train_batch_size())
    with Progress(steps=arguments.steps, interval=arguments.log_interval) as progress:
        while engine.global_steps < arguments.steps:
            begin = time.monotonic()
            loss = float(engine.train_batch())
            step = engine.global_steps
            if step != curves.next_step:  # it has waited for a place, or all have gone back to a checkpoint
                curves = Curves(first_step=step, batch_size=curves.batch_size)
            curves.add(loss, seconds=time.monotonic() - begin)
            if arguments.journal:
                note_step(engine, loss, folder=arguments.journal)
            if step % arguments.eval_interval == 0 or step == arguments.steps:
                curves.validation[step] = validate(engine, validation, batches=arguments.eval_batches)
            if reports():
                progress.show(step, curves)
    return curves


def note_step(engine: Any, loss: float, *, folder: Path) -> None:
    """Write a step down where others see it; every worker does, as any of them may be the only one that is left."""
    from bamboo_ds.cli.chaos.journal import Journal, StepLine

    shape = {"stages": engine.num_stages, "pipelines": engine.grid.get_data_parallel_world_size()}
    line = StepLine(step=engine.global_steps - 1, loss=loss, at=time.time(), worker=engine.module.worker, **shape)
    Journal(folder).write(line)


def validate(engine: Any, windows: ByteWindows, *, batches: int) -> float:
    """Return the mean loss of the first global batches of the validation text, the same in every shape."""
    micro = engine.train_micro_batch_size_per_gpu()
    micro_batches = engine.train_batch_size() // micro
    losses = []
    for batch in range(batches):
        own = (batch * micro_batches + index for index in engine.micro_batch_range)
        losses.append(float(engine.eval_batch(read_micro_batches(windows, own, size=micro))))
    return statistics.fmean(losses)


def read_micro_batches(
    windows: ByteWindows, indices: Iterator[int], *, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens, labels), int64 ``[size, sequence]`` each, of the given micro-batches; a short text repeats."""
    import torch

    for index in indices:
        rows = [windows[row % len(windows)] for row in range(index * size, (index + 1) * size)]
        yield torch.stack([tokens for tokens, _ in rows]), torch.stack([labels for _, labels in rows])


def generate(engine: Any, size: GPTSize, *, prompt: str, count: int, seed: int) -> str:
    """Continue a prompt, byte by byte, through the pipeline; every worker returns the same text.

    Every byte is one forward through all stages, and drawn where the last stage is; the first stages need it for the
    next. The engine carries it there, as "loss" of an evaluation: that reaches every worker, whoever dies meanwhile,
    which a collective of the script's own would not survive. The batch keeps the shape of training; its rows are
    copies of one another, in all pipelines, so these draw alike.
    """
    import torch

    text = list(prompt.encode())
    with drawing(engine):
        for number in range(count):
            context = text[-size.sequence_length :]
            tokens = torch.zeros(engine.train_micro_batch_size_per_gpu(), size.sequence_length, dtype=torch.int64)
            tokens[:, : len(context)] = torch.tensor(context)
            engine.module.loss_fn = functools.partial(draw_byte, position=len(context) - 1, seed=seed + number)
            text.append(int(engine.eval_batch(iter([(tokens, tokens)]), num_micro_batches=1)))
    return bytes(text).decode(errors="replace")


@contextlib.contextmanager
def drawing(engine: Any) -> Iterator[None]:
    """Put the loss function back in the end, and keep what is drawn from a monitor of losses."""
    loss_fn, monitored = engine.module.loss_fn, engine.monitor.enabled
    engine.monitor.enabled = False
    try:
        yield
    finally:
        engine.module.loss_fn, engine.monitor.enabled = loss_fn, monitored


def draw_byte(logits: torch.Tensor, labels: torch.Tensor, *, position: int, seed: int) -> torch.Tensor:
    """Draw the byte that follows a position of the first row; drawn again (after a loss), it is the same."""
    import torch

    scores = logits[0, position, :256].float().cpu() / TEMPERATURE
    byte = torch.multinomial(scores.softmax(0), 1, generator=torch.Generator().manual_seed(seed))
    return byte.to(logits.device, torch.float32).squeeze()


def describe(engine: Any, size: GPTSize, text: ByteText, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of the run that are known without its results."""
    from bamboo_ds.config import bamboo_block

    block = bamboo_block(config)
    return {
        "stages": engine.num_stages,
        "pipelines": engine.grid.get_data_parallel_world_size(),
        "redundancy": block.redundancy if block else "off",
        "parameters": size.parameters,
        "text_bytes": text.size_bytes,
    }


def plot_title(facts: Mapping[str, Any]) -> str:
    """Say what the plot shows the losses of."""
    model = f"Byte-level GPT, {facts['parameters'] / 1e6:.1f} M parameters"
    return f"{model}: {facts['stages']} stages x {facts['pipelines']} pipelines, redundancy {facts['redundancy']}"


if __name__ == "__main__":
    main()
