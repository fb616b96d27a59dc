"""Trains a small decoder on several processes with torch_rope, by tensor parallel, FSDP and context parallel.

    torchrun --nproc-per-node 2 examples/parallel.py    # or 1, 4 or 8 processes

It runs on GPUs if there is one for each process, and on the CPU otherwise. The same model learns the same tokens in one
process, by tensor parallel x data parallel for every way to split the processes, and by context parallel. The exit
status is 1 if a loss differs from that in one process by more than rounding explains, or if the loss does not fall.

For your own model, copy `apply_tensor_parallel` or `apply_context_parallel`. In both, the linear layers of q, k and v
return DTensors, which know what is split. So RotaryEmbedding rotates the heads or tokens of this process, without any
communication, and raises an error if the tokens are split but the positions are not.
"""

import argparse
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.experimental import context_parallel, local_map
from torch.nn import functional as F

from torch_rope import RotaryEmbedding

VOCABULARY, DIM, HEADS, KV_HEADS, LAYERS, BATCH, SEQ = 256, 128, 8, 4, 2, 8, 64
TOLERANCE = 1e-5  # float32 sums in another order change losses by 2e-7 on CPUs, positions of other tokens by 3e-4


def attend(q: Tensor, k: Tensor, v: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Returns causal attention of [batch, seq, heads, head_dim], for tokens in any order."""
    mask = q_positions[:, None] >= k_positions
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = DIM // HEADS
        self.wq, self.wk, self.wv = (nn.Linear(DIM, n * self.head_dim, bias=False) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.wo = nn.Linear(HEADS * self.head_dim, DIM, bias=False)
        self.rope = RotaryEmbedding(self.head_dim)
        self.attend = attend

    def forward(self, x: Tensor, normed: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (w(normed).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = self.rope(q, k, positions)
        return x + self.wo(self.attend(q, k, v, positions, positions).flatten(-2))


class Model(nn.Module):
    """A decoder without feed-forward networks, which have no part in rotation."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(LAYERS + 1))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """Returns the mean loss. tokens and labels are [batch, seq], positions is [seq]."""
        x = self.embedding(tokens)
        for layer, norm in zip(self.layers, self.norms[:-1], strict=True):
            x = layer(x, norm(x), positions)
        return F.cross_entropy(self.head(self.norms[-1](x)).flatten(0, 1), labels.flatten())


def apply_tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    """Gives each process of the mesh some heads."""
    # Outside attention the tokens are split, so that each norm computes only some tokens.
    split, whole = Shard(1), Replicate()
    plan = {
        "embedding": tp.RowwiseParallel(input_layouts=whole, output_layouts=split),
        "norms.*": tp.SequenceParallel(),
        "layers.*": tp.PrepareModuleInput(input_layouts=(None, split, None), desired_input_layouts=(None, whole, None)),
        # q and k are DTensors that are split by heads. positions remains a plain tensor, the same in all processes.
        "layers.*.w[qkv]": tp.ColwiseParallel(use_local_output=False),
        "layers.*.wo": tp.RowwiseParallel(output_layouts=split),
        "head": tp.ColwiseParallel(input_layouts=split, output_layouts=whole),
    }
    tp.parallelize_module(model, mesh, plan)
    heads = [Shard(2)]  # splits the heads of [batch, seq, heads, head_dim]
    for layer in model.layers:  # local_map, because on CPUs DTensor has no rule for attention with split heads
        layer.attend = local_map(attend, heads, in_placements=(heads, heads, heads, None, None))


def apply_context_parallel(model: Model, mesh: DeviceMesh) -> None:
    """Gives each process of the mesh some tokens of all sequences.

    It gathers all k and v, and computes attention of its own q, as for Llama 3 (arXiv:2407.21783, section 3.3.2).
    """
    tokens, positions, whole = Shard(1), Shard(0), Replicate()  # of [batch, seq, ...] and of [seq]
    to_dtensor = {"output_layouts": tokens, "desired_output_layouts": tokens, "use_local_output": False}
    to_local = {"input_layouts": tokens, "desired_input_layouts": tokens, "use_local_output": True}
    plan = {
        "layers.*.w[qkv]": tp.PrepareModuleOutput(**to_dtensor),
        "layers.*.wo": tp.PrepareModuleInput(**to_local),
    }
    tp.parallelize_module(model, mesh, plan)
    placements = [tokens], [whole], [whole], [positions], [whole]
    # Each process has gradients of all k and v, but only the part from its own q. Partial() adds these parts.
    gradients = [tokens], [Partial()], [Partial()], [positions], [whole]
    for layer in model.layers:
        layer.attend = local_map(attend, [tokens], placements, gradients, redistribute_inputs=True)


def train(data: tuple[Tensor, Tensor, Tensor], steps: int, apply=None, mesh: DeviceMesh | None = None) -> Tensor:
    """Trains a new model after apply(model), and returns the losses. mesh is that over which the tokens are split.

    All processes have equally many tokens. So the loss is the mean of theirs, and the gradient too, as FSDP computes it.
    """
    torch.manual_seed(0)
    model = Model().to(data[0].device)
    if apply is not None:
        apply(model)
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # AdamW would not show a wrong scale of the gradients
    losses = []
    for _ in range(steps):
        loss = model(*data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        losses.append(DTensor.from_local(loss, mesh, [Partial("avg")]).full_tensor() if mesh else loss)
    return torch.stack(losses).double()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="steps of the optimizer (default: %(default)s)")
    steps = parser.parse_args().steps
    world, rank = int(os.environ.get("WORLD_SIZE", 0)), int(os.environ.get("RANK", 0))
    if world not in (1, 2, 4, 8) or steps < 2:
        parser.error("start it by torchrun with 1, 2, 4 or 8 processes, and with --steps of at least 2")
    kind = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    cp = init_device_mesh(kind, (world,), mesh_dim_names=("cp",))  # also connects the processes, and sets their GPUs

    text = torch.randint(VOCABULARY, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0)).to(kind)
    tokens, labels, positions = text[:, :-1], text[:, 1:], torch.arange(SEQ, device=kind)
    losses = {"one process": train((tokens, labels, positions), steps)}
    for n in (n for n in (1, 2, 4) if world % n == 0):
        mesh = init_device_mesh(kind, (world // n, n), mesh_dim_names=("dp", "tp"))
        own = (distribute_tensor(t, mesh["dp"], [Shard(0)], src_data_rank=None).to_local() for t in (tokens, labels))
        apply = partial(apply_tensor_parallel, mesh=mesh["tp"])
        losses[f"dp {world // n} x tp {n}"] = train((*own, positions), steps, apply, mesh["dp"])
    # A causal mask makes later tokens more work, so a process gets a piece of each end: of 8 tokens 0, 1, 6, 7 or 2 to 5.
    own = positions.clone()
    with context_parallel(cp, buffers=[own], buffer_seq_dims=[0], no_restore_buffers={own}):
        data = tokens[:, own], labels[:, own], DTensor.from_local(own, cp, [Shard(0)])
    losses[f"cp {world}"] = train(data, steps, partial(apply_context_parallel, mesh=cp), cp)
    dist.destroy_process_group()

    table = torch.stack(list(losses.values()))
    difference = float((table / table[0] - 1).abs().max())
    equal, falls = difference <= TOLERANCE, bool(table[0, -1] < table[0, 0])  # equal is False for NaN
    if rank == 0:
        for way, got in losses.items():
            print(f"{way:12}", *(f"{loss:.6f}" for loss in got))
        print(f"Largest relative difference: {difference:.1e}. Equal losses: {equal}. The losses fall: {falls}.")
    return 0 if equal and falls else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # os._exit instead of sys.exit, because a thread of gloo may still hold a tensor. If the thread releases the tensor
    # while Python ends, torch (2.13) aborts.
    os._exit(code)
