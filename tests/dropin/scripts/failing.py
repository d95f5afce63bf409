"""A small pipeline job in which one worker does what users' workers do: raise, leave, get killed, hang."""

import argparse
import json
import os
import signal
import sys
import time

import torch
import torch.distributed
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.utils.data import Dataset

import bamboo_ds

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--how", default="")
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--step", type=int, default=1)
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--config", type=json.loads, default={})
args = parser.parse_args()


def me() -> bool:
    return int(os.environ["RANK"]) == args.rank


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if engine is not None and engine.global_steps == args.step and me():
            if args.how == "layer":
                raise ValueError("the user's layer broke")
            if args.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if args.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if args.how == "nan":
                x = x * float("nan")
        return torch.tanh(self.linear(x))


class Data(Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index):
        if args.how == "dataset" and engine is not None and engine.global_steps == args.step and me():
            raise LookupError("the user's data set broke")
        x = torch.linspace(0, 1, 8) * index / 1000
        return x, x.flip(0)


engine = None
model = bamboo_ds.BambooPipelineModule(
    [LayerSpec(Block) for _ in range(args.layers)], num_stages=args.stages, loss_fn=nn.MSELoss(), seed_layers=True,
    partition_method="uniform",
)  # fmt: skip
print(f"BEGIN {time.time()}", flush=True)
if args.how == "before" and me():
    raise ArithmeticError("the user's script broke before initialize")
config = {
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 1000,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01}}, "bamboo": {"timeout_seconds": 30}, **args.config,
}  # fmt: skip
data = None if args.how == "exhausted" else Data()
engine, _, _, _ = bamboo_ds.initialize(model=model, config=config, training_data=data)
batches = iter([(torch.ones(2, 8), torch.zeros(2, 8))] * (8 * args.step + 3)) if data is None else None
for step in range(4):
    if step == args.step and me():
        if args.how == "between":
            raise KeyError("the user's script broke between steps")
        if args.how == "exit":
            sys.exit(0)
        if args.how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
    engine.train_batch(batches)
    torch.distributed.barrier() if args.how == "barrier" else None
if torch.distributed.get_rank() == 0:
    print(f"DONE {engine.global_steps}", flush=True)
