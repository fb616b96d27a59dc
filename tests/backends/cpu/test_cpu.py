"""Tests that the CPU kernels give the same bits with every instruction set, and however heads are read and written."""

import hashlib
import itertools
import platform

import pytest
import torch
from cases import ALL_CALLS, CALLS, DTYPES, KERNELS, SCALES, SOURCES, covering, make_qk, python

import torch_rope

pytestmark = pytest.mark.cpu

# The values of ATEN_CPU_CAPABILITY, by which torch chooses an instruction set, and the build of the kernels for each.
CAPABILITIES = {"default": "plain", "avx2": "avx2", "avx512": "avx512"}

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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one build of the kernels")
def test_every_instruction_set_gives_the_same_bits():
    *others, here = list(CAPABILITIES)[: 1 + [*CAPABILITIES].index(torch.backends.cpu.get_cpu_capability().lower())]
    program = "import test_cpu; print(*test_cpu.instruction_set_and_digest())"
    runs = [python(program, ATEN_CPU_CAPABILITY=level) for level in others]
    assert not any(run.returncode for run in runs), [run.stderr for run in runs]
    names, digests = zip(*(run.stdout.split() for run in runs), instruction_set_and_digest(), strict=True)
    assert list(names) == [CAPABILITIES[level] for level in (*others, here)] and len({*digests}) == 1


@pytest.mark.parametrize("layout, dtype", [("bshd", torch.float32), ("bhsd", torch.bfloat16)])
@pytest.mark.parametrize("sizes", [(128, 128, 0, 0), (128, 100, 0, 0), (130, 128, 0, 30), (128, 128, 1, 0)])
def test_results_written_past_the_caches_have_the_same_bits(sizes, layout, dtype):
    """Large results are written past the caches if they are aligned. Their bits are those of small results."""
    (head_dim, rotary_dim, start, gap), seq, heads = sizes, 5000, 16
    shape = (seq, heads) if layout == "bshd" else (heads, seq)
    storage = torch.randn(seq * heads * (head_dim + gap) + start).to(dtype)
    # With a gap, the heads of x are aligned and only those of the result are not.
    x = storage[start:].view(1, *shape, head_dim + gap)[..., :head_dim].transpose(1, 1 + (layout == "bhsd"))
    for interleaved in (False, True):
        angles = {"inv_freq": torch.ones(rotary_dim // 2), "interleaved": interleaved}
        whole = torch_rope.rotate(x, **angles)
        for s in range(0, seq, 500):
            assert torch.equal(whole[:, s : s + 500], torch_rope.rotate(x[:, s : s + 500], **angles, offset=s))


def in_order(order, gap, t):
    """Returns a copy of t with its dimensions in this order in memory. gap: with gaps along the last one of them."""
    shape = [t.shape[d] for d in order]
    memory = torch.zeros(*shape[:-1], shape[-1] * (1 + gap), dtype=t.dtype)[..., :: 1 + gap]
    return memory.permute(*(order.index(d) for d in range(4))).copy_(t)


@pytest.mark.parametrize("dtype, interleaved", [(torch.float32, True), (torch.bfloat16, False), (torch.float64, False)])
def test_heads_in_every_order_in_memory_have_the_same_bits(dtype, interleaved):
    """Heads whose channels are no neighbours are copied to scratch, many at a time, and back."""
    batch, seq, heads, head_dim, rotary_dim = 2, 75, 5, 22, 20
    q, k, v = torch.randn(3, batch, seq, heads, head_dim, dtype=torch.float64).to(dtype)
    angles = {"inv_freq": torch_rope.inv_freq(rotary_dim), "interleaved": interleaved}
    weights = torch.rand(2, head_dim)
    slots = torch.arange(20, 20 + batch * seq).view(batch, seq)  # runs of neighbouring cells, and pads between them
    slots[0, 10:20] = torch.arange(10)
    slots[1, 33:37] = slots[0, 0] = -1
    rotated, normed = torch_rope.rotate_qk(q, k, **angles), torch_rope.norm_rotate_qk(q, k, *weights, **angles)
    caches = torch.zeros(2, 1, 200, heads, head_dim, dtype=dtype)
    torch_rope.rotate_into_cache_(q.clone(), k, v, *caches, slots=slots, **angles)
    for order, gap in itertools.product(itertools.permutations(range(4)), (False, True)):
        x, y, z = (in_order(order, gap, t) for t in (q, k, v))
        assert all(map(torch.equal, torch_rope.rotate_qk(x, y, **angles), rotated))
        assert all(map(torch.equal, torch_rope.norm_rotate_qk(x, y, *weights, **angles), normed))
        for some in [[in_order(o, gap, torch.zeros_like(c)) for c in caches] for o in (order, (0, 1, 2, 3))]:
            torch_rope.rotate_into_cache_(x.clone(), y, z, *some, slots=slots, **angles)
            assert all(map(torch.equal, some, caches))
        torch_rope.rotate_qk_(x, y, **angles)
        assert all(map(torch.equal, (x, y), rotated))
