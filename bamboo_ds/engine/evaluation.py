"""Evaluation through the pipeline, with the arguments of DeepSpeed's `eval_batch`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from bamboo_ds.engine.execution import Execution
from bamboo_ds.errors import ConfigError
from bamboo_ds.module import untouched_randomness
from bamboo_ds.world import world_of_one


class Evaluation(Execution):
    """The evaluating part of the engine."""

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run forwards only, in evaluation mode and without gradients.

        Args:
            data_iter: yields this pipeline's micro-batches as (inputs, labels).
            return_logits: also return the outputs of the last micro-batch (None but on last stages).
            compute_loss: apply `loss_fn`; else the outputs are what is reduced, on last stages only.
            reduce_output: `"avg"` over micro-batches and pipelines, or None for the list of them (None but on last
                stages).
            bcast_loss: return the mean loss on every worker, not only on last stages.
            num_micro_batches: of each pipeline; absent: as in training.

        Returns:
            The reduced output, or a pair of it and the outputs with `return_logits`.
        """
        if reduce_output not in (None, "avg"):
            raise ConfigError(f"eval_batch(reduce_output={reduce_output!r}): use 'avg' or None")
        micro_batches = self.micro_batches if num_micro_batches is None else num_micro_batches
        with (
            self._guarded(),
            world_of_one(quiet=self.global_rank != 0),
            untouched_randomness(),
            torch.no_grad(),
            self._evaluating(data_iter),
        ):
            self._compute_loss, self.eval_return_logits, self.outputs = compute_loss, return_logits, None
            self._exec_schedule(self._inference_schedule(micro_batches))
            result = self._reduced(reduce_output, compute_loss, bcast_loss)
            self.network.forget()
            outputs, self.outputs = self.outputs, None
        return (result, outputs) if return_logits else result

    @contextlib.contextmanager
    def _evaluating(self, data_iter: Iterator[Any] | None) -> Iterator[None]:
        """Use another iterator, and put the training one back whatever happens."""
        training, self.data_iterator = self.data_iterator, data_iter
        self._evaluations += 1
        self.module.eval()
        try:
            yield
        finally:
            self.data_iterator, self.eval_return_logits = training, False

    def _evaluation_range(self, micro_batches: int) -> range:
        """Return positions of the evaluated micro-batches, distinct between pipelines."""
        return range(self.pipeline_id * micro_batches, (self.pipeline_id + 1) * micro_batches)

    def _reduced(self, reduce_output: str | None, compute_loss: bool, bcast_loss: bool) -> Any:
        results = [self._state.losses[micro_batch] for micro_batch in sorted(self._state.losses)]
        if reduce_output is None:
            return results if self.is_last_stage() else None
        means = _means(results)
        gathered = [
            json.loads(row) for row in self.network.world.gather_bytes(json.dumps(_told(means, len(results))).encode())
        ]
        overall = _overall(gathered)
        if compute_loss:
            self._report_evaluation(overall[0])
        if self.is_last_stage():
            return _formed(
                [
                    torch.tensor(part, dtype=mean.dtype, device=self.device)
                    for part, mean in zip(overall, means, strict=True)
                ],
                results,
            )
        if not (compute_loss and bcast_loss):
            return None
        return torch.tensor(overall[0], dtype=torch.float32, device=self.device)

    def _report_evaluation(self, loss: Any) -> None:
        """Write the loss to the monitor, as DeepSpeed does."""
        if self.global_rank == 0 and self.monitor.enabled:
            mean = torch.tensor(loss).mean().item()
            self.monitor.write_events([("Train/Samples/eval_loss", mean, self.global_samples)])


def _means(results: list[Any]) -> list[torch.Tensor]:
    """Return the mean over micro-batches of each part of a result."""
    parts = [result if isinstance(result, list) else [result] for result in results]
    return [
        torch.stack([part.double() for part in column]).mean(dim=0).to(column[0].dtype)
        for column in zip(*parts, strict=True)
    ]


def _told(means: list[torch.Tensor], count: int) -> dict[str, Any]:
    return {"count": count, "means": [mean.double().tolist() for mean in means]}


def _overall(gathered: list[dict[str, Any]]) -> list[Any]:
    """Return the mean over pipelines of each part, weighted by micro-batches."""
    rows = [row for row in gathered if row["count"]]
    total = sum(row["count"] for row in rows)
    weighted = [
        [torch.tensor(mean, dtype=torch.float64) * (row["count"] / total) for mean in row["means"]] for row in rows
    ]
    return [torch.stack(column).sum(dim=0).tolist() for column in zip(*weighted, strict=True)]


def _formed(means: list[torch.Tensor], results: list[Any]) -> Any:
    return means if isinstance(results[0], list) else means[0]
