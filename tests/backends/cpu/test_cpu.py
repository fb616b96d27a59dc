"""Tests that the CPU kernels give the same bits with every instruction set, and however heads are read and written."""

import itertools
import platform

import pytest
import torch
from cases import python
from same_bits import instruction_set_and_digest

import torch_rope

pytestmark = pytest.mark.cpu

# The values of ATEN_CPU_CAPABILITY, by which torch chooses an instruction set, and the build of the kernels for each.
CAPABILITIES = {"default": "plain", "avx2": "avx2", "avx512": "avx512"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one build of the kernels")
def test_every_instruction_set_gives_the_same_bits():
    *others, here = list(CAPABILITIES)[: 1 + [*CAPABILITIES].index(torch.backends.cpu.get_cpu_capability().lower())]
    program = "import same_bits; print(*same_bits.instruction_set_and_digest())"
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
