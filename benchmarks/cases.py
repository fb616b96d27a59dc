"""Defines the cases that are measured, their data, and the expected results in float64."""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

import torch_rope
from torch_rope import reference

BASE, EPS = 10000.0, 1e-6
CACHE = 8192  # tokens of a static cache; the smallest number of table rows if positions are given
PAGE = 16  # tokens of a page of a paged cache


@dataclass(frozen=True)
class Case:
    """A case: q [batch, seq, heads, head_dim], k [batch, seq, kv_heads, head_dim], and what is done with them."""

    group: str
    seq: int = 2048
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    rotary_dim: int = 0  # 0 means head_dim
    dtype: str = "bfloat16"
    layout: str = "bshd"  # the order in memory: "bshd", "bhsd", or "packed": q, k (and v) of a token together
    interleaved: bool = False
    # "rotate", "norm" (QK-norm and rotation), "norm over heads" (the same, with all heads of a token normalised
    # together), "cache" (rotation and the write to a KV cache), "norm cache", "quantised cache", "model" (a whole one),
    # or a rotary function: "function of diffusers", "function of comfy-kitchen" or "norm of comfy-kitchen"
    op: str = "rotate"
    mode: str = "inference"  # "inference", or "training" (forward and backward); of a whole model, what it does
    positions: str = ""  # the dtype of given positions, one for each token; if it is "", positions are 0, 1, 2 ...
    # the dtype of a paged cache; if it is "", a cache has q's dtype, and only several sequences have a paged one
    cache_dtype: str = ""
    # the model whose shape a whole model has, a key of MODELS; or the model that has a function, or the function's name
    model: str = ""

    def __post_init__(self):
        object.__setattr__(self, "rotary_dim", self.rotary_dim or self.head_dim)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def paged(self) -> bool:
        return self.batch > 1 or bool(self.cache_dtype)

    @property
    def name(self) -> str:
        if self.op == "model":
            batch = f"{self.batch} x " * (self.batch > 1)
            return f"{self.group}: {self.model}, {self.mode} {batch}{self.seq}, {self.dtype}"
        what = f"{self.group}: {self.model}, " if self.model else f"{self.group}: "
        parts = [
            f"{what}{self.batch} x {count(self.seq)}, {self.heads}/{self.kv_heads} of {self.head_dim}",
            f"rotary_dim {self.rotary_dim}" * (self.rotary_dim != self.head_dim),
            self.dtype,
            self.layout * (self.layout != "bshd"),
            "interleaved" * self.interleaved,
            self.op * (self.op != "rotate"),
            self.mode * (self.mode != "inference"),
            f"{self.positions} positions" * bool(self.positions),
            f"{self.cache_dtype} pages" * bool(self.cache_dtype),
        ]
        return ", ".join(filter(None, parts))

    @property
    def needed_bytes(self) -> int:
        """Returns the bytes that a rotation must read and write: q and k, the table rows it uses, and positions."""
        rows = self.tokens if self.positions else self.seq
        numbers = self.tokens * (self.heads + self.kv_heads) * self.head_dim
        moved = 2 * numbers * getattr(torch, self.dtype).itemsize + rows * self.rotary_dim * 4
        return moved + 8 * self.tokens * bool(self.positions)


def count(n: int) -> str:
    return f"{n >> 20}M" if n >= 2**20 and n % 2**20 == 0 else f"{n >> 10}k" if n >= 1024 and n % 1024 == 0 else str(n)


HALF_AND_FULL = "bfloat16", "float32"


