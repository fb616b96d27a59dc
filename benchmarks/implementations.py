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
import subprocess
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import torch_rope  # noqa: F401  torch.ops.rope

from .cases import BASE, CACHE, EPS, LARGEST, MODELS, PAGE, Case, Data, as_bytes

rope = torch.ops.rope
OURS = "torch_rope"
EVERY_NORM = "norm", "norm over heads"
EVERY_CACHE = "cache", "norm cache"
OF_COMFY = "function of comfy-kitchen", "norm of comfy-kitchen"
FUNCTIONS = "function of diffusers", *OF_COMFY


@dataclass
class Run:
    """A call of one implementation, and how to interpret it."""

    call: Callable[[], Any]  # the function that is timed
    results: Callable[[Any], list[Tensor]]  # makes results in the form of right_answer from the value that call returns
    in_place: bool = False
    compiled: bool = False
    counted: bool = True  # True if the implementation uses torch's operators and memory, which can be counted
    loops: int = 0  # the number of loops of a compiled function
    limit: bool = False  # True if it only moves the data and does not rotate
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


def run_of(case: Case, data: Data, forward: Callable, heads_first=False, more=(), after=(), **options) -> Run:
    """Returns a Run of forward(q, k, *more, *after), which returns the rotated q and k.

    If heads_first is True, forward takes and returns [batch, heads, seq, head_dim]. The tensors in more have gradients
    too.
    """

    def native(tensors):
        return [x.transpose(1, 2) if heads_first and x.ndim == 4 else x for x in tensors]

    inputs = [*native([data.q, data.k]), *more]
    context = torch.inference_mode if case.mode == "inference" else torch.no_grad
    if case.mode in ("grad", "training"):
        inputs = [x if isinstance(x, torch.nn.Parameter) else x.detach().requires_grad_() for x in inputs]
        context = torch.enable_grad
    if case.mode == "training":
        if options.get("in_place"):
            raise NotImplementedError("an in-place operator has no gradient")
        gradients = native(data.gradients)

        def call():
            return torch.autograd.grad(forward(*inputs, *after), inputs, gradients)

    elif case.mode == "grad" and options.get("in_place"):
        raise NotImplementedError("an in-place operator has no gradient")
    else:
        call = partial(forward, *inputs, *after)
    return Run(call, native, context=context, **options)


@functools.cache  # a process has one case, so one compiled function serves all of its sets of data
def compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)


def check_cuda(data: Data, module: str) -> None:
    if data.device != "cuda":
        raise NotImplementedError("it runs only on NVIDIA GPUs")
    importlib.import_module(module)


# ---- Rotation ----


@adapter("copy", "rotate", *EVERY_NORM, "learned", *FUNCTIONS)
def copy(case: Case, data: Data) -> Run:
    """The limit: reads and writes q and k once (in training twice), into existing memory."""
    pairs = [(torch.empty_like(x), x) for x in (data.q, data.k)] * (2 if case.mode == "training" else 1)

    def call():
        for into, x in pairs:
            into.copy_(x)

    return Run(call, lambda _: [], limit=True)


def our_angles(data: Data, source: str) -> tuple:
    """Returns (cos, sin, inv_freq, positions)."""
    tables = (data.cos, data.sin, None) if source == "tables" else (None, None, data.inv_freq)
    return *tables, data.positions


def flags_of(case: Case) -> dict:
    """Returns the keyword arguments of a rotation. A default is not passed, because that takes time."""
    return {"interleaved": True} if case.interleaved else {}


@adapter(OURS + " inv_freq", source="inv_freq")
@adapter(OURS)
def rotate_qk(case: Case, data: Data, source="tables") -> Run:
    forward = partial(rope.rotate_qk, interleaved=True) if case.interleaved else rope.rotate_qk
    return run_of(case, data, forward, after=our_angles(data, source))


@adapter(OURS + " in place")
def rotate_qk_in_place(case: Case, data: Data) -> Run:
    rotate = partial(rope.rotate_qk_, interleaved=True) if case.interleaved else rope.rotate_qk_

    def forward(q, k, *angles):
        rotate(q, k, *angles)
        return q, k

    return run_of(case, data, forward, after=our_angles(data, "tables"), in_place=True)


@adapter(OURS, "learned")
def rotate_qk_learned(case: Case, data: Data) -> Run:
    tables = data.cos.to(data.dtype), data.sin.to(data.dtype)
    return run_of(case, data, partial(rope.rotate_qk, interleaved=case.interleaved), more=tables)


