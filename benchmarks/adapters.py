"""Adapters: functions that prepare a call of one implementation for one case.

An adapter prepares everything that a model prepares once (tables in the implementation's form, sessions, compiled
functions), so that the call does what a layer does. An adapter raises NotImplementedError with a reason if the
implementation cannot do the case, and ImportError if the implementation is not installed.
"""

import ctypes
import functools
import hashlib
import importlib
import os
import struct
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import torch_rope
from torch_rope import reference

from .cases import BASE, EPS, Case, Data, as_bytes

rope = torch.ops.rope
OURS = "torch_rope"
EVERY_NORM = "norm", "norm over heads"
EVERY_CACHE = "cache", "norm cache"
FUNCTIONS = "function of diffusers", "function of comfy-kitchen", "norm of comfy-kitchen"


@dataclass
class Run:
    """A call of one implementation, and how to interpret it."""

    call: Callable[[], Any]  # the function that is timed
    results: Callable[[Any], list[Tensor]]  # makes results in the form of right_answer from the value that call returns
    rotates: bool = True  # False if it only moves the data
    context: Callable = field(default=torch.no_grad)


ADAPTERS: dict[tuple[str, str], Callable[[Case, Data], Run]] = {}  # (op, name) -> adapter


def adapter(name: str, *ops: str, **options):
    """Returns a decorator that registers an adapter under this name for these values of Case.op.

    The default is "rotate". Of several decorators of a function, the lowest registers first.
    """

    def register(function):
        for op in ops or ("rotate",):
            ADAPTERS[op, name] = partial(function, **options)
        return function

    return register


# ---- From a function of torch to a Run ----


def run_of(case: Case, data: Data, forward: Callable, heads_first=False, in_place=False, more=(), after=()) -> Run:
    """Returns a Run of forward(q, k, *more, *after), which returns the rotated q and k.

    If heads_first is True, forward takes and returns [batch, heads, seq, head_dim]. The tensors in more have gradients
    too.
    """

    def native(tensors):
        return [x.transpose(1, 2) if heads_first and x.ndim == 4 else x for x in tensors]

    inputs = [*native([data.q, data.k]), *more]
    if case.mode != "training":
        return Run(partial(forward, *inputs, *after), native, context=torch.inference_mode)
    if in_place:
        raise NotImplementedError("an in-place operator has no gradient")
    inputs = [x.detach().requires_grad_() for x in inputs]
    gradients = native(data.gradients)

    def call():
        return torch.autograd.grad(forward(*inputs, *after), inputs, gradients)

    return Run(call, native, context=torch.enable_grad)


@functools.cache  # one compiled function serves all sets of data of a case
def compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)


def check_cuda(data: Data, module: str) -> None:
    if data.device != "cuda":
        raise NotImplementedError("it runs only on NVIDIA GPUs")
    importlib.import_module(module)


# ---- Rotation ----


@adapter("copy", "rotate", *EVERY_NORM, *EVERY_CACHE, *FUNCTIONS)
def copy(case: Case, data: Data) -> Run:
    """For comparison: reads q and k (v too, if there is a cache) and writes them to other memory, in training twice."""
    pairs = [(torch.empty_like(x), x) for x in (data.q, data.k)] * (2 if case.mode == "training" else 1)
    if "cache" in case.op:
        cells = [
            c.flatten(0, 1)[: case.tokens].view_as(data.k) if case.paged else c.transpose(1, 2)[:, : case.seq]
            for c in data.caches
        ]
        pairs = [pairs[0], (cells[0], data.k), (cells[1], data.v)]

    def call():
        for into, x in pairs:
            into.copy_(x)

    return Run(call, lambda _: [], rotates=False, context=torch.inference_mode)


@adapter(OURS + " in place", in_place=True)
@adapter(OURS + " inv_freq", inv_freq=True)
@adapter(OURS)
def rotate_qk(case: Case, data: Data, inv_freq=False, in_place=False) -> Run:
    """The operator, with tables or with frequencies. A default is not passed, because that takes time."""
    rotate = rope.rotate_qk_ if in_place else rope.rotate_qk
    rotate = partial(rotate, interleaved=True) if case.interleaved else rotate
    angles = (None, None, data.inv_freq) if inv_freq else (data.cos, data.sin, None)

    def into(q, k, *angles):
        rotate(q, k, *angles)
        return q, k

    return run_of(case, data, into if in_place else rotate, in_place=in_place, after=(*angles, data.positions))