def cases(device: str) -> list[Case]:
    """Returns all cases of a device, group by group."""
    cuda = device == "cuda"
    dtypes = HALF_AND_FULL[:1] if cuda else HALF_AND_FULL  # a machine with a GPU may be lent for minutes
    if cuda:
        result = [Case("sweep", n, positions="int64") for n in (1, 16, 64, 256, 1024, 2048, 4096, 32768)]
    else:
        result = [Case("sweep", 4**i) for i in range(9)]
        # These have few heads, so that they fit the memory of a small machine.
        result += [Case("sweep", 4**i, heads=4, kv_heads=1) for i in (9, 10)]
    result += [Case("decode", 1, 4**i, positions="int64") for i in range(5)]
    result += [Case("decode", 1, 1, dtype="float32", positions="int64")]
    result += [Case("decode", 1, 1, positions="int64", interleaved=True)]
    result += [Case("shapes", head_dim=d) for d in (64, 80, 96, 128, 192, 256)]
    result += [Case("shapes", rotary_dim=r) for r in (64, 32)] + [Case("shapes", head_dim=256, rotary_dim=64)]
    result += [Case("shapes", head_dim=80, rotary_dim=20)]  # Pythia
    result += [Case("shapes", rotary_dim=64, interleaved=True)]
    result += [Case("shapes", dtype=t, interleaved=i) for t in ("float32", "float16", "float64") for i in (False, True)]
    result += [Case("shapes", interleaved=True)]
    result += [Case("shapes", layout=layout, dtype=t) for layout in ("bhsd", "packed") for t in ("bfloat16", "float32")]
    result += [Case("shapes", batch=4, seq=512, positions="int64")]
    result += [Case("training", dtype=t, interleaved=i, mode="training") for t in dtypes for i in (False, True)]
    result += [Case("norm", seq, dtype=t, op="norm") for seq in (1, 2048) for t in dtypes]
    result += [Case("norm", dtype=t, op="norm", mode="training") for t in dtypes]
    for op in ("cache", "norm cache"):
        result += [Case("cache", seq, dtype=t, op=op, positions="int64") for seq in (1, 2048) for t in dtypes]
        result += [Case("cache", 1, 64, op=op, positions="int64")]
    for dtype, shape in itertools.product(("bfloat16", "float8_e4m3fn", "int8"), ((2048, 1), (1, 1), (1, 64))):
        op = "cache" if dtype == "bfloat16" else "quantised cache"
        result += [Case("quantised", *shape, op=op, positions="int64", cache_dtype=dtype)]
    wan = {"head_dim": 128, "interleaved": True, "op": "norm over heads"}
    for heads, mode in itertools.product((12, 40), ("inference", "training")):
        result += [Case("norm-over-heads", 4096, heads=heads, kv_heads=heads, mode=mode, **wan)]
    if cuda:
        result += [Case("norm-over-heads", 32760, heads=n, kv_heads=n, **wan) for n in (12, 40)]
        result += [Case("models", 2048, 2, op="model", model="Qwen3 of 12 layers", mode="training on")]
        result += [Case("models", 4096, op="model", model="Qwen3 of 12 layers", mode="prompt of")]
        result += [Case("models", 128, op="model", model="Qwen3 of 8 layers", mode="decoding after")]
    else:
        for m, t in itertools.product(("SmolLM2-135M", "Qwen3-0.6B"), HALF_AND_FULL):
            # The larger model takes too long in bfloat16 on a CPU without instructions for it.
            few = m == "Qwen3-0.6B" and t == "bfloat16"
            steps = ("decoding after", 128), *([("prompt of", 512), ("training on", 128)] * (not few))
            result += [Case("models", n, op="model", model=m, mode=step, dtype=t) for step, n in steps]
        result += diffusion()
    return result


def diffusion() -> list[Case]:
    """Returns the cases of rotary functions of diffusers and comfy-kitchen."""

    def case(model, seq, heads, op="function of diffusers", mode="inference", interleaved=True, **fields):
        fields |= {"model": model, "heads": heads, "kv_heads": heads, "interleaved": interleaved}
        return Case("diffusion", seq, op=op, mode=mode, **fields)

    both = "inference", "training"
    result = [case("Wan", 4096, 12, mode=mode) for mode in both] + [case("Wan", 4096, 12, dtype="float32")]
    # 81 frames of 832 x 480 and of 1280 x 720 pixels have 32760 and 75600 tokens.
    result += [case("Wan", *shape) for shape in ((4096, 40), (32760, 12), (75600, 12))]
    result += [case(model, 4096, 24, mode=mode) for model in ("Flux", "Qwen-Image") for mode in both]
    result += [case("Cosmos", 4096, 24, mode=mode, interleaved=False) for mode in both]
    # LTX rotates all 2048 channels of a token as one head.
    result += [case("LTX", 4096, 1, mode=mode, head_dim=2048) for mode in both]
    for model, op in (("apply_rope", "function of comfy-kitchen"), ("rms_rope", "norm of comfy-kitchen")):
        result += [case(model, *shape, op) for shape in ((4096, 24), (32760, 12))]
    return result


