"""What a test computes twice, here and in another process, on another device, or with another instruction set."""

import hashlib
import itertools

import torch
from cases import ALL_CALLS, CALLS, DTYPES, KERNELS, SCALES, SIZES, SOURCES, covering, make_qk, supported

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
            q, k, angles = make_qk(there, **case)
            yield from rope.rotate_qk(q, k, **angles, interleaved=case["interleaved"], attention_factor=1.2)
    torch.manual_seed(0)
    positions, freq = torch.randint(-(2**40), 2**40, (3, 500)), torch_rope.inv_freq(64).float() * torch.rand(3, 32)
    positions[:, 250:] %= 7  # the sum over axes rounds small angles
    for kind, dtype in (torch.int64, torch.bfloat16), (torch.int64, torch.float16), (torch.float32, torch.float32):
        given, options = (positions.to(kind).to(there), freq.to(there)), {"dtype": dtype, "attention_factor": 1.1}
        yield from rope.axial_cos_sin(*given, **options)
        yield from rope.cos_sin(*(t[0] for t in given), **options)


# Fewer sources of angles than other tests have, because they are the same code in every build.
FACTORS = CALLS | {"source": [SOURCES[i] for i in (1, 3, 5, 9, 12)]}


def results(case):
    """Returns what the operators compute for a case of FACTORS."""
    torch.manual_seed(1)
    q, k, angles = make_qk("cpu", **case)
    (batch, seq, _, _, head_dim, _), dtype = case["size"], case["dtype"]
    weights = {"q_norm_weight": torch.rand(head_dim), "k_norm_weight": torch.rand(head_dim).to(dtype)}
    slots = torch.randperm(batch * seq + 3)[: batch * seq].view(batch, seq)
    options = angles | {"interleaved": case["interleaved"], "attention_factor": 1.1}
    yield from torch_rope.rotate_qk(q, k, **options)
    yield from torch_rope.norm_rotate_qk(q, k, **weights, **options)
    yield from torch.ops.rope._norm_rotate_qk_backward(q.flip(1), k.flip(1), q, k, **weights, **options)
    scales = dict(zip(("k_scale", "v_scale"), torch.tensor(SCALES)[torch.randint(10, (2, k.shape[2]))], strict=True))
    norms, formats = ({}, weights, {"eager_rounding": True}), {dtype: {}, torch.float8_e4m3fn: scales}
    for norm, stored in itertools.product(norms, formats):
        rotated, cache = q.clone(), torch.zeros(2, batch * seq + 3, *k.shape[2:], dtype=stored)
        torch_rope.rotate_into_cache_(rotated, k, -k, *cache, slots=slots, **norm, **options, **formats[stored])
        yield from (rotated, cache)
    if "cos" in angles:
        yield from torch.ops.rope._rotate_table_backward(q.flip(1), k.flip(1), q, k, **angles)


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
