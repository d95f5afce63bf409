"""Where the workers of a plan are placed: as safely as can be, and of equally safe layouts where the fewest bytes move.

What makes a layout safe, and how good ones are made, is in `layouts`; what moves, in `moving` and `keeping`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bamboo_ds.errors import InfeasiblePlanError
from bamboo_ds.plan.cluster import Shape, Worker
from bamboo_ds.plan.keeping import fewest_bytes
from bamboo_ds.plan.layouts import Grid, faults, layouts
from bamboo_ds.plan.moving import Moving


def arrange(workers: Sequence[Worker], *, shape: Shape, keep: Moving | None = None) -> tuple[tuple[int, ...], ...]:
    """Return worker ids by pipeline and stage: the best of three layouts, the plainest of equals.

    The plainest is DeepSpeed's: ids ascend along the pipelines, then along the stages. Workers that do not fit in are
    left out. The order of `workers` does not matter.

    Args:
        workers: all that may be placed.
        shape: the places.
        keep: what each worker lacks for each stage. Then the layout is as safe as without, or safer, and moves no more
            bytes.

    Raises:
        InfeasiblePlanError: fewer workers than the shape has places.
    """
    slots = shape.num_stages * shape.num_pipelines
    if len(workers) < slots:
        raise InfeasiblePlanError(f"{shape} need {slots} workers, there are {len(workers)}: wait for nodes")
    ordered = sorted(workers, key=lambda worker: worker.id)
    best = _fewest_faults(layouts(ordered, shape=shape))
    if keep is not None:
        equals = (layout for layout in layouts(ordered, shape=shape) if faults(layout) == faults(best))
        starts = tuple(dict.fromkeys([best, *equals]))
        best = fewest_bytes(starts, workers=ordered, shape=shape, moving=keep)
    return tuple(tuple(worker.id for worker in pipeline) for pipeline in best)


def _fewest_faults(made: Iterator[Grid]) -> Grid:
    """Return the first of the best layouts; none is made after a perfect one."""
    best = next(made)
    fewest = faults(best)
    while any(fewest) and (layout := next(made, None)) is not None:
        if (found := faults(layout)) < fewest:
            best, fewest = layout, found
    return best