@adapter("transformers compiled", compile=True)
@adapter("transformers")
def transformers(case: Case, data: Data, compile=False) -> Run:
    """The function of a model with this pairing. q has the layout that it has in memory."""
    model = "glm" if case.interleaved else "gpt_neox" if case.rotary_dim < case.head_dim else "llama"
    function = importlib.import_module(f"transformers.models.{model}.modeling_{model}").apply_rotary_pos_emb
    heads_first = case.layout == "bhsd"
    angles = dict(zip(("cos", "sin"), data.wide_rows, strict=True), unsqueeze_dim=1 if heads_first else 2)
    function = compiled(function) if compile else function
    return run_of(case, data, partial(function, **angles), heads_first, compiled=compile)


def with_learned_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(q, k, *(torch.cat([t, t], -1)[None] for t in (cos, sin)), unsqueeze_dim=2)


@adapter("transformers compiled", "learned", compile=True)
@adapter("transformers", "learned")
def transformers_learned(case: Case, data: Data, compile=False) -> Run:
    tables = data.cos.to(data.dtype), data.sin.to(data.dtype)
    forward = compiled(with_learned_tables) if compile else with_learned_tables
    return run_of(case, data, forward, more=tables, compiled=compile)


@adapter("torchtune")
def torchtune(case: Case, data: Data) -> Run:
    """torchtune's formula: interleaved pairs, float32 arithmetic, a table of cos and sin indexed by position."""
    if not case.interleaved or case.rotary_dim < case.head_dim:
        raise NotImplementedError("it rotates only whole heads with interleaved pairs")
    cache = torch.stack([data.cos, data.sin], -1)  # [rows, rotary_dim / 2, 2]

    def rotate(x):
        angles = cache[: x.shape[1]] if data.positions is None else cache[data.positions]
        cos, sin = angles.unsqueeze(-3).unbind(-1)
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).type_as(x)

    return run_of(case, data, lambda q, k: (rotate(q), rotate(k)))


@adapter("rotary-embedding-torch")
def rotary_embedding_torch(case: Case, data: Data) -> Run:
    from rotary_embedding_torch import RotaryEmbedding

    if not case.interleaved:
        raise NotImplementedError("it rotates only interleaved pairs")
    if data.positions is not None:
        raise NotImplementedError("it takes one offset for all sequences, and no positions")
    if case.head_dim % 2 or case.layout == "packed":
        raise NotImplementedError("it takes no packed tensors")
    module = RotaryEmbedding(case.rotary_dim, theta=BASE, cache_max_seq_len=max(8192, case.seq)).to(data.device)
    rotate = partial(module.rotate_queries_or_keys, seq_dim=-2 if case.layout == "bhsd" else -3)
    return run_of(case, data, lambda q, k: (rotate(q), rotate(k)), heads_first=case.layout == "bhsd")


@adapter("torch.onnx.ops")
def onnx_ops(case: Case, data: Data) -> Run:
    if case.mode == "training":
        raise NotImplementedError("it has no gradient")
    tables = [t.to(data.dtype) for t in ((data.cos, data.sin) if data.positions is not None else data.rows)]
    if data.positions is None:
        tables = [t.expand(case.batch, -1, -1) for t in tables]
    partly = case.rotary_dim if case.rotary_dim < case.head_dim else 0
    options = {"interleaved": case.interleaved, "rotary_embedding_dim": partly}

    def rotate(x, heads):
        return torch.onnx.ops.rotary_embedding(x, *tables, data.positions, num_heads=heads, **options)

    return run_of(case, data, lambda q, k: (rotate(q, case.heads), rotate(k, case.kv_heads)), heads_first=True)


@adapter("onnxruntime")
def onnxruntime(case: Case, data: Data) -> Run:
    """The kernel of ONNX's operator, for q and k in one session, with inputs and outputs in bound memory."""
    import numpy
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper

    if data.device != "cpu" or case.mode in ("grad", "training") or case.dtype not in ("float32", "float16"):
        raise NotImplementedError("it does only inference on the CPU, in float32 and float16")
    if case.layout == "packed":
        raise NotImplementedError("it takes no packed tensors")
    heads_first = case.layout == "bhsd"  # otherwise x is [batch, seq, heads * head_dim]
    kind = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[case.dtype]
    partly = case.rotary_dim if case.rotary_dim < case.head_dim else 0
    positions = torch.arange(case.seq).expand(case.batch, -1) if data.positions is None else data.positions
    feeds = {"cos": data.cos.to(data.dtype), "sin": data.sin.to(data.dtype), "positions": positions.long().contiguous()}
    nodes = []
    for name, x, heads in (("q", data.q, case.heads), ("k", data.k, case.kv_heads)):
        feeds[name] = x.transpose(1, 2) if heads_first else x.flatten(2)
        options = {"interleaved": int(case.interleaved), "num_heads": heads, "rotary_embedding_dim": partly}
        inputs = name, "cos", "sin", "positions"
        nodes.append(helper.make_node("RotaryEmbedding", inputs, [name + "_rotated"], **options))
    values = {
        name: helper.make_tensor_value_info(name, TensorProto.INT64 if name == "positions" else kind, x.shape)
        for name, x in feeds.items()
    }
    outputs = [helper.make_tensor_value_info(x + "_rotated", kind, feeds[x].shape) for x in "qk"]
    graph = helper.make_graph(nodes, "rope", list(values.values()), outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    kept = {name: x.numpy() for name, x in feeds.items()}
    rotated = {x: numpy.empty_like(kept[x]) for x in "qk"}
    for name, x in kept.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(x))
    for name, x in rotated.items():
        binding.bind_output(name + "_rotated", "cpu", 0, x.dtype, x.shape, x.ctypes.data)

    def results(_):
        got = (torch.from_numpy(rotated[x]) for x in "qk")
        return [x.transpose(1, 2) if heads_first else x.unflatten(2, (-1, case.head_dim)) for x in got]

    return Run(partial(session.run_with_iobinding, binding), results, counted=False)


