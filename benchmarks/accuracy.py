"""Measures the error of each implementation from position 1 to 2^24, and its effect on attention.

Every implementation is used end to end, as its users use it: its own code makes the angles from positions, and rotates.
The exact result is computed from the frequencies of torch_rope.frequencies, which are float64 and count as exact. It is
computed in float64 (in long double for float64 results). Each frequency is split into two parts whose products with a
position are exact.

A line of kind "accuracy" has the errors for one octave of positions, from 2^octave to 2^(octave + 1) - 1 (octave 24 is
only position 2^24). max_ulp and mean_ulp are errors in ulps: an ulp is the distance between neighbouring numbers of the
dtype at the magnitude of the rotated pair. max_relative is the error as a part of that magnitude. If the exact result
is rounded once, an element is off by at most half an ulp. This is the implementation "one rounding", and no other can
be better.

A line of kind "scores" has the errors for one number of tokens. q is at the last position and keys are at random
positions; both have normally distributed elements. score = q.k / sqrt(head_dim) is computed in float64 from the rotated
vectors. max_error and mean_error are errors of scores, whose standard deviation is 1. moved_weight is the part of a
softmax that moves to other keys: half of the sum of all differences. The softmax is that of the scores times SHARPNESS,
because the softmax of random q and k is flat and trained heads attend to few keys. With this factor, the 4096 keys
count as 5 to 60 keys of equal weight would (1 / the sum of the squares of the weights), and the largest weight is 0.07
to 0.4.

Frequencies that are rounded to float32 still make a rotary embedding, in which a score depends only on the distance. So
the error of "torch_rope float32 inv_freq" is a distance from the formula. Angles that are rounded to float32, as in
most peers, are no longer proportional to the position.

If users of a peer pass tables or frequencies to it, the peer gets what its users pass: tables computed in float32, in
x's dtype. For kinds other than default, the frequencies are the exact frequencies rounded once, which favours the peer.
The random numbers have fixed seeds, so one machine gives the same lines each time.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import torch_rope
from torch_rope import frequencies

HEAD_DIM, HEADS, TOKENS, KEYS, SHARPNESS = 128, 4, 32, 4096, 3.0
SINGLE_OR_HALF = (torch.float32, torch.bfloat16, torch.float16)
ALL = (*SINGLE_OR_HALF, torch.float64)
FEW = {0, 10, 17, 20, 24}  # the octaves that are measured for kinds other than default

# The rope_parameters of a config of transformers, which torch_rope.frequencies reads too.
SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "default, base 500000": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "short_factor": [1 + i / 32 for i in range(HEAD_DIM // 2)],
        "long_factor": [1 + i for i in range(HEAD_DIM // 2)],
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


class Scaling:
    """One of SCALINGS, and its frequencies."""

    def __init__(self, name: str):
        self.name, self.parameters = name, SCALINGS[name]
        self.kind, self.base = self.parameters["rope_type"], self.parameters["rope_theta"]
        self.factor = self.parameters.get("factor")
        self.config = {"head_dim": HEAD_DIM, "max_position_embeddings": 131072, "rope_parameters": self.parameters}

    def exact(self, positions: Tensor) -> frequencies.Frequencies:
        """Returns the exact frequencies of a sequence that ends at the highest position. Two kinds use its length."""
        return frequencies.from_config(self.config, seq_len=int(positions.max()) + 1)

    def usual(self, positions: Tensor) -> frequencies.Frequencies:
        """Returns the frequencies that users of peers have: in float32, on the device of positions."""
        inv_freq, attention_factor = self.exact(positions)
        if self.kind == "default":
            inv_freq = 1.0 / self.base ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        return frequencies.Frequencies(inv_freq.float().to(positions.device), attention_factor)

    def usual_tables(self, positions: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Returns cos and sin that users of peers have: computed in float32, then rounded to dtype."""
        inv_freq, attention_factor = self.usual(positions)
        angle = torch.outer(positions.float(), inv_freq)
        return [(table * attention_factor).to(dtype) for table in (angle.cos(), angle.sin())]


# ---- The exact result ----


