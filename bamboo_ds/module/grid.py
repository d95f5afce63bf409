"""Answers who-is-where questions from the plan, in the words of DeepSpeed's `PipelineParallelGrid`.

User scripts ask `engine.grid`, `engine.mpu` or `model.mpu()` for their rank along an axis, to pick their share of the
data or to print once. DeepSpeed's own grid would answer for its world of one; this one answers truly. It has no
process groups: a group that cannot lose a member is what Bamboo avoids.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

from bamboo_ds.errors import UnsupportedFeatureError
from bamboo_ds.plan import Plan


class PlanGrid:
    """The grid of a plan, seen by one worker."""

    model_parallel_size = slice_parallel_size = 1

    def __init__(self, plan: Plan, *, worker: int) -> None:
        self._plan = plan
        self.global_rank = plan.workers.index(worker)
        place = plan.place(worker)
        self.stage_id, self.data_parallel_id = place.stage, place.pipeline
        self.pipe_parallel_size, self.data_parallel_size = plan.num_stages, plan.num_pipelines
        self.world_size = len(plan.workers)
        self.is_first_stage = place.stage == 0
        self.is_last_stage = place.stage == plan.num_stages - 1
        self.pp_group = self._ranks(plan.owners[place.pipeline])
        self.dp_group = self._ranks(plan.stage_owners(place.stage))
        self.slice_group = [self.global_rank]
        self._topo = PipeDataParallelTopology(num_pp=plan.num_stages, num_dp=plan.num_pipelines)

    def topology(self) -> PipeDataParallelTopology:
        """Return the stages and pipelines as DeepSpeed's topology."""
        return self._topo

    def get_global_rank(self) -> int:
        """Return the rank among the workers that train: the position of this worker's id among theirs."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """Return the stage of this worker."""
        return self.stage_id

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id
    get_model_parallel_rank = (
        get_stage_id  # DeepSpeed calls all stages of a pipeline "model parallel"; checkpoint names follow it
    )

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    get_pipeline_model_parallel_world_size = get_model_parallel_world_size = get_pipe_parallel_world_size

    def get_data_parallel_id(self) -> int:
        """Return the pipeline of this worker."""
        return self.data_parallel_id

    get_data_parallel_rank = get_data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return the number of pipelines."""
        return self.data_parallel_size

    def get_slice_parallel_rank(self) -> int:
        """Return 0: tensor slicing is not supported."""
        return 0

    get_tensor_model_parallel_rank = get_slice_parallel_rank

    def get_slice_parallel_world_size(self) -> int:
        """Return 1: tensor slicing is not supported."""
        return 1

    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    def stage_to_global(self, stage_id: int, data: int | None = None, **_: Any) -> int:
        """Return the rank of a stage's worker, in this pipeline or in pipeline `data`."""
        return self._ranks([self._plan.owners[self.data_parallel_id if data is None else data][stage_id]])[0]

    def _ranks(self, workers: Iterable[int]) -> list[int]:
        return [self._plan.workers.index(worker) for worker in workers]

    def _no_group(self) -> NoReturn:
        raise UnsupportedFeatureError(
            "Bamboo has no torch process group along an axis of the grid, as such a group cannot lose a member; "
            "use engine.grid's ranks, or torch.distributed's default group for small exchanges outside of train_batch()"
        )

    get_pipe_parallel_group = get_data_parallel_group = get_model_parallel_group = _no_group
    get_slice_parallel_group = get_tensor_model_parallel_group = get_pipeline_model_parallel_group = _no_group