@adapter("mlx")
def mlx(case: Case, data: Data) -> Run:
    """mx.fast.rope of q and k, compiled and evaluated together. mx.vjp makes the gradient."""
    import mlx.core as mx
    import numpy

    if data.device == "cuda" or case.dtype == "float64":
        raise NotImplementedError(
            "it is not measured in float64" if case.dtype == "float64" else "it is measured on the CPU"
        )
    if case.layout == "packed":
        raise NotImplementedError("it takes no packed tensors")
    mx.set_default_device(mx.cpu)
    heads_first = case.layout == "bhsd"
    kinds = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}

    def to_mlx(x):
        x = (x.transpose(1, 2) if heads_first else x).contiguous()
        return mx.array(x.view(torch.uint8).numpy()).view(kinds[case.dtype])

    offset = 0 if data.positions is None else mx.array(data.positions[:, 0].int().numpy())
    options = {"traditional": case.interleaved, "base": BASE, "scale": 1.0, "offset": offset}

    def rotate(x):
        x = mx.fast.rope(x if heads_first else mx.swapaxes(x, 1, 2), case.rotary_dim, **options)
        return x if heads_first else mx.swapaxes(x, 1, 2)

    def forward(q, k):
        return [rotate(q), rotate(k)]

    def backward(q, k, q_grad, k_grad):
        return mx.vjp(forward, [q, k], [q_grad, k_grad])[1]

    inputs = [to_mlx(data.q), to_mlx(data.k)]
    if case.mode == "grad":
        raise NotImplementedError("its forward records no graph for gradients")
    if case.mode == "training":
        inputs += [to_mlx(g) for g in data.gradients]
    mx.eval(*inputs)
    function = mx.compile(backward if case.mode == "training" else forward)  # compiling never makes it slower

    def call():
        result = function(*inputs)
        mx.eval(*result)
        return result

    def results(arrays):
        got = [torch.from_numpy(numpy.array(x.view(mx.uint8))).view(data.dtype) for x in arrays]
        return [x.transpose(1, 2) if heads_first else x for x in got]

    return Run(call, results, counted=False)


@adapter("liger")
def liger(case: Case, data: Data) -> Run:
    """Liger's function. It always works in place. Its tables have q's dtype, as in a model."""
    check_cuda(data, "liger_kernel.ops.rope")
    from liger_kernel.ops.rope import LigerRopeFunction

    if case.interleaved or case.rotary_dim < case.head_dim:
        raise NotImplementedError("it rotates only whole heads with half-split pairs")
    cos, sin = data.wide_rows
    run = run_of(case, data, lambda q, k: LigerRopeFunction.apply(q, k, cos, sin), heads_first=True)
    run.in_place = True  # the gradient is computed in place too
    return run


@adapter("flash-attn in place", in_place=True)
@adapter("flash-attn")
def flash_attn(case: Case, data: Data, in_place=False) -> Run:
    check_cuda(data, "flash_attn.layers.rotary")
    from flash_attn.layers.rotary import apply_rotary_emb

    cos, sin = (t.to(data.dtype) for t in (data.cos, data.sin))
    options = {"interleaved": case.interleaved, "inplace": in_place}
    if data.positions is not None:  # flash-attn takes the position of the first token of each sequence
        options["seqlen_offsets"] = data.positions[:, 0]

    def forward(q, k):
        return apply_rotary_emb(q, cos, sin, **options), apply_rotary_emb(k, cos, sin, **options)

    return run_of(case, data, forward, in_place=in_place)


