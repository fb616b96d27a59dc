"""Trains a small decoder on several processes with torch_rope, by tensor parallel, FSDP and context parallel.

    torchrun --nproc-per-node 2 examples/parallel.py    # or 1, 4 or 8 processes

It runs on GPUs if there is one for each process, and on the CPU otherwise. The same model learns the same tokens in
several ways: in one process, by tensor parallel x data parallel for every way to split the processes, and by context
parallel over all processes. The exit status is 1 if a loss differs from the loss in one process by more than float32
rounding explains, or if the loss does not fall. PyTorch does all communication; a rotation needs none.

For your own model, copy `apply_tensor_parallel` or `apply_context_parallel` and what they use. In both, the linear
layers for q, k and v return DTensors, which know what is split. So RotaryEmbedding rotates the heads or tokens that are
on this process, and raises an error if the tokens are split but the positions are not.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel, local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from torch_rope import RotaryEmbedding

VOCABULARY, DIM, HEADS, KV_HEADS, LAYERS = 256, 128, 8, 4, 2
BATCH, SEQ = 8, 64
# The largest relative difference of losses. float32 sums in another order differ by 2e-7 on CPUs. If the positions are
# not permuted as the tokens are, losses differ by 3e-4.
TOLERANCE = 1e-5

# ---- The model, which does not depend on the number of processes ----


def attend(q: Tensor, k: Tensor, v: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Returns causal attention of [batch, seq, heads, head_dim], for tokens in any order."""
    mask = q_positions[:, None] >= k_positions
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = DIM // HEADS
        self.wq = nn.Linear(DIM, HEADS * self.head_dim, bias=False)
        self.wk, self.wv = (nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False) for _ in "kv")
        self.wo = nn.Linear(HEADS * self.head_dim, DIM, bias=False)
        self.rope = RotaryEmbedding(self.head_dim)
        self.attend = attend

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = self.rope(q, k, positions)
        return self.wo(self.attend(q, k, v, positions, positions).flatten(-2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(DIM), Attention()
        self.feed_forward_norm = nn.RMSNorm(DIM)
        self.feed_forward = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.SiLU(), nn.Linear(4 * DIM, DIM, bias=False))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """Returns the mean loss. tokens and labels are [batch, seq], positions is [seq]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def apply_fsdp(model: Model, mesh: DeviceMesh) -> None:
    """Applies FSDP. mesh is the mesh over which the tokens are split, by batch or by seq."""
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)


# ---- Tensor parallel x data parallel: a process has some heads of some sequences ----

# Between attention and feed-forward the tokens are split ("sequence parallel"), so each norm computes only some tokens.
TENSOR_PARALLEL = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    # q and k are DTensors that are split by heads. positions remains a plain tensor, the same in all processes.
    "layers.*.attention.w[qkv]": ColwiseParallel(use_local_output=False),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.feed_forward_norm": SequenceParallel(),
    "layers.*.feed_forward.0": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.feed_forward.2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def apply_tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    """Applies tensor parallel and FSDP. mesh has the dimensions "dp" and "tp"."""
    parallelize_module(model, mesh["tp"], TENSOR_PARALLEL)
    heads = [Shard(2)]  # splits the heads of [batch, seq, heads, head_dim]
    for layer in model.layers:  # local_map, because on CPUs DTensor has no rule for attention with split heads
        layer.attention.attend = local_map(attend, heads, in_placements=(heads, heads, heads, None, None))
    apply_fsdp(model, mesh["dp"])


# ---- Context parallel: a process has some tokens of all sequences ----

TOKENS = Shard(1)  # splits the tokens of [batch, seq, ...]; Shard(0) splits the positions
CONTEXT_PARALLEL = {
    # q and k are DTensors that are split by tokens. positions must be split in the same way.
    "layers.*.attention.w[qkv]": PrepareModuleOutput(
        output_layouts=TOKENS, desired_output_layouts=TOKENS, use_local_output=False
    ),
    "layers.*.attention.wo": PrepareModuleInput(
        input_layouts=TOKENS, desired_input_layouts=TOKENS, use_local_output=True
    ),
}


def split_tokens(mesh: DeviceMesh, tokens: Tensor, labels: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tokens, labels and positions of this process.

    With a causal mask, later tokens need more work. So each process gets a piece from the beginning and a piece from
    the end: of 8 tokens, one process gets 0, 1, 6, 7 and the other 2, 3, 4, 5. Their positions are split with them.
    """
    buffers = [tokens.clone(), labels.clone(), positions.clone()]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers=set(buffers)):
        tokens, labels, positions = buffers  # context_parallel changed them in place, and does not restore them
    return tokens, labels, DTensor.from_local(positions, mesh, [Shard(0)])