def rotated(x: Tensor, positions: Tensor, scaling: Scaling) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the exact result, the magnitude of each element's pair)."""
    # torch_rope.reference is not exact enough: at position 2^24 its float64 angle is off by 2e-9, 3% of a float32 ulp.
    kind = np.longdouble if x.dtype == torch.float64 else np.float64
    inv_freq, attention_factor = scaling.exact(positions)
    inv_freq, p = inv_freq.numpy(), positions.cpu().numpy()[:, None, None].astype(kind)
    high = inv_freq.astype(np.float32).astype(np.float64)
    rotation = np.exp(1j * (p * high)) * np.exp(1j * (p * (inv_freq - high))) * kind(attention_factor)
    first, second = np.split(numpy_of(x).astype(kind), 2, -1)
    pairs = (first + 1j * second) * rotation
    return np.concatenate([pairs.real, pairs.imag], -1), np.tile(np.abs(pairs), 2)


def numpy_of(x: Tensor) -> np.ndarray:
    return x.cpu().double().numpy()


# ---- The implementations ----
# Each function returns, for (scaling, dtype), a function of x [tokens, heads, HEAD_DIM] and positions, which returns x
# rotated. The pairs of x are half-split.


def one_rounding(scaling, dtype):
    return lambda x, p: torch.from_numpy(rotated(x, p, scaling)[0].astype(np.float64)).to(dtype).to(x.device)


def ours(scaling, dtype):
    module = torch_rope.RotaryEmbedding.from_config(scaling.config, interleaved=False)
    return lambda x, p: module.to(x.device)(x, x, p)[0]


def ours_tables(scaling, dtype):
    def call(x, p):
        inv_freq, attention_factor = scaling.exact(p)
        wide = torch.promote_types(dtype, torch.float32)
        tables = torch_rope.cos_sin(p, inv_freq.to(p.device), attention_factor=attention_factor, dtype=wide)
        return torch_rope.rotate(x, *tables)

    return call


def ours_float32(scaling, dtype):
    def call(x, p):
        inv_freq, attention_factor = scaling.exact(p)
        inv_freq = inv_freq.float().to(p.device)  # as torch_rope.inv_freq(..., dtype=torch.float32) does
        return torch_rope.rotate(x, inv_freq=inv_freq, positions=p, attention_factor=attention_factor)

    return call


def heads_first(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Calls a function with x as [1, heads, tokens, HEAD_DIM], and returns the result in the shape of x."""
    return call(x.transpose(0, 1)[None])[0].transpose(0, 1)


def interleaved(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Calls a function with x permuted to interleaved pairs, and returns the result with half-split pairs."""
    x = call(torch.stack(x.chunk(2, -1), -1).flatten(-2))
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)


def transformers(scaling, dtype):
    """Uses the rotary module of a model: frequencies and angles are float32, cos and sin have x's dtype."""
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

    module = LlamaRotaryEmbedding(LlamaConfig(**scaling.config))

    def call(x, p):
        cos_sin = module.to(x.device)(x, p[None])
        return heads_first(lambda x: apply_rotary_pos_emb(x, x, *cos_sin)[0], x)

    return call


def torchtune(scaling, dtype):
    """Uses torchtune's formula: tables and arithmetic in float32. Only the table rows that are needed are made."""

    def call(x, p):
        cos, sin = (table[:, None] for table in scaling.usual_tables(p, torch.float32))
        even, odd = x.float().chunk(2, -1)  # torchtune has interleaved pairs; the arithmetic is the same
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1).type_as(x)

    return call


def rotary_embedding_torch(scaling, dtype):
    """Does what rotate_queries_or_keys does for a token at an offset. It counts positions in x's dtype."""
    from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb

    def call(x, p):
        inv_freq, scale = scaling.usual(p)
        given = {} if scaling.kind in ("default", "linear") else {"custom_freqs": inv_freq}
        factor = scaling.factor if scaling.kind == "linear" else 1.0
        module = RotaryEmbedding(HEAD_DIM, theta=scaling.base, cache_max_seq_len=1, **given).to(x.device)
        angle = module(p.to(dtype) / factor)
        return interleaved(lambda x: heads_first(lambda x: apply_rotary_emb(angle, x, scale=scale), x), x)

    return call