class Data:
    """The tensors of a case. q, k and v are views [batch, seq, heads, head_dim] of memory in the layout of the case."""

    def __init__(self, case: Case, device: str):
        self.case, self.device, self.dtype = case, device, getattr(torch, case.dtype)
        if case.op == "model":
            return
        torch.manual_seed(0)
        self.inv_freq = torch_rope.inv_freq(case.rotary_dim, BASE, device=device)
        self.q, self.k, self.v = self._heads()
        rows = max(case.seq, CACHE) if case.positions else case.seq
        # cos and sin are [rows, rotary_dim / 2] and right to 5e-7 at any position.
        self.cos, self.sin = torch_rope.cos_sin(torch.arange(rows, device=device), self.inv_freq)
        self.positions = self.slots = None
        if case.positions:  # consecutive positions, which begin at a random position in each sequence
            first = torch.randint(rows - case.seq + 1, (case.batch, 1), device=device)
            self.positions = (first + torch.arange(case.seq, device=device)).to(getattr(torch, case.positions))
        if "norm" in case.op:
            shapes = [(case.head_dim,)] * 2
            if case.op == "norm over heads":
                shapes = (case.heads, case.head_dim), (case.kv_heads, case.head_dim)
            self.weights = [(1 + noise(shape, torch.float32, device) / 8).to(self.dtype) for shape in shapes]
        if case.op == "quantised cache":
            self.scales = [torch.full((1,), scale_of(case.cache_dtype), device=device) for _ in "kv"]
        if case.mode == "training":
            self.gradients = self._heads()[:2]

    def _heads(self) -> list[Tensor]:
        """Returns tensors of the shapes of q, k and v."""
        case, counts = self.case, [self.case.heads, self.case.kv_heads, self.case.kv_heads]
        if case.layout == "packed":
            shape = case.batch, case.seq, sum(counts), case.head_dim
            return list(noise(shape, self.dtype, self.device).split(counts, 2))
        if case.layout == "bhsd":
            shapes = [(case.batch, n, case.seq, case.head_dim) for n in counts]
            return [noise(shape, self.dtype, self.device).transpose(1, 2) for shape in shapes]
        return [noise((case.batch, case.seq, n, case.head_dim), self.dtype, self.device) for n in counts]

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """cos and sin [batch or 1, seq, rotary_dim / 2]: tables by token."""
        at = slice(None) if self.positions is None else self.positions.long()
        return tuple(t[at] if self.positions is not None else t[None] for t in (self.cos, self.sin))

    @cached_property
    def wide_rows(self) -> list[Tensor]:
        """cos and sin [batch or 1, seq, rotary_dim] in q's dtype: the tables of transformers."""
        return [torch.cat([t, t], -1).to(self.dtype) for t in self.rows]

    @cached_property
    def caches(self) -> list[Tensor]:
        """k_cache and v_cache.

        They are static caches [1, kv_heads, tokens, head_dim], as in transformers, or paged caches
        [pages, PAGE, kv_heads, head_dim], with slots: each sequence has as many pages as its tokens may need.
        """
        case, dtype = self.case, getattr(torch, self.case.cache_dtype or self.case.dtype)
        if case.paged:
            each = 1 + (case.seq + PAGE - 2) // PAGE
            shape = 4 * case.batch * each, PAGE, case.kv_heads, case.head_dim
            pages = torch.randperm(shape[0], device=self.device)[: case.batch * each].view(case.batch, each)
            page, place = self.positions.long() // PAGE, self.positions.long() % PAGE
            self.slots = pages.gather(1, page - page[:, :1]) * PAGE + place
        else:
            shape = 1, case.kv_heads, CACHE, case.head_dim
        return [torch.zeros(shape, dtype=dtype, device=self.device) for _ in "kv"]

    def written(self) -> list[Tensor]:
        """Returns k and v as they were written to the caches, or as they are read from quantised caches."""
        if not self.case.paged:
            return [cache.transpose(1, 2)[:, self.positions[0].long()] for cache in self.caches]
        found = [as_bytes(cache).flatten(0, 1)[self.slots].view(cache.dtype) for cache in self.caches]
        if self.case.op != "quantised cache":
            return found
        return [x.float() * scale for x, scale in zip(found, self.scales, strict=True)]


