"""An unmodified script but for one line, `bamboo_ds.patch()`, at the moment that `--when` names."""

import argparse
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--when", required=True)
args = parser.parse_args()


def patch_if(moment: str) -> None:
    if args.when == moment:
        import bamboo_ds

        bamboo_ds.patch()
        bamboo_ds.patch()


patch_if("before everything")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

patch_if("after torch")

import deepspeed  # noqa: E402

patch_if("after deepspeed")

from deepspeed import initialize  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402

patch_if("after from deepspeed import initialize")

if args.when == "after torch.distributed.init_process_group":
    dist.init_process_group("gloo")
patch_if("after torch.distributed.init_process_group")

deepspeed.init_distributed("gloo")

patch_if("after deepspeed.init_distributed")

inside = []


class Layer(torch.nn.Linear):
    def forward(self, x):
        inside.append((dist.get_rank(), dist.get_world_size()))
        return torch.tanh(super().forward(x))


model = PipelineModule([LayerSpec(Layer, 4, 4) for _ in range(3)], num_stages=2, loss_fn=torch.nn.MSELoss())

patch_if("after the module")

truth = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
config = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}, "bamboo": {},
    "steps_per_print": 1000,
}  # fmt: skip


def answers():
    return dist.get_rank(), dist.get_world_size(), deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()


assert answers() == truth * 2
by_name, _, _, _ = initialize(model=model, model_parameters=model.parameters(), config=config)
assert answers() == truth * 2
for _ in range(2):
    by_name.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 4))
    dist.barrier()
    deepspeed.comm.barrier()
    assert answers() == truth * 2
assert set(inside) == {truth}, inside
if truth[0] == 0:
    kinds = [f"{type(by_name).__name__}", deepspeed.initialize.__module__]
    print(f"ENGINE {' '.join(kinds)} {'bamboo_ds' in sys.modules}", flush=True)