@adapter(OURS + " module")
def rotary_embedding(case: Case, data: Data) -> Run:
    """RotaryEmbedding, called as a model's attention calls it."""
    options = {"rotary_dim": case.rotary_dim, "interleaved": case.interleaved}
    module = torch_rope.RotaryEmbedding(case.head_dim, base=BASE, **options).to(data.device)
    return run_of(case, data, partial(module, positions=data.positions) if case.positions else module)


@adapter("transformers compiled", compile=True)
@adapter("transformers")
def transformers(case: Case, data: Data, compile=False) -> Run:
    """The function of a model with this pairing. q has the layout that it has in memory."""
    model = "glm" if case.interleaved else "gpt_neox" if case.rotary_dim < case.head_dim else "llama"
    function = importlib.import_module(f"transformers.models.{model}.modeling_{model}").apply_rotary_pos_emb
    heads_first = case.layout == "bhsd"
    angles = dict(zip(("cos", "sin"), data.wide_rows, strict=True), unsqueeze_dim=1 if heads_first else 2)
    function = compiled(function) if compile else function
    return run_of(case, data, partial(function, **angles), heads_first)


@adapter("rotary-embedding-torch")
def rotary_embedding_torch(case: Case, data: Data) -> Run:
    from rotary_embedding_torch import RotaryEmbedding

    if not case.interleaved or data.positions is not None or case.layout == "packed":
        raise NotImplementedError("it rotates only interleaved pairs, and takes no positions and no packed tensors")
    module = RotaryEmbedding(case.rotary_dim, theta=BASE, cache_max_seq_len=max(8192, case.seq)).to(data.device)
    rotate = partial(module.rotate_queries_or_keys, seq_dim=-2 if case.layout == "bhsd" else -3)
    return run_of(case, data, lambda q, k: (rotate(q), rotate(k)), heads_first=case.layout == "bhsd")


@adapter("liger")
def liger(case: Case, data: Data) -> Run:
    """Liger's function. It always works in place. Its tables have q's dtype, as in a model."""
    check_cuda(data, "liger_kernel.ops.rope")
    from liger_kernel.ops.rope import LigerRopeFunction

    if case.interleaved or case.rotary_dim < case.head_dim:
        raise NotImplementedError("it rotates only whole heads with half-split pairs")
    cos, sin = data.wide_rows
    return run_of(case, data, lambda q, k: LigerRopeFunction.apply(q, k, cos, sin), heads_first=True)


@adapter("flashinfer in place")
def flashinfer(case: Case, data: Data) -> Run:
    check_cuda(data, "flashinfer.rope")
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    if case.rotary_dim % 32 and not case.interleaved:  # flashinfer would read past the end of memory
        raise NotImplementedError("its vectors of 16 channels would cross the boundary of the two halves")
    if case.layout != "bshd":
        raise NotImplementedError("it takes only the layout bshd")
    table, positions = torch.cat([data.cos, data.sin], -1), flat_positions(case, data).int()

    def forward(q, k):
        flat = (x.view(case.tokens, -1) for x in (q, k))
        apply_rope_with_cos_sin_cache_inplace(positions, *flat, case.head_dim, table, not case.interleaved)
        return q, k

    return run_of(case, data, forward, in_place=True)


@adapter("vllm in place")
def vllm(case: Case, data: Data) -> Run:
    check_cuda(data, "vllm._custom_ops")
    from vllm._custom_ops import rotary_embedding

    if case.layout == "bhsd":
        raise NotImplementedError("it takes no heads before tokens")
    table, positions = torch.cat([data.cos, data.sin], -1), flat_positions(case, data).long()

    def forward(q, k):
        flat = (x.view(case.tokens, *x.shape[2:]) for x in (q, k))
        rotary_embedding(positions, *flat, case.head_dim, table, not case.interleaved)
        return q, k

    return run_of(case, data, forward, in_place=True)


def flat_positions(case: Case, data: Data) -> Tensor:
    """Returns the position of each token, counted over all sequences."""
    given = data.positions
    return torch.arange(case.tokens, device=data.device) % case.seq if given is None else given.flatten()


# ---- The kernels of peers.cu, which work as those of others do ----