@adapter("flashinfer in place", in_place=True)
@adapter("flashinfer")
def flashinfer(case: Case, data: Data, in_place=False) -> Run:
    check_cuda(data, "flashinfer.rope")
    from flashinfer.rope import apply_rope_with_cos_sin_cache, apply_rope_with_cos_sin_cache_inplace

    if case.mode in ("grad", "training"):
        raise NotImplementedError("it has no gradient")
    if case.rotary_dim % 32 and not case.interleaved:  # flashinfer would read past the end of memory
        raise NotImplementedError("its vectors of 16 channels would cross the boundary of the two halves")
    if case.layout != "bshd":
        raise NotImplementedError("it takes only the layout bshd")
    table = torch.cat([data.cos, data.sin], -1)
    positions = torch.arange(case.tokens, device="cuda") % case.seq if data.positions is None else data.positions
    positions = positions.flatten().int()
    arguments = case.head_dim, table, not case.interleaved

    def forward(q, k):
        flat = [x.view(case.tokens, -1) for x in (q, k)]
        if in_place:
            apply_rope_with_cos_sin_cache_inplace(positions, *flat, *arguments)
            return q, k
        pair = apply_rope_with_cos_sin_cache(positions, *flat, *arguments)
        return [x.view(like.shape) for x, like in zip(pair, (q, k), strict=True)]

    return run_of(case, data, forward, in_place=in_place)


# ---- The kernels of this folder: how others work, and the limit of a decode step on a GPU ----


@functools.cache
def library_of(name: str) -> ctypes.CDLL:
    """Returns the library of a .cu file of this folder, which is compiled once for each GPU."""
    source = Path(__file__).parent / name
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    library = source.parent.parent / "build" / "peers" / f"{source.stem}-{arch}-{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        nvcc = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            subprocess.run([nvcc, *NVCC_FLAGS, f"-arch={arch}", source, "-o", made], check=True)
            made.replace(library)
    return ctypes.CDLL(str(library))


NVCC_FLAGS = "-O3", "-std=c++20", "-lineinfo", "-shared", "-Xcompiler=-fPIC"


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


def rotate_as_peer(
    function, way, q, k, cos_sin, positions, rotary_dim, interleaved, dependent=True, stream=None
) -> None:
    """Rotates q and k [tokens, heads, head_dim] in place by a kernel of peers.cu."""
    flags = way == "FlashInfer", q.dtype == torch.bfloat16, interleaved, dependent and way == "SGLang"
    strides = (ctypes.c_longlong(x.stride(0)) for x in (q, k))
    sizes = len(q), q.shape[1], k.shape[1], q.shape[2], rotary_dim
    if error := function(*flags, *pointers(q, k, cos_sin, positions), *strides, *sizes, ctypes.c_void_p(stream)):
        raise RuntimeError(f"the kernel of peers.cu failed with CUDA error {error}")


@adapter("FlashInfer's way", way="FlashInfer")
@adapter("SGLang's way", way="SGLang")
def as_peer(case: Case, data: Data, way: str) -> Run:
    """A kernel of peers.cu, which works as the kernel of SGLang or FlashInfer does."""
    check_cuda(data, "torch")
    if case.mode in ("grad", "training"):
        raise NotImplementedError("it has no gradient")
    if case.dtype not in ("bfloat16", "float16"):
        raise NotImplementedError("it takes only half types")
    if case.layout == "bhsd":
        raise NotImplementedError("it takes no layout with the heads first")
    size, sizes = (case.rotary_dim, (32, 64, 128, 256)) if way == "SGLang" else (case.head_dim, (64, 128, 256))
    if size not in sizes or case.rotary_dim % 16:
        raise NotImplementedError("it has no kernel for this size")
    q, k = (x.view(case.tokens, -1, case.head_dim) for x in (data.q, data.k))
    positions = torch.arange(case.tokens, device="cuda") % case.seq if data.positions is None else data.positions
    table, positions = torch.cat([data.cos, data.sin], -1), positions.flatten().long()
    function, dependent = library_of("peers.cu").rope_peer, torch.cuda.get_device_capability() >= (9, 0)
    arguments = table, positions, case.rotary_dim, case.interleaved, dependent

    def call():
        rotate_as_peer(function, way, q, k, *arguments, torch.cuda.current_stream().cuda_stream)
        return data.q, data.k

    return Run(call, list, in_place=True)


def limit_kernel(positions: Tensor, cos: Tensor, sin: Tensor, out: Tensor, threads: int) -> None:
    sizes = cos.stride(0) * 4 // 16, out.nbytes // len(positions) // 16, len(positions), threads
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if error := library_of("limit.cu").rope_limit(*pointers(positions, cos, sin, out), *sizes, stream):
        raise RuntimeError(f"the kernel of limit.cu failed with CUDA error {error}")


