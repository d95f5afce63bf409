"""A script in the style of a Megatron GPT pipe: stock DeepSpeed calls only. Knows nothing of Bamboo."""

import argparse
import json
import os

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import nn

VOCABULARY, HIDDEN, HEADS, SEQUENCE = 64, 16, 2, 12


class EmbeddingPipe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.position_embeddings = nn.Embedding(SEQUENCE, HIDDEN)

    @property
    def word_embeddings_weight(self):
        return self.word_embeddings.weight

    def forward(self, args):
        tokens, attention_mask = args
        positions = torch.arange(tokens.size(1), device=tokens.device)
        return self.word_embeddings(tokens) + self.position_embeddings(positions), attention_mask


class TransformerLayerPipe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, args):
        hidden, attention_mask = args
        batch, length, _ = hidden.shape
        q, k, v = self.query_key_value(self.input_layernorm(hidden)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=~attention_mask)
        return hidden + self.dense(attended.transpose(1, 2).reshape(batch, length, HIDDEN)), attention_mask


class FinalNorm(nn.LayerNorm):
    def forward(self, args):
        return super().forward(args[0])


def logits_helper(embedding, hidden):
    return F.linear(hidden, embedding.word_embeddings_weight)


def cross_entropy(output, labels):
    labels, loss_mask = labels[0], labels[1]
    losses = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * loss_mask.flatten()).sum() / loss_mask.sum()


class GPTModelPipe(PipelineModule):
    def __init__(self, num_layers, topology, parallel_output=True):
        self.parallel_output = parallel_output
        specs = [TiedLayerSpec("embed", EmbeddingPipe, tied_weight_attr="word_embeddings_weight")]
        specs += [LayerSpec(TransformerLayerPipe) for _ in range(num_layers)]
        specs += [LayerSpec(FinalNorm, HIDDEN)]
        specs += [TiedLayerSpec("embed", EmbeddingPipe, forward_fn=logits_helper,
                                tied_weight_attr="word_embeddings_weight")]  # fmt: skip
        super().__init__(
            layers=specs, loss_fn=cross_entropy, topology=topology, activation_checkpoint_interval=0,
            partition_method="type:transformer",
        )  # fmt: skip


def weight_decay_groups(model):
    decay, none = [], []
    for module in model.modules():
        own = list(module._parameters.items())
        if isinstance(module, nn.LayerNorm):
            none += [p for _, p in own if p is not None]
        else:
            decay += [p for name, p in own if p is not None and name != "bias"]
            none += [p for name, p in own if p is not None and name == "bias"]
    return [{"params": decay, "weight_decay": 0.1}, {"params": none, "weight_decay": 0.0}]


def get_batch_pipe(data):
    """Turn what the loader yields into ((tokens, mask), (labels, loss mask))."""
    text = data["text"]
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    return (tokens, mask.expand(tokens.size(0), -1, -1, -1).contiguous()), (labels, torch.ones_like(labels).float())


def build_iterator(engine, seed):
    """Only the first and the last stage read data; each pipeline reads its own."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None

    def stream():
        generator = torch.Generator().manual_seed(seed + 7 * engine.grid.get_data_parallel_rank())
        while True:
            start = torch.randint(0, VOCABULARY, (engine.train_micro_batch_size_per_gpu(), 1), generator=generator)
            yield {"text": (start + 3 * torch.arange(SEQUENCE + 1)) % VOCABULARY}

    return stream()


def check_answers(engine, model, topology):
    """Ask where this process is, as Megatron's mpu does."""
    rank = torch.distributed.get_rank()
    place = topology.get_coord(rank)
    grid = engine.grid
    assert (grid.get_pipe_parallel_rank(), grid.get_stage_id(), grid.get_data_parallel_rank()) == (
        place.pipe, place.pipe, place.data), "the grid disagrees with the topology"  # fmt: skip
    assert grid.get_pipe_parallel_world_size() == topology.get_dim("pipe")
    assert grid.get_data_parallel_world_size() == topology.get_dim("data")
    assert grid.get_slice_parallel_rank() == 0
    assert grid.get_model_parallel_world_size() == topology.get_dim("pipe")
    assert engine.mpu.get_global_rank() == rank
    assert model.topology().get_dim("data") == grid.get_data_parallel_world_size()
    assert engine.gradient_accumulation_steps() == engine.train_batch_size() // (
        engine.train_micro_batch_size_per_gpu() * topology.get_dim("data")
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=None)
    parser.add_argument("--pipe-parallel-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    torch.distributed.init_process_group(backend="gloo")
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    pipelines = world_size // args.pipe_parallel_size
    topology = PipeDataParallelTopology(num_pp=args.pipe_parallel_size, num_dp=pipelines)
    # A group of the script's own, as Megatron's mpu makes them.
    own_group = torch.distributed.new_group(list(range(world_size)))
    torch.manual_seed(1234 + 100 * topology.get_coord(rank).pipe)

    model = GPTModelPipe(num_layers=6, topology=topology)
    optimizer = torch.optim.Adam(weight_decay_groups(model), lr=3e-3)
    engine, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args,
        lr_scheduler=lambda client: torch.optim.lr_scheduler.LambdaLR(client, lambda step: 1.0 / (1 + step)),
    )  # fmt: skip
    model.set_batch_fn = engine.set_batch_fn
    model.set_batch_fn(get_batch_pipe)
    engine.set_has_attention_mask(True)
    check_answers(engine, model, topology)
    iterator = build_iterator(engine, seed=5)
    losses = []
    for _ in range(args.steps):
        losses.append(float(engine.train_batch(data_iter=iterator)))
        total = torch.ones(1)
        torch.distributed.all_reduce(total, group=own_group)
        assert int(total) == world_size
    evaluated = float(engine.eval_batch(build_iterator(engine, seed=99)))
    rates = [group["lr"] for group in optimizer.param_groups], lr_scheduler.get_last_lr()
    if rank == 0:
        kind = f"{type(engine).__module__}.{type(engine).__name__}"
        print(f"ENGINE {kind} {type(model).__name__}\nLOSSES {[*losses, evaluated]!r}\nRATES {json.dumps(rates)}")
        print(f"LOCAL_RANK {args.local_rank} {os.environ['LOCAL_RANK']}", flush=True)


if __name__ == "__main__":
    main()