@functools.cache
def library_of_peers() -> ctypes.CDLL:
    """Returns the library of peers.cu, which is compiled once for each GPU."""
    source = Path(__file__).with_name("peers.cu")
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    library = source.parent.parent / "build" / "peers" / f"{source.stem}-{arch}-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        nvcc = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
        flags = "-O3", "-std=c++20", "-lineinfo", "-shared", "-Xcompiler=-fPIC", f"-arch={arch}"
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            subprocess.run([nvcc, *flags, source, "-o", made], check=True)
            made.replace(library)
    return ctypes.CDLL(str(library))


WAYS = "SGLang", "FlashInfer", "vLLM"  # of peers.cu


def rotate_as_peer(function, way, q, k, cos_sin, positions, rotary_dim, interleaved, dependent=True, stream=None):
    """Rotates q and k [tokens, heads, head_dim] in place by a kernel of peers.cu."""
    tensors = (x.data_ptr() for x in (q, k, cos_sin, positions))
    sizes = q.stride(0), k.stride(0), len(q), q.shape[1], k.shape[1], q.shape[2], rotary_dim
    flags = WAYS.index(way), q.dtype == torch.bfloat16, interleaved, dependent and way == "SGLang"
    if error := function(struct.pack("4P2q5i", *tensors, *sizes), *flags, ctypes.c_void_p(stream)):
        raise RuntimeError(f"the kernel of peers.cu failed with CUDA error {error}")


@adapter("vLLM's way", way="vLLM")
@adapter("FlashInfer's way", way="FlashInfer")
@adapter("SGLang's way", way="SGLang")
def as_peer(case: Case, data: Data, way: str) -> Run:
    """A kernel of peers.cu, which works as the kernel of SGLang, FlashInfer or vLLM does."""
    check_cuda(data, "torch")
    if case.mode == "training" or case.dtype not in ("bfloat16", "float16") or case.layout == "bhsd":
        raise NotImplementedError("it takes only half types and no heads before tokens, and has no gradient")
    size = case.rotary_dim if way == "SGLang" else case.head_dim
    if way != "vLLM" and (size not in (32, 64, 128, 256) or case.rotary_dim % 16):
        raise NotImplementedError("it has no kernel for this size")
    q, k = (x.view(case.tokens, -1, case.head_dim) for x in (data.q, data.k))
    table, positions = torch.cat([data.cos, data.sin], -1), flat_positions(case, data).long()
    function, dependent = library_of_peers().rope_peer, torch.cuda.get_device_capability() >= (9, 0)
    arguments = table, positions, case.rotary_dim, case.interleaved, dependent

    def call():
        rotate_as_peer(function, way, q, k, *arguments, torch.cuda.current_stream().cuda_stream)
        return data.q, data.k

    return Run(call, list)


# ---- QK-norm and rotation ----


def rms_norms(tensors, weights) -> list[Tensor]:
    """Normalises each head, or all heads of a token together if the weights are [heads, head_dim]."""
    return [F.rms_norm(x, x.shape[-w.ndim :], w, EPS) for x, w in zip(tensors, weights, strict=True)]


@adapter(OURS, *EVERY_NORM)
def norm_rotate_qk(case: Case, data: Data) -> Run:
    forward = partial(rope.norm_rotate_qk, cos=data.cos, sin=data.sin, interleaved=case.interleaved)
    return run_of(case, data, forward, more=tuple(data.weights))


@adapter("rms_norm, then " + OURS, *EVERY_NORM)
def rms_norm_rotate_qk(case: Case, data: Data) -> Run:
    def forward(q, k, *weights):
        return rope.rotate_qk(*rms_norms((q, k), weights), data.cos, data.sin, interleaved=case.interleaved)

    return run_of(case, data, forward, more=tuple(data.weights))


def qwen3(q, k, q_weight, k_weight, cos, sin) -> tuple[Tensor, Tensor]:
    """Does what Qwen3's attention does to q and k, with the code of its norm and its rotary function."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    modules = (SimpleNamespace(weight=w, variance_epsilon=EPS) for w in (q_weight, k_weight))
    q, k = (Qwen3RMSNorm.forward(module, x) for module, x in zip(modules, (q, k), strict=True))
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)


def wan(q, k, q_weight, k_weight, cos, sin, rotate) -> list[Tensor]:
    """Does what Wan's attention in diffusers does to q and k. rotate is its rotary function."""
    rows = rms_norms([x.flatten(2) for x in (q, k)], (q_weight.flatten(), k_weight.flatten()))
    return [rotate(row.unflatten(2, x.shape[2:]), cos, sin) for row, x in zip(rows, (q, k), strict=True)]