@adapter("least, blocks of 256", *EVERY_CACHE, "rotate", threads=256)
@adapter("least, blocks of 128", *EVERY_CACHE, "rotate", threads=128)
@adapter("least, blocks of 64", *EVERY_CACHE, "rotate", threads=64)
def least(case: Case, data: Data, threads: int) -> Run:
    """The limit of a decode step: one launch that reads each position and its table row, and writes the heads."""
    check_cuda(data, "torch")
    if case.seq > 1 or case.positions != "int64":
        raise NotImplementedError("it is only for decode steps")
    heads = case.heads + case.kv_heads * (2 if "cache" in case.op else 1)
    out = torch.empty(case.tokens, heads, case.head_dim, device="cuda", dtype=data.dtype)
    arguments = data.positions.flatten(), data.cos, data.sin, out, threads
    return Run(partial(limit_kernel, *arguments), lambda _: [], limit=True)


# ---- QK-norm and rotation ----


def rms_norms(tensors, weights) -> list[Tensor]:
    """Normalises each head, or all heads of a token together if the weights are [heads, head_dim]."""
    return [F.rms_norm(x, x.shape[-w.ndim :], w, EPS) for x, w in zip(tensors, weights, strict=True)]


@adapter(OURS, *EVERY_NORM)
def norm_rotate_qk(case: Case, data: Data) -> Run:
    forward = partial(rope.norm_rotate_qk, cos=data.cos, sin=data.sin, **flags_of(case))
    return run_of(case, data, forward, more=tuple(data.weights))


@adapter("rms_norm, then " + OURS, *EVERY_NORM)
def rms_norm_rotate_qk(case: Case, data: Data) -> Run:
    flags = flags_of(case)

    def forward(q, k, *weights):
        return rope.rotate_qk(*rms_norms((q, k), weights), data.cos, data.sin, **flags)

    return run_of(case, data, forward, more=tuple(data.weights))


@functools.cache
def qwen3(head_dim: int, device: str, dtype: torch.dtype) -> tuple[list[torch.nn.Module], Callable]:
    """Returns Qwen3's norms of q and k, and a function of q, k, the norms' weights, cos and sin."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    norms = [Qwen3RMSNorm(head_dim, EPS).to(device, dtype) for _ in "qk"]

    def forward(q, k, q_weight, k_weight, cos, sin):
        return apply_rotary_pos_emb(norms[0](q), norms[1](k), cos, sin, unsqueeze_dim=2)

    return norms, forward


@adapter("transformers compiled", "norm", compile=True)
@adapter("transformers", "norm")
def transformers_norm(case: Case, data: Data, compile=False) -> Run:
    """Qwen3's norms and its rotary function. The weights are the parameters of the norms."""
    norms, forward = qwen3(case.head_dim, data.device, data.dtype)
    for norm, weight in zip(norms, data.weights, strict=True):
        norm.weight.data.copy_(weight)
    weights = [norm.weight for norm in norms]
    forward = compiled(forward) if compile else forward
    return run_of(case, data, forward, more=weights, after=data.wide_rows, compiled=compile)


def wan(q, k, q_weight, k_weight, cos, sin) -> list[Tensor]:
    """Does what Wan's attention in diffusers does to q and k. diffusers has no function for it that could be called."""

    def rotate(x):
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        c, s = cos[..., 0::2], sin[..., 1::2]
        out = torch.empty_like(x)
        out[..., 0::2] = a * c - b * s
        out[..., 1::2] = a * s + b * c
        return out.type_as(x)

    rows = [x.flatten(2) for x in (q, k)]
    rows = rms_norms(rows, (q_weight.flatten(), k_weight.flatten()))
    return [rotate(row.unflatten(2, x.shape[2:])) for row, x in zip(rows, (q, k), strict=True)]


@adapter("diffusers compiled", "norm over heads", compile=True)
@adapter("diffusers", "norm over heads")
def diffusers(case: Case, data: Data, compile=False) -> Run:
    """Wan's norm of a token's row and its rotation. The tables are float32 and have each number twice."""
    tables = [t.repeat_interleave(2, -1)[:, :, None] for t in data.rows]
    return run_of(
        case, data, compiled(wan) if compile else wan, more=tuple(data.weights), after=tables, compiled=compile
    )


# ---- Rotation and the write of k and v to a cache, with and without QK-norm, quantised or not ----


@adapter("copy", *EVERY_CACHE)
def copy_into_cache(case: Case, data: Data) -> Run:
    """The limit: reads and writes q, k and v once."""
    caches, q_copy = data.caches, torch.empty_like(data.q)
    if case.paged:
        targets = [cache.flatten(0, 1)[: case.tokens].view_as(data.k) for cache in caches]
    else:
        targets = [cache.transpose(1, 2)[:, : case.seq] for cache in caches]

    def call():
        q_copy.copy_(data.q)
        for target, x in zip(targets, (data.k, data.v), strict=True):
            target.copy_(x)

    return Run(call, lambda _: [], context=torch.inference_mode, limit=True)


