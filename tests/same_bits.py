"""What a test computes twice, here and in another process, on another device, or with another instruction set."""

import hashlib
import itertools

import torch
from calls import DTYPES, SOURCES, make, supported
from cases import ALL_CALLS, CALLS, KERNELS, SIZES, covering

import torch_rope

rope = torch.ops.rope

BITS = covering(CALLS | {"size": SIZES[:2] + SIZES[3:]}, interacting=KERNELS[3:], exhaustive=ALL_CALLS)


def bits(there, device):
    """Yields what is computed on one device, for the calls of `device` that have the same bits as on the CPU.

    Those are all but sums over a head, and angles in double.
    """
    for i, case in enumerate(BITS):
        dtypes = case["dtype"], case["source"].freq_dtype
        if supported(device, *dtypes) and not (
            dtypes[0] == torch.float64 and case["source"].kind.startswith("inv_freq")
        ):
            torch.manual_seed(i)
            yield from rope.rotate_qk(**make("rotate_qk", there, **case, attention_factor=1.2))
    torch.manual_seed(0)
    positions, freq = torch.randint(-(2**40), 2**40, (3, 500)), torch_rope.inv_freq(64).float() * torch.rand(3, 32)
    positions[:, 250:] %= 7  # the sum over axes rounds small angles
    for kind, dtype in (torch.int64, torch.bfloat16), (torch.int64, torch.float16), (torch.float32, torch.float32):
        given, options = (positions.to(kind).to(there), freq.to(there)), {"dtype": dtype, "attention_factor": 1.1}
        yield from rope.axial_cos_sin(*given, **options)
        yield from rope.cos_sin(*(t[0] for t in given), **options)


# Fewer sources of angles than other tests have, because they are the same code in every build.
FACTORS = CALLS | {"source": [SOURCES[i] for i in (10, 2, 3, 7, 14)]}


def results(case):
    """Returns what the operators compute for a case of FACTORS."""
    for op in ("rotate_qk", "norm_rotate_qk", "_norm_rotate_qk_backward"):
        torch.manual_seed(1)
        yield from getattr(rope, op)(**make(op, **case, k_weight="own", attention_factor=1.1))
    once = {"q_weight": "float32", "k_weight": "own", "norm_weight_offset": 1.0, "q_factor": "[B,S,H]"}
    eagerly = dict.fromkeys(("q_weight", "k_weight", "v_weight"), "own") | {"norm_v": True, "q_factor": "[S]"}
    norms = {}, once, eagerly | {"eager_rounding": True, "round_before_weight": True}
    for norm, stored in itertools.product(norms, ((None, None), (torch.float8_e4m3fn,) * 2)):
        torch.manual_seed(1)
        of_cache = {"slots": "int64 [B,S]", "quantised": stored, "scales": "unusual"} | norm
        call = make("rotate_into_cache_", **case, **of_cache, attention_factor=1.1)
        rope.rotate_into_cache_(**call)
        yield from (call[name] for name in ("q", "k_cache", "v_cache"))


def conversions():
    """Returns angles of many positions, and every bfloat16 and float16 after the conversions both ways."""
    positions = torch.cat([torch.arange(3000), torch.randint(-(2**24), 2**24, (3000,))])
    for dtype in DTYPES:
        yield from torch_rope.cos_sin(positions, torch_rope.inv_freq(128), dtype=dtype)
    freq = torch.tensor([0.0] * 16 + [0.3] * 16)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(1, 512, 2, 64)
        x = x.masked_fill(x.isnan(), 1.0)
        for interleaved, factor in itertools.product((False, True), (1.0, 1.0003)):  # 65504 * 1.0003 is infinite
            yield torch_rope.rotate(x, inv_freq=freq, interleaved=interleaved, attention_factor=factor)


def instruction_set_and_digest():
    digest = hashlib.sha256()
    cases = covering(FACTORS, interacting=KERNELS[3:], exhaustive=ALL_CALLS)
    for t in itertools.chain(*map(results, cases), conversions()):
        digest.update(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return [torch_rope._C.cpu_instruction_set(), digest.hexdigest()]
