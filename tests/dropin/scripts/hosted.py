"""A small pipeline job with stock DeepSpeed's calls that shows its losses on every rank, and uses no group of its own.

`--engines 2` trains a second model of the same script afterwards; `--before` builds it before the first engine is made.
"""

import argparse
import json
import os

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.utils.data import Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--engines", type=int, default=1)
parser.add_argument("--before", action="store_true")
parser.add_argument("--second-stages", type=int, default=0)
parser.add_argument("--own", type=json.loads, default={}, help="by rank: layers, or what its `bamboo` block says")
parser.add_argument("--config", type=json.loads)
args = parser.parse_args()
rank = int(os.environ["RANK"])
own = args.own.get(str(rank), {})
config = {**args.config, **own.get("config", {}), "bamboo": {**args.config["bamboo"], **own.get("bamboo", {})}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x):
        return torch.tanh(self.dropout(self.linear(x)))


class Data(Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index):
        x = torch.linspace(0, 1, 8) * index / 1000
        return x, x.flip(0)


def model(layers, stages):
    return PipelineModule(
        [LayerSpec(Block) for _ in range(layers)], num_stages=stages, loss_fn=nn.MSELoss(), seed_layers=True,
        partition_method="uniform",
    )  # fmt: skip


def train(net):
    engine, _, _, _ = deepspeed.initialize(args=args, model=net, training_data=Data(), config=config)
    losses = [float(engine.train_batch()) for _ in range(args.steps)]
    print(f"LOSSES of {rank}: {json.dumps(losses)}", flush=True)  # one line: others write at the same time


torch.manual_seed(7)
deepspeed.init_distributed(dist_backend="gloo")
second_stages = args.second_stages or args.stages
nets = [model(own.get("layers", 2 * args.stages), args.stages)]
if args.before:
    nets += [model(3 * second_stages, second_stages) for _ in range(args.engines - 1)]
train(nets[0])
for number in range(1, args.engines):
    train(nets[number] if args.before else model(3 * second_stages, second_stages))
print(f"DONE {rank}", flush=True)