def cache_run(case: Case, data: Data, call: Callable, **options) -> Run:
    """Returns a Run of a function that writes the caches and returns the rotated q."""
    data.caches  # noqa: B018  makes the caches now, because this property is cached
    return Run(call, lambda q: [q, *data.written()], context=torch.inference_mode, **options)


@adapter(OURS, *EVERY_CACHE, "quantised cache")
def rotate_into_cache(case: Case, data: Data) -> Run:
    caches = [cache if case.paged else cache.transpose(1, 2) for cache in data.caches]
    weights = getattr(data, "weights", ())
    arguments = data.q, data.k, data.v, *caches, data.cos, data.sin, None, data.positions, 0, data.slots, *weights
    scales = dict(zip(("k_scale", "v_scale"), data.scales, strict=True)) if case.op == "quantised cache" else {}

    def call():
        rope.rotate_into_cache_(*arguments, **scales)
        return data.q

    return cache_run(case, data, call, in_place=True)


def targets_of(case: Case, data: Data) -> tuple[list[Tensor], int, Tensor, list[Tensor]]:
    """Returns the arguments of write: the caches, their dimension of tokens, the index of each token there, and the
    scales of quantised caches."""
    scales = getattr(data, "scales", [])
    if case.paged:
        return [cache.flatten(0, 1) for cache in data.caches], 0, data.slots.flatten(), scales
    return [cache.transpose(1, 2) for cache in data.caches], 1, data.positions[0], scales


def quantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what a quantised cache stores for x."""
    largest = LARGEST[str(dtype).removeprefix("torch.")]
    quotient = (x / scale).clamp(-largest, largest)
    return (quotient if dtype.is_floating_point else quotient.round()).to(dtype)


def write(kv: tuple, caches: list[Tensor], dim: int, index: Tensor, scales: list[Tensor]) -> None:
    """Writes k and v to the caches by index_copy_, as transformers' StaticCache does. Quantises them if there are
    scales."""
    if scales:
        kv = [quantised(x, scale, cache.dtype) for x, scale, cache in zip(kv, scales, caches, strict=True)]
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
    return cache_run(case, data, partial(compiled(layer) if compile else layer, *arguments), compiled=compile)


@adapter("xformers", *EVERY_CACHE)
def xformers(case: Case, data: Data) -> Run:
    """rope_padded, which computes angles from the base in the kernel and has a cache for each sequence.

    The norm, if there is one, is torch's, before the call.
    """
    check_cuda(data, "xformers.ops")
    from xformers.ops import rope_padded
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetPaddedKeysMask

    q, k, v = (x.reshape(1, case.tokens, -1, case.head_dim) for x in (data.q, data.k, data.v))
    ends = (data.positions[:, -1] + 1).tolist()
    bias = BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([case.seq] * case.batch, CACHE, ends, device="cuda")
    caches = [torch.zeros(1, case.batch * CACHE, case.kv_heads, case.head_dim, dtype=data.dtype, device="cuda")] * 2
    caches = [cache.clone() for cache in caches]
    at = (data.positions + CACHE * torch.arange(case.batch, device="cuda")[:, None]).flatten()

    def call():
        pair = rms_norms((q, k), data.weights) if "norm" in case.op else (q, k)
        return rope_padded(*pair, v, *caches, bias, theta=BASE, adjacents=case.interleaved)

    def results(rotated):
        return [x.view(case.batch, case.seq, -1, case.head_dim) for x in (rotated, *(c[:, at] for c in caches))]

    return Run(call, results, context=torch.inference_mode)


@adapter("flashinfer", *EVERY_CACHE)
def flashinfer_into_cache(case: Case, data: Data) -> Run:
    """flashinfer's norm, its rotation in place, and its append to pages. A server's scheduler prepares the pages."""
    check_cuda(data, "flashinfer.rope")
    from flashinfer.norm import rmsnorm
    from flashinfer.page import append_paged_kv_cache
    from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

    if not case.paged:
        raise NotImplementedError("it takes no static cache with the heads first")
    if case.seq > 1:
        raise NotImplementedError("it is only for decode steps")
    caches, table = tuple(data.caches), torch.cat([data.cos, data.sin], -1)
    each = torch.arange(case.batch + 1, device="cuda").int()
    slots = data.slots.flatten().int()
    pages = each[:-1], slots % PAGE, caches, slots // PAGE, each, slots % PAGE + 1
    q, k, v = (x[:, 0] for x in (data.q, data.k, data.v))

    def call():
        pair = q, k
        if "norm" in case.op:
            pair = [rmsnorm(x.flatten(0, 1), w).view(x.shape) for x, w in zip(pair, data.weights, strict=True)]
        apply_rope_with_cos_sin_cache_inplace(data.positions.flatten(), *(x.flatten(1) for x in pair), 128, table)
        append_paged_kv_cache(pair[1], v, *pages)
        return pair[0][:, None]

    return cache_run(case, data, call, in_place=True)


@adapter("flash-attn", *EVERY_CACHE)
def flash_attn_into_cache(case: Case, data: Data) -> Run:
    check_cuda(data, "flash_attn.ops.triton.rotary")
    from flash_attn.ops.triton.rotary import apply_rotary

    targets = targets_of(case, data)

    def call():
        pair = rms_norms((data.q, data.k), data.weights) if "norm" in case.op else (data.q, data.k)
        for x in pair:
            apply_rotary(x, data.cos, data.sin, data.positions[:, 0], inplace=True)
        write((pair[1], data.v), *targets)
        return pair[0]

    return cache_run(case, data, call, in_place=True)


# ---- Tables, and whole models ----


@adapter(OURS, "tables")
def cos_sin(case: Case, data: Data) -> Run:
    positions = torch.arange(case.seq, device=data.device)
    return Run(lambda: rope.cos_sin(positions, data.inv_freq), list)


@adapter("torch compiled", "tables", compile=True)
@adapter("torch", "tables")
def torch_tables(case: Case, data: Data, compile=False) -> Run:
    def forward(positions):
        angle = torch.outer(positions.float(), data.inv_freq)
        return angle.cos(), angle.sin()

    call = partial(compiled(forward) if compile else forward, torch.arange(case.seq, device=data.device))
    return Run(call, list, compiled=compile)


@adapter("torch_rope fused compiled", "model", patch={"fuse": True}, compile=True)
@adapter("torch_rope compiled", "model", patch={}, compile=True)
@adapter("transformers compiled", "model", compile=True)
@adapter("torch_rope fused", "model", patch={"fuse": True})
@adapter(OURS, "model", patch={})
@adapter("transformers", "model")
def model(case: Case, data: Data, patch: dict | None = None, compile=False) -> Run:
    """A model of transformers with the shape of a known one and random weights. The results are its logits or its loss.

    patch: the options of torch_rope.integrations.transformers.patch, or None. A decode step appends a token to a
    StaticCache, which is emptied when it is full. All implementations have the same weights.
    """
    from transformers import StaticCache

    from torch_rope.integrations import transformers as integration

    if compile and not (case.model == "SmolLM2-135M" and case.mode == "decoding after"):
        raise NotImplementedError("compiled only for one decode step, because compiling takes minutes")
    stock = model_of(case, data)
    model = deepcopy(stock, {id(p): p for p in stock.parameters()})
    if patch is not None:
        integration.patch(model, **patch)
    called = torch.compile(model) if compile else model
    tokens = torch.randint(stock.config.vocab_size, (1, case.seq + 1), generator=torch.Generator().manual_seed(0))

    def train():
        loss = called(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        model.zero_grad()
        return loss

    def prompt():
        return called(tokens[:, : case.seq], use_cache=False, logits_to_keep=1).logits

    if case.mode != "decoding after":
        context = torch.enable_grad if case.mode == "training on" else torch.no_grad
        call = train if case.mode == "training on" else prompt
        return Run(call, lambda x: [x.detach()], context=context)
    length = 4 * case.seq
    cache, used = StaticCache(config=model.config, max_cache_len=length), case.seq
    with torch.no_grad():
        model(tokens[:, : case.seq], past_key_values=cache)

    def step():
        nonlocal used
        if used == length:
            cache.reset()
            used = 0
        used += 1
        return called(tokens[:, case.seq :], past_key_values=cache).logits

    # The loops of a compiled model do not include its matrix products.
    return Run(step, lambda x: [x], counted=not compile)


def model_of(case: Case, data: Data) -> Any:
    """Returns the unpatched model of a case, which its data keep."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not hasattr(data, "model"):
        torch.manual_seed(0)
        kind, sizes = MODELS[case.model]
        data.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).to(data.dtype)
    return data.model


# ---- Diffusion models: the rotary functions of diffusers and comfy-kitchen, and a block of a model ----


