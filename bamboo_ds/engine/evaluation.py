"""Evaluation through the pipeline, with the arguments of DeepSpeed's `eval_batch`."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.utils import logger

from bamboo_ds.engine.data import StepBatches
from bamboo_ds.engine.reshape import Reshaping
from bamboo_ds.engine.state import StepState
from bamboo_ds.errors import ConfigError
from bamboo_ds.module import untouched_randomness
from bamboo_ds.world import world_of_one


class _DroppedError(Exception):
    """An evaluation has ended, as another epoch has begun."""


class Evaluation(Reshaping):
    """The evaluating part of the engine."""

    _set_aside: Iterator[Any] | None
    """The training iterator while another one is evaluated."""

    def _step_batches(self) -> StepBatches:
        """Return the source of the running step's batches."""
        raise NotImplementedError  # the engine has the data

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
            The reduced output, or a pair of it and the outputs with `return_logits`. In a cluster that is reshaped
            meanwhile, as two neighbours were lost, the evaluation is dropped: NaN where the mean loss is returned, else
            None.
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
            self._compute_loss, self.eval_return_logits = compute_loss, return_logits
            result = self._evaluated(micro_batches, reduce_output, compute_loss, bcast_loss)
            self.network.forget()
            outputs, self.outputs = self.outputs, None
        return (result, outputs) if return_logits else result

    def _evaluated(self, micro_batches: int, reduce_output: str | None, compute_loss: bool, bcast_loss: bool) -> Any:
        """Evaluate, unless another epoch begins meanwhile.

        Whoever has come with it trains next, and knows nothing of the evaluation: so the others drop it, all of them.
        """
        self.outputs = None
        if not self._adopt_another_epoch():
            self._begin_evaluation(micro_batches)
            try:
                return self._evaluate(micro_batches, reduce_output, compute_loss, bcast_loss)
            except _DroppedError:
                self.outputs = None
        logger.warning(
            f"an evaluation after step {self.global_steps} was dropped: the cluster was reshaped ({self.plan.cause})"
        )
        return torch.tensor(math.nan) if compute_loss and reduce_output == "avg" and bcast_loss else None

    def _begin_evaluation(self, micro_batches: int) -> None:
        self._state = StepState(step=-self._evaluations, share=self._evaluation_range(micro_batches))
        self._batches = self._step_batches()

    def _evaluate(self, micro_batches: int, reduce_output: str | None, compute_loss: bool, bcast_loss: bool) -> Any:
        """Run the forwards and reduce their results; all over again when a worker is lost meanwhile.

        Batches that were drawn are kept. Messages of an attempt that failed are told apart by its number.
        """
        while True:
            with self._through_plan_changes(self._begin_anew):
                if not self._committer.decided():
                    self.outputs, self._attempt = None, self.plan.version
                    self._state = StepState(step=self._state.step, share=self._state.share)
                    self._run_once(self._inference_schedule(micro_batches))
                return self._reduced(reduce_output, compute_loss, bcast_loss)

    def _begin_anew(self) -> None:
        """Adopt the newest plan in the middle of an evaluation: what was sent counts for nothing."""
        self.network.drop_journals()
        if self._adopt_another_epoch():
            raise _DroppedError

    def _adopt_another_epoch(self) -> bool:
        """Adopt the newest plan, and return whether another epoch has begun with it."""
        epoch, evaluating = self.plan.epoch, self.data_iterator
        self._adopt_newest()
        if self.data_iterator is not evaluating:  # the training data were opened anew
            self._set_aside, self.data_iterator = self.data_iterator, evaluating
        return self.plan.epoch != epoch

    @contextlib.contextmanager
    def _evaluating(self, data_iter: Iterator[Any] | None) -> Iterator[None]:
        """Use another iterator, and put the training one back whatever happens."""
        self._set_aside, self.data_iterator = self.data_iterator, data_iter
        self._evaluations += 1
        self.module.eval()
        try:
            yield
        finally:
            self.data_iterator, self.eval_return_logits = self._set_aside, False

    def _evaluation_range(self, micro_batches: int) -> range:
        """Return positions of the evaluated micro-batches, distinct between pipelines."""
        return range(self.pipeline_id * micro_batches, (self.pipeline_id + 1) * micro_batches)

    def _reduced(self, reduce_output: str | None, compute_loss: bool, bcast_loss: bool) -> Any:
        results = [self._state.losses[micro_batch] for micro_batch in sorted(self._state.losses)]
        if reduce_output is None:
            if self._source.elastic:
                self._committer.share("")  # all are through: nobody will need this batch again
            return results if self.is_last_stage() else None
        means = _means(results)
        row = json.dumps(_told(means, len(results))) if results else ""
        overall = _overall([json.loads(other) for other in self._committer.share(row)])
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
    total = sum(row["count"] for row in gathered)
    weighted = [
        [torch.tensor(mean, dtype=torch.float64) * (row["count"] / total) for mean in row["means"]] for row in gathered
    ]
    return [torch.stack(column).sum(dim=0).tolist() for column in zip(*weighted, strict=True)]


def _formed(means: list[torch.Tensor], results: list[Any]) -> Any:
    return means if isinstance(results[0], list) else means[0]