def mlx(scaling, dtype):
    """Uses mx.fast.rope on the CPU. It has no attention factor, so x is multiplied first, as in mlx_lm."""
    import mlx.core as mx

    def call(x, p):
        inv_freq, attention_factor = scaling.usual(p)
        how = {"base": scaling.base, "scale": 1 / scaling.factor if scaling.kind == "linear" else 1.0}
        if scaling.kind not in ("default", "linear"):
            how = {"base": None, "scale": 1.0, "freqs": mx.array((1 / inv_freq).numpy())}
        with mx.stream(mx.cpu):
            # x is a batch of sequences of one token. It is converted through float32, because numpy has no bfloat16;
            # this is exact.
            array = mx.array(x[:, :, None].float().numpy()).astype(getattr(mx, str(dtype)[6:]))
            array = array if attention_factor == 1 else attention_factor * array
            out = mx.fast.rope(array, HEAD_DIM, traditional=False, offset=mx.array(p.int().numpy()), **how)
            return torch.from_numpy(np.array(out.astype(mx.float32)))[:, :, 0].to(dtype)

    return call


def torch_onnx(scaling, dtype):
    from torch.onnx import ops

    def call(x, p):
        tables = [table[None] for table in scaling.usual_tables(p, dtype)]
        return heads_first(lambda x: ops.rotary_embedding(x, *tables), x)

    return call