def function_of(case: Case, data: Data) -> tuple[Callable, list, dict]:
    """Returns the rotary function of a model of diffusers, and its arguments after x: the tables in its form, and its
    options."""
    from diffusers.models import embeddings
    from diffusers.models.transformers import transformer_ltx, transformer_qwenimage, transformer_wan

    from torch_rope.integrations._conventions import each_twice
    from torch_rope.integrations._names import made_inside, nested

    cos, sin = each_twice(*data.rows, case.interleaved)  # [1, seq, rotary_dim]
    pair = [(cos[0], sin[0])]
    if case.model == "Wan":
        call = transformer_wan.WanAttnProcessor.__call__
        (code,) = (code for code in nested(call.__code__) if code.co_name == "apply_rotary_emb")
        return made_inside(call, code), [cos[:, :, None], sin[:, :, None]], {}
    if case.model == "Flux":
        return embeddings.apply_rotary_emb, pair, {"sequence_dim": 1}
    if case.model == "Cosmos":
        return embeddings.apply_rotary_emb, pair, {"use_real_unbind_dim": -2}
    if case.model == "Qwen-Image":
        return transformer_qwenimage.apply_rotary_emb_qwen, [torch.complex(data.cos, data.sin)], {"use_real": False}
    return transformer_ltx.apply_rotary_emb, [(cos, sin)], {}


@adapter(OURS, "function of diffusers", patched=True)
@adapter("diffusers", "function of diffusers")
def rotary_function(case: Case, data: Data, patched=False) -> Run:
    """The rotary function of a model of diffusers, or what takes its place in a patched model, for q and for k."""
    from torch_rope.integrations._rotary import Rotary
    from torch_rope.integrations.diffusers.conventions import CONVENTIONS, TEXTS

    function, tables, options = function_of(case, data)
    if patched:
        function = Rotary(function, case.model, CONVENTIONS, TEXTS)

    def rotate(x):
        if case.model == "LTX":  # x is [batch, seq, channels]
            return function(x[:, :, 0], *tables, **options)[:, :, None]
        return function(x, *tables, **options)

    # Cosmos has the heads before the tokens.
    return run_of(case, data, lambda q, k: (rotate(q), rotate(k)), heads_first=case.model == "Cosmos")


@adapter(OURS, *OF_COMFY, backend="torch_rope")
@adapter("comfy-kitchen", *OF_COMFY, backend="eager")
def comfy_kitchen(case: Case, data: Data, backend: str) -> Run:
    """A function of comfy-kitchen for q and k with one of its back ends. Tables are matrices, as in ComfyUI's Wan."""
    import comfy_kitchen

    from torch_rope.integrations.comfy_kitchen import register

    register()
    cos, sin = (t[:, :, None] for t in data.rows)
    matrices = torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))
    function, weights = getattr(comfy_kitchen, case.model), getattr(data, "weights", ())

    def forward(q, k):
        with comfy_kitchen.use_backend(backend):
            return function(q, k, matrices, *weights)

    return run_of(case, data, forward)


FFN, TEXT, RANK = 8960, 512, 16  # Wan 2.1 1.3B, the tokens of its text, and the rank of the LoRA


@adapter("torch_rope fused", "block", patch={"fuse": True})
@adapter(OURS, "block", patch={})
@adapter("diffusers", "block")
def block(case: Case, data: Data, patch: dict | None = None) -> Run:
    """A block of Wan in diffusers, or its self-attention, with random weights.

    patch: the options of torch_rope.integrations.diffusers.patch, or None. All implementations have the same weights.
    The result is that of the forward, or in training the gradients of x and of a LoRA for to_q, to_k and to_v.
    """
    from torch_rope.integrations import diffusers as integration

    stock, text, times = block_of(case, data)
    block = deepcopy(stock, {id(p): p for p in stock.parameters()})
    if patch is not None:
        integration.patch(block, **patch)
    x, tables = data.q.flatten(2), [t.repeat_interleave(2, -1)[:, :, None] for t in data.rows]
    if case.mode != "training":
        attends = case.model == "attention of Wan"
        call = partial(block.attn1, x, None, None, tables) if attends else partial(block, x, text, times, tables)
        return Run(call, lambda y: [y])
    inputs = [x.requires_grad_(), *(p for p in block.parameters() if p.requires_grad)]

    def train():
        return torch.autograd.grad(block(x, text, times, tables), inputs, data.gradients[0].flatten(2))

    return Run(train, list, context=torch.enable_grad)


def block_of(case: Case, data: Data) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """Returns the unpatched block of a case, the text and the embedding of the time step. The data keep them."""
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    if not hasattr(data, "block"):
        torch.manual_seed(0)
        width = case.heads * case.head_dim
        made = WanTransformerBlock(width, FFN, case.heads, cross_attn_norm=True).to(data.dtype).requires_grad_(False)
        if case.mode == "training":
            import peft

            names = ["to_q", "to_k", "to_v"]
            config = peft.LoraConfig(r=RANK, target_modules=names, init_lora_weights=False)
            made = peft.inject_adapter_in_model(config, made)
        data.block = made, torch.randn(1, TEXT, width).to(data.dtype), torch.randn(1, 6, width) / 10
    return data.block