def as_bytes(x: Tensor) -> Tensor:
    """Returns a tensor of numbers of one byte as uint8, because PyTorch does not index float8."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def noise(shape: tuple, dtype: torch.dtype, device: str) -> Tensor:
    """Returns normally distributed numbers, which repeat after a prime number of elements.

    They repeat because drawing many random numbers takes longer than rotating them.
    """
    number = math.prod(shape)
    drawn = torch.randn(min(number, 1000003), device=device).to(dtype)
    return drawn.repeat(-(-number // drawn.numel()))[:number].view(shape)


def right_answer(case: Case, data: Data) -> tuple[list[Tensor], Tensor | slice]:
    """Returns the expected results, and the indices of the tokens for which they were computed.

    torch_rope.reference computes the results in float64, for some hundred tokens, or for all tokens if a result is a
    sum over tokens. The results are tensors [batch, tokens, heads, head_dim]: the rotated q and k, and v if there is a
    cache. In training they are the gradients of the inputs.
    """
    sums = case.mode == "training" and "norm" in case.op
    n = case.seq if sums else min(case.seq, max(1, 256 // case.batch))
    at = torch.linspace(0, case.seq - 1, n, dtype=torch.float64).round().long().to(data.device)

    def exact(x: Tensor) -> Tensor:
        return x[:, at].double()

    q, k = exact(data.q), exact(data.k)
    cos, sin = map(exact, data.rows)
    weights = [w.double() for w in getattr(data, "weights", [])]
    inputs = [q, k, *weights]
    if case.mode == "training":
        for x in inputs:
            x.requires_grad_()

    flags = {"interleaved": case.interleaved}
    if weights:
        result = list(reference.norm_rotate_qk(q, k, *weights, cos, sin, norm_eps=EPS, **flags))
    else:
        result = list(reference.rotate_qk(q, k, cos, sin, **flags))
    if case.mode == "training":
        result = torch.autograd.grad(result, inputs, [exact(g) for g in data.gradients])
    elif "cache" in case.op:
        result.append(exact(data.v))
    return [x.detach() for x in result], at


def what_is_wrong(case: Case, results: list[Tensor], expected: list[Tensor]) -> str:
    """Returns why results are wrong, or an empty string if they are right. Both arguments are for the same tokens.

    A result is wrong if its error is larger than rounding explains: the rounding of each intermediate number, and of an
    angle of several thousand radians in float32. A number from a quantised cache may also be off by half a step of the
    cache.
    """
    if len(results) != len(expected):
        return f"the number of results is {len(results)} but must be {len(expected)}"
    info = torch.finfo(getattr(torch, case.dtype))
    for number, (got, want) in enumerate(zip(results, expected, strict=True)):
        got = got if got.ndim == 4 else got.reshape(want.shape)
        if got.shape != want.shape:
            return f"a result has shape {tuple(got.shape)} but must have {tuple(want.shape)}"
        # Rotated heads are as large as the inputs. Sums over tokens are larger, and have larger errors.
        size = want.abs().amax().clamp(min=1.0)
        error = (got.double() - want).abs()
        if case.op == "quantised cache" and number > 0:
            step = scale_of("int8") if case.cache_dtype == "int8" else want.abs() / 8 + scale_of(case.cache_dtype) / 512
            error = error - step / 2
        error = error.max() / size
        # The condition is negated, so that NaN is wrong too.
        if not error <= max(8 * info.eps, 8e-4 if case.seq <= 8192 else 1e-7 * case.seq):
            return f"the error is {error * size:.2g} and the largest expected number is {size:.2g}"
    return ""


def scale_of(dtype: str) -> float:
    """Returns the scale of a quantised cache. No rotated number is as large as 8, so none is saturated."""
    return 8 / (torch.iinfo if dtype == "int8" else torch.finfo)(getattr(torch, dtype)).max