def onnxruntime(scaling, dtype):
    import onnxruntime as runtime
    from onnx import TensorProto, helper

    kind = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16}[dtype]
    values = [helper.make_tensor_value_info(name, kind, None) for name in ("x", "cos", "sin", "y")]
    node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin"], ["y"])
    graph = helper.make_graph([node], "rotary", values[:3], values[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def call(x, p):
        cos, sin = (table[None].numpy() for table in scaling.usual_tables(p, dtype))

        def run(x):
            return torch.from_numpy(session.run(None, {"x": x.contiguous().numpy(), "cos": cos, "sin": sin})[0])

        return heads_first(run, x)

    return call


def xformers(scaling, dtype):
    from xformers.ops import rope_padded
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetPaddedKeysMask as Mask

    how = {"theta": scaling.base, "linear_scale": scaling.factor if scaling.kind == "linear" else 1.0}
    if scaling.kind == "llama3":
        how |= {
            "use_dynamic_scaling": True,
            "dynamic_old_context_len": scaling.parameters["original_max_position_embeddings"],
            "dynamic_scale_factor": scaling.factor,
            "dynamic_low_freq_factor": scaling.parameters["low_freq_factor"],
            "dynamic_high_freq_factor": scaling.parameters["high_freq_factor"],
        }

    def call(x, p):
        mask = Mask.from_seqlens(q_seqlen=[len(x)], kv_padding=len(x), kv_seqlen=[len(x)]).to(x.device)
        x = x[None]
        caches = torch.empty_like(x), torch.empty_like(x)
        return rope_padded(x, x, x, *caches, mask, seqpos=p.int(), adjacents=False, **how)[0]

    return call


def flash_attn(scaling, dtype):
    from flash_attn.ops.triton.rotary import apply_rotary

    return lambda x, p: apply_rotary(x[None], *scaling.usual_tables(p, dtype))[0]


def liger(scaling, dtype):
    from liger_kernel.ops.rope import LigerRopeFunction

    def call(x, p):
        tables = [torch.cat([table, table], -1)[None] for table in scaling.usual_tables(p, dtype)]
        # Liger's function works in place, so it gets copies.
        return heads_first(lambda x: LigerRopeFunction.apply(x.clone(), x.clone(), *tables)[0], x)

    return call


def flashinfer(scaling, dtype):
    """Uses the kernel that computes angles if it supports the kind, and otherwise the kernel for float32 tables."""
    from flashinfer import rope

    def call(x, p):
        how = {"rope_theta": scaling.base, "rope_scale": scaling.factor or 1.0}
        if scaling.kind in ("default", "linear"):
            return rope.apply_rope_pos_ids(x, x, p.int(), **how)[0]
        if scaling.kind == "llama3":
            how |= {name: scaling.parameters[name] for name in ("low_freq_factor", "high_freq_factor")}
            how["old_context_len"] = scaling.parameters["original_max_position_embeddings"]
            return rope.apply_llama31_rope_pos_ids(x, x, p.int(), **how)[0]
        table = torch.cat(scaling.usual_tables(p, torch.float32), -1)
        rows, flat = torch.arange(len(p), device=p.device), x.flatten(1)
        return rope.apply_rope_with_cos_sin_cache(rows, flat, flat, HEAD_DIM, table)[0].view_as(x)

    return call


class Implementation(NamedTuple):
    """A function that makes an implementation, and what the implementation supports."""

    make: Callable
    dtypes: tuple = SINGLE_OR_HALF
    kinds: Collection[str] = frequencies.KINDS
    device: str = ""  # the only device that it runs on; empty if it runs on all


IMPLEMENTATIONS = {
    "one rounding": Implementation(one_rounding, ALL),
    "torch_rope": Implementation(ours, ALL),
    "torch_rope tables": Implementation(ours_tables, ALL),
    "torch_rope float32 inv_freq": Implementation(ours_float32, ALL),
    "transformers": Implementation(transformers, ALL),
    "torchtune": Implementation(torchtune, ALL, ("default", "llama3")),
    "rotary-embedding-torch": Implementation(rotary_embedding_torch, ALL),
    "mlx": Implementation(mlx, device="cpu"),
    "torch.onnx.ops": Implementation(torch_onnx),
    "onnxruntime": Implementation(onnxruntime, (torch.float32, torch.float16), device="cpu"),
    "xformers": Implementation(xformers, kinds=("default", "linear", "llama3"), device="cuda"),
    "flash-attn": Implementation(flash_attn, device="cuda"),
    "liger": Implementation(liger, device="cuda"),
    "flashinfer": Implementation(flashinfer, (torch.bfloat16, torch.float16), device="cuda"),
}


# ---- The measurements ----


class Sample:
    """Random vectors at positions, and their exact rotation."""

    def __init__(self, seed: list[int], positions: np.ndarray, scaling: Scaling, dtype: torch.dtype, device: str):
        values = np.random.default_rng(seed).standard_normal((len(positions), HEADS, HEAD_DIM))
        self.x = torch.from_numpy(values).to(dtype)
        self.positions = torch.from_numpy(positions)
        self.exact, self.magnitude = rotated(self.x, self.positions, scaling)
        self.x, self.positions = self.x.to(device), self.positions.to(device)

    def rotated_by(self, call: Callable) -> np.ndarray:
        result = call(self.x, self.positions)
        assert result.dtype == self.x.dtype and result.shape == self.x.shape
        if not result.isfinite().all():
            raise ArithmeticError("the result is not finite")
        return numpy_of(result)


def octave_of(octave: int, scaling: Scaling, dtype: torch.dtype, device: str) -> Sample:
    first, end = 2**octave, 2 ** min(octave + 1, 24) + (octave == 24)
    positions = np.random.default_rng(octave).integers(first, end, TOKENS)
    positions[[0, -1]] = first, end - 1
    return Sample([octave, 1], positions, scaling, dtype, device)


def accuracy(sample: Sample, call: Callable) -> dict[str, float]:
    error, info = np.abs(sample.rotated_by(call) - sample.exact), torch.finfo(sample.x.dtype)
    ulp = np.ldexp(info.eps, np.frexp(np.maximum(sample.magnitude, info.tiny).astype(np.float64))[1] - 1)
    relative = error / np.maximum(sample.magnitude, info.tiny)
    return {"max_ulp": (error / ulp).max(), "mean_ulp": (error / ulp).mean(), "max_relative": relative.max()}


def q_and_keys(tokens: int, scaling: Scaling, dtype: torch.dtype, device: str) -> tuple[Sample, Sample]:
    positions = np.random.default_rng(tokens).integers(0, tokens, KEYS)
    q = Sample([tokens, 1], np.array([tokens - 1]), scaling, dtype, device)
    return q, Sample([tokens, 2], positions, scaling, dtype, device)


def scores(samples: tuple[Sample, Sample], call: Callable) -> dict[str, float]:
    def score(q, k):
        return np.einsum("hd,khd->hk", q[0], k) / math.sqrt(HEAD_DIM)

    def softmax(score):
        weight = np.exp(SHARPNESS * (score - score.max(-1, keepdims=True)))
        return weight / weight.sum(-1, keepdims=True)

    exact, actual = score(*(s.exact for s in samples)), score(*(s.rotated_by(call) for s in samples))
    error, moved = np.abs(actual - exact), np.abs(softmax(actual) - softmax(exact)).sum(-1) / 2
    return {"max_error": error.max(), "mean_error": error.mean(), "moved_weight": moved.mean()}


def study(
    device: str = "cpu",
    implementations: Collection[str] | None = None,
    octaves: Collection[int] = range(25),
    dtypes: Collection[torch.dtype] = ALL,
    tokens: Collection[int] = (131072, 1048576),
) -> Iterator[dict]:
    """Yields the lines, implementation by implementation in the order of IMPLEMENTATIONS.

    A line with a "status" has no figures but a "reason". It concerns a whole implementation, one dtype or kind of it,
    or one measurement.

    Args:
        device: the device of the tensors.
        implementations: keys of IMPLEMENTATIONS; None means all.
        octaves: octaves of positions, from 0 to 24. For kinds other than default, only the octaves in FEW are measured.
        dtypes: dtypes of x.
        tokens: numbers of tokens for the scores. Scores are measured for the kind default, and not in float64.
    """
    octave_sample, score_samples = functools.cache(octave_of), functools.cache(q_and_keys)
    scalings = [Scaling(name) for name in SCALINGS]
    for name in IMPLEMENTATIONS if implementations is None else implementations:
        implementation, line = IMPLEMENTATIONS[name], {"kind": "accuracy", "implementation": name}
        if implementation.device not in ("", torch.device(device).type):
            yield line | skipped(f"it runs only on {implementation.device}")
            continue
        try:
            implementation.make(scalings[0], torch.float32 if torch.float32 in implementation.dtypes else torch.float16)
        except Exception as error:  # any exception, because packages that do not fit this torch fail in many ways
            yield line | skipped(f"it cannot be imported: {reason(error)}")
            continue
        for dtype in (d for d in dtypes if d not in implementation.dtypes):
            yield line | {"dtype": str(dtype)[6:]} | skipped("it does not support this dtype")
        for scaling in scalings:
            if scaling.kind not in implementation.kinds:
                yield line | {"scaling": scaling.name} | skipped("it does not support this kind of frequencies")
                continue
            for dtype in (d for d in dtypes if d in implementation.dtypes):
                which = {"implementation": name, "dtype": str(dtype)[6:], "scaling": scaling.name}
                try:
                    call = implementation.make(scaling, dtype)
                except Exception as error:
                    yield {"kind": "accuracy", **which, "status": "failed", "reason": reason(error)}
                    continue
                for octave in sorted(octaves):
                    if scaling.kind == "default" or octave in FEW:
                        sample = octave_sample(octave, scaling, dtype, device)
                        yield {"kind": "accuracy", **which, "octave": octave, **figures(accuracy, sample, call)}
                for count in tokens if scaling.kind == "default" and dtype != torch.float64 else ():
                    samples = score_samples(count, scaling, dtype, device)
                    yield {"kind": "scores", **which, "tokens": count, **figures(scores, samples, call)}


def skipped(reason: str) -> dict[str, str]:
    return {"status": "skipped", "reason": reason}


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def figures(measure: Callable, samples, call: Callable) -> dict:
    try:
        return {name: float(f"{value:.4g}") for name, value in measure(samples, call).items()}
    except ArithmeticError as error:
        return {"status": "wrong", "reason": str(error)}
    except Exception as error:  # an implementation that fails must not prevent the others
        return {"status": "failed", "reason": reason(error)}