def apply_context_parallel(model: Model, mesh: DeviceMesh) -> None:
    """Applies context parallel and FSDP. mesh has one dimension.

    Each process gathers all k and v, and computes attention of its own q. Llama 3 was trained in this way
    (arXiv:2407.21783, section 3.3.2). It works on CPUs too, unlike the ring attention of context_parallel.
    """
    parallelize_module(model, mesh, CONTEXT_PARALLEL)
    for layer in model.layers:
        layer.attention.attend = local_map(
            attend,
            out_placements=[TOKENS],
            in_placements=([TOKENS], [Replicate()], [Replicate()], [Shard(0)], [Replicate()]),
            # Each process has gradients of all k and v, but only the part from its own q. Partial() adds these parts.
            in_grad_placements=([TOKENS], [Partial()], [Partial()], [Shard(0)], [Replicate()]),
            redistribute_inputs=True,
        )
    apply_fsdp(model, mesh)


# ---- Training and comparison ----


def train(model: Model, data: tuple[Tensor, Tensor, Tensor], steps: int, mesh: DeviceMesh | None = None) -> Tensor:
    """Trains the model and returns the loss of each step. mesh is the mesh over which the tokens are split evenly.

    As they are split evenly, loss and gradient are the means of those of the processes; fully_shard averages gradients.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # AdamW would not show a wrong scale of the gradients
    losses = []
    for _ in range(steps):
        loss = model(*data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        losses.append(DTensor.from_local(loss, mesh, [Partial("avg")]).full_tensor() if mesh else loss)
    return torch.stack(losses).double().cpu()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="steps of the optimizer (default: %(default)s)")
    steps = parser.parse_args().steps
    if steps < 2:
        parser.error("--steps must be at least 2")

    gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", **alone)
    world, first = dist.get_world_size(), dist.get_rank() == 0
    if BATCH % world:
        sys.exit(f"The number of processes is {world} but must be 1, 2, 4 or 8.")

    def new_model() -> Model:
        torch.manual_seed(0)
        return Model().to(device)

    text = torch.randint(VOCABULARY, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0)).to(device)
    tokens, labels, positions = text[:, :-1], text[:, 1:], torch.arange(SEQ, device=device)
    losses = {"one process": train(new_model(), (tokens, labels, positions), steps)}
    for tp in (n for n in (1, 2, 4) if world % n == 0):
        mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
        apply_tensor_parallel(model := new_model(), mesh)
        own = (distribute_tensor(t, mesh["dp"], [Shard(0)], src_data_rank=None).to_local() for t in (tokens, labels))
        losses[f"dp {world // tp} x tp {tp}"] = train(model, (*own, positions), steps, mesh["dp"])
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("cp",))
    apply_context_parallel(model := new_model(), mesh)
    losses[f"cp {world}"] = train(model, split_tokens(mesh, tokens, labels, positions), steps, mesh)
    dist.destroy_process_group()

    expected = losses["one process"]
    differences = {way: float((got / expected - 1).abs().max()) for way, got in losses.items()}
    equal = all(difference <= TOLERANCE for difference in differences.values())  # False for NaN
    falls = bool(expected[-1] < expected[0])
    if first:
        print(f"Losses of each step, and the largest relative difference from one process ({world} x {device.type}):")
        for way, got in losses.items():
            print(f"{way:12}", *(f"{loss:.6f}" for loss in got), f" {differences[way]:.1e}")
        print(f"The losses are equal (relative tolerance {TOLERANCE:.0e}): {equal}. The losses fall: {falls}.")
    return 0 if equal and falls else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # os._exit instead of sys.exit, because a thread of gloo may still hold a tensor. If the thread releases the tensor
    # while Python ends, torch (2.13) aborts.
    os._exit(code)
