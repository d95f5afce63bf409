"""DeepSpeed's pipeline example in structure: AlexNet for CIFAR shapes, on synthetic images. Knows nothing of Bamboo."""

import argparse
import os
import random

import deepspeed
import numpy
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.utils.data import Dataset


class AlexNet(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, kernel_size=5, stride=2, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, kernel_size=3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(16, 16, kernel_size=3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, classes)
        )


class Images(Dataset):
    def __init__(self, count: int = 256) -> None:
        generator = torch.Generator().manual_seed(5)
        self.labels = torch.randint(0, 10, (count,), generator=generator)
        patterns = torch.randn(10, 3, 32, 32, generator=generator)
        self.images = patterns[self.labels] + torch.randn(count, 3, 32, 32, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def cifar_trainset(local_rank, path):
    """Let one process download; the others wait for it."""
    dist.barrier()
    if local_rank != 0:
        dist.barrier()
    marker = os.path.join(path, "downloaded")
    if local_rank == 0:
        with open(marker, "x") as file:
            file.write("images")
        dist.barrier()
    with open(marker) as file:
        assert file.read() == "images"
    return Images()


def join_layers(vision_model):
    return [
        *vision_model.features,
        vision_model.avgpool,
        lambda x: torch.flatten(x, 1),
        *vision_model.classifier,
    ]


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "-1")))
    parser.add_argument("-s", "--steps", type=int, default=4)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
    parser.add_argument("--backend", type=str, default="gloo")
    parser.add_argument("--seed", type=int, default=1138)
    parser.add_argument("--data", type=str, default=".")
    return deepspeed.add_config_arguments(parser).parse_args()


def train_pipe(args, part="parameters"):
    random.seed(args.seed)
    numpy.random.seed(args.seed)
    torch.manual_seed(args.seed)
    deepspeed.runtime.utils.set_random_seed(args.seed)

    net = AlexNet(classes=10)
    net = PipelineModule(
        layers=join_layers(net),
        loss_fn=torch.nn.CrossEntropyLoss(),
        num_stages=args.pipeline_parallel_size,
        partition_method=part,
        activation_checkpoint_interval=0,
    )
    trainset = cifar_trainset(args.local_rank, args.data)
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=trainset,
    )
    losses = []
    for _ in range(args.steps):
        losses.append(float(engine.train_batch()))
        answers = (dist.get_rank(), dist.get_world_size(), deepspeed.comm.get_rank(), deepspeed.comm.get_world_size())
        assert answers == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) * 2, answers
        dist.barrier()
    if dist.get_rank() == 0:
        kind = f"{type(engine).__module__}.{type(engine).__name__}"
        print(f"ENGINE {kind} {type(net).__name__}\nLOSSES {losses!r}", flush=True)


if __name__ == "__main__":
    args = get_args()
    deepspeed.init_distributed(dist_backend=args.backend)
    args.local_rank = int(os.environ["LOCAL_RANK"])
    train_pipe(args)