@functools.cache
def wan_rotation() -> Callable:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    from torch_rope.integrations._names import made_inside, nested

    call = WanAttnProcessor.__call__
    (code,) = (code for code in nested(call.__code__) if code.co_name == "apply_rotary_emb")
    return made_inside(call, code)


@adapter("diffusers compiled", "norm over heads", function=wan, compile=True)
@adapter("diffusers", "norm over heads", function=wan)
@adapter("transformers compiled", "norm", function=qwen3, compile=True)
@adapter("transformers", "norm", function=qwen3)
def norm_then_rotation(case: Case, data: Data, function: Callable, compile=False) -> Run:
    tables = data.wide_rows
    if function is wan:  # its tables are float32 and have each number twice
        tables = [*(t.repeat_interleave(2, -1)[:, :, None] for t in data.rows), wan_rotation()]
    forward = compiled(function) if compile else function
    return run_of(case, data, forward, more=tuple(data.weights), after=tables)


# ---- Rotation and the write of k and v to a cache, with and without QK-norm, quantised or not ----


def cache_run(case: Case, data: Data, call: Callable) -> Run:
    """Returns a Run of a function that writes the caches and returns the rotated q."""
    data.caches  # noqa: B018  makes the caches now, because this property is cached
    return Run(call, lambda q: [q, *data.written()], context=torch.inference_mode)


@adapter(OURS, *EVERY_CACHE, "quantised cache")
def rotate_into_cache(case: Case, data: Data) -> Run:
    caches = [cache if case.paged else cache.transpose(1, 2) for cache in data.caches]
    weights = getattr(data, "weights", ())
    arguments = data.q, data.k, data.v, *caches, data.cos, data.sin, None, data.positions, 0, data.slots, *weights
    scales = dict(zip(("k_scale", "v_scale"), data.scales, strict=True)) if case.op == "quantised cache" else {}

    def call():
        rope.rotate_into_cache_(*arguments, **scales)
        return data.q

    return cache_run(case, data, call)


def targets_of(case: Case, data: Data) -> tuple[list[Tensor], int, Tensor, list[Tensor]]:
    """Returns the arguments of write: the caches, their dimension of tokens, the index of each token there, and the
    scales of quantised caches."""
    scales = getattr(data, "scales", [])
    if case.paged:
        return [cache.flatten(0, 1) for cache in data.caches], 0, data.slots.flatten(), scales
    return [cache.transpose(1, 2) for cache in data.caches], 1, data.positions[0], scales


def write(kv: tuple, caches: list[Tensor], dim: int, index: Tensor, scales: list[Tensor]) -> None:
    """Writes k and v to the caches by index_copy_, as transformers' StaticCache does. Quantises them if there are
    scales."""
    if scales:
        kv = [reference.quantise(x, scale, cache.dtype) for x, scale, cache in zip(kv, scales, caches, strict=True)]
    for cache, x in zip(caches, kv, strict=True):
        as_bytes(cache).index_copy_(dim, index, as_bytes(x if dim else x.flatten(0, 1)))


@adapter(OURS + ", then index_copy_", *EVERY_CACHE, "quantised cache")
def rotate_then_write(case: Case, data: Data) -> Run:
    """torch_rope with separate operators, which rotate and then write."""
    targets, angles = targets_of(case, data), (data.cos, data.sin, None, data.positions)

    def call():
        if "norm" in case.op:
            q, k = rope.norm_rotate_qk(data.q, data.k, *data.weights, *angles)
        else:
            q, k = rope.rotate_qk(data.q, data.k, *angles)
        write((k, data.v), *targets)
        return q

    return cache_run(case, data, call)


def layer(q, k, v, weights, cos, sin, *targets) -> Tensor:
    """Does what a layer of transformers does to q, k and v: torch's norm, transformers' function, index_copy_."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = rms_norms((q, k), weights) if weights else (q, k)
    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    write((k, v), *targets)
    return q


@adapter("transformers compiled", *EVERY_CACHE, "quantised cache", compile=True)
@adapter("transformers", *EVERY_CACHE, "quantised cache")
def transformers_into_cache(case: Case, data: Data, compile=False) -> Run:
    """A layer of transformers. If it is compiled, it is one graph."""
    arguments = data.q, data.k, data.v, getattr(data, "weights", None), *data.wide_rows, *targets_of(case, data)
    return cache_run(case, data, partial(compiled(layer) if compile else layer, *arguments))
