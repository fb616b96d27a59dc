"""Compares torch_rope with other implementations (peers) of the rotation, and with its mathematical definition.

The largest allowed difference of two results is derived, not tuned. u is the unit roundoff of a dtype.
- x cos - y sin is computed as two rounded products and one rounded sum. The result is off by at most 2 u of the pair's
  magnitude, because |x cos| + |y sin| <= hypot(x, y). Two results from the same cos and sin therefore differ by at most
  4 u.
- A peer that rounds cos and sin to the dtype adds 1 u.
- Each rounding of a float32 angle changes it by up to u |angle|, which changes the result by as much, as a part of the
  magnitude.
- Channels from rotary_dim on are equal bit for bit.
"""

import importlib
import math

import numpy as np
import pytest
import torch
from cases import covering, needed, supported
from cases import name_of as case_name

import torch_rope
from torch_rope import rotate, rotate_qk

F32 = 2.0**-24  # unit roundoff of float32
OUR_ANGLE = 5e-7  # the error that cos and sin from inv_freq may add to an element, as a part of the pair's magnitude
LAST = 2048  # positions are below this if the peer's angles are float32; then 1 u of an angle is at most 1.2e-4

# (batch, seq, heads of q, heads of k, head_dim, rotary_dim)
SIZES = [
    (2, 7, 3, 3, 64, 64),
    (1, 33, 8, 2, 128, 128),
    (3, 5, 3, 1, 80, 80),
    (2, 13, 8, 1, 80, 32),
    (1, 1, 1, 1, 128, 64),
    (2, 3, 3, 1, 64, 6),
]
SINGLE_OR_HALF = [torch.float32, torch.float16, torch.bfloat16]
ALL = [torch.float64, *SINGLE_OR_HALF]


def name_of(parameter):
    return getattr(parameter, "__name__", str(parameter).removeprefix("torch."))


def every_two(**factors):
    """Parametrizes a test with cases in which every two values of different factors occur together."""
    found = covering(factors)
    return pytest.mark.parametrize(",".join(factors), [tuple(c.values()) for c in found], ids=map(case_name, found))


PAIRINGS = [False, True]


def needs(dtype, device):
    if not supported(device, dtype):
        pytest.skip("Apple GPUs have no float64")


def q_and_k(size, dtype):
    """Returns random q and k [batch, seq, heads, head_dim] on the CPU.

    In memory they are [batch, heads, seq, head_dim], the layout of the peers, which x.transpose(1, 2) restores.
    """
    batch, seq, q_heads, k_heads, head_dim, _ = size
    q, k = (torch.randn(batch, h, seq, head_dim, dtype=torch.float64).to(dtype) for h in (q_heads, k_heads))
    return q.transpose(1, 2), k.transpose(1, 2)


def pairs_of(x, rotary_dim, interleaved):
    """Returns the first channels and the second channels of the pairs of x, [..., rotary_dim / 2] each."""
    x = x[..., :rotary_dim]
    return (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)


def angles(positions, inv_freq):
    """Returns the angles [batch or 1, seq, rotary_dim / 2] in float64, on the CPU."""
    return torch.atleast_2d(positions).double().unsqueeze(-1) * inv_freq.double()


def assert_agree(ours, theirs, x, rotary_dim, interleaved, *, roundings=4, angle=0.0):
    """Asserts that two results of rotating x [batch, seq, heads, head_dim] agree.

    They may differ by (roundings u + angle), as a part of a pair's magnitude. angle is a number, or a tensor
    [batch or 1, seq, rotary_dim / 2].
    """
    assert ours.shape == theirs.shape == x.shape
    assert ours.dtype == theirs.dtype == x.dtype
    ours, theirs, x = (t.detach().cpu() for t in (ours, theirs, x))
    assert torch.equal(ours[..., rotary_dim:], theirs[..., rotary_dim:])
    assert torch.equal(ours[..., rotary_dim:], x[..., rotary_dim:])
    info = torch.finfo(x.dtype)
    # Below the smallest normal number, the error of a rounding no longer shrinks with the rounded number.
    magnitude = torch.hypot(*pairs_of(x.double(), rotary_dim, interleaved)).clamp(min=info.smallest_normal)
    angle = angle.unsqueeze(-2) if torch.is_tensor(angle) else angle
    difference = torch.stack(pairs_of((ours.double() - theirs.double()).abs(), rotary_dim, interleaved))
    worst = (difference / ((roundings * info.eps / 2 + angle) * magnitude)).max().item()
    assert worst <= 1, f"{worst:.3f} of the limit"


# --- ONNX: the reference of the RotaryEmbedding operator, and torch's own implementation of it ------------------------


def onnx_reference():
    module = needed("onnx.reference.ops.op_rotary_embedding")

    def call(*tensors, **attributes):
        arrays = [t if t is None else t.numpy() for t in tensors]
        return torch.from_numpy(module.rotary_embedding(*arrays, **attributes))

    return call


def torch_onnx():
    return needed("torch.onnx.ops").rotary_embedding


ONNX = [(onnx_reference, d) for d in (torch.float32, torch.float16, torch.float64)]  # numpy has no bfloat16
ONNX += [(torch_onnx, d) for d in SINGLE_OR_HALF]


@every_two(size=SIZES, interleaved=PAIRINGS, rank=[3, 4], by_position=[True, False], of=ONNX)
def test_rotate_agrees_with_onnx(size, interleaved, rank, by_position, of, device):
    peer, dtype = of
    needs(dtype, device)
    call = peer()
    batch, seq, heads, _, head_dim, rotary_dim = size
    if rank == 4:
        x, _ = q_and_k(size, dtype)
        given = x.transpose(1, 2)
    else:
        given = torch.randn(batch, seq, heads * head_dim).to(dtype)
        x = given.unflatten(-1, (heads, head_dim))
    positions = torch.randint(0, 100, (batch, seq)) if by_position else None
    angle = torch.rand(*((100,) if by_position else (batch, seq)), rotary_dim // 2, dtype=torch.float64) * 2 * math.pi
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    attributes = {
        "interleaved": int(interleaved),
        "num_heads": heads if rank == 3 else 0,
        "rotary_embedding_dim": rotary_dim if rotary_dim < head_dim else 0,  # the default 0 means head_dim
    }
    theirs = call(given, cos, sin, positions, **attributes)
    theirs = theirs.transpose(1, 2) if rank == 4 else theirs.unflatten(-1, (heads, head_dim))
    positions = positions.to(device) if by_position else None
    ours = rotate(x.to(device), cos.to(device), sin.to(device), positions=positions, interleaved=interleaved)
    assert_agree(ours, theirs, x, rotary_dim, interleaved)


# --- MLX: mx.fast.rope ------------------------------------------------------------------------------------------------


def mlx_rope(x, rotary_dim, interleaved, *, freqs=None, offset=0, **options):
    mx = needed("mlx.core")
    # The values are converted through float32, because numpy has no bfloat16. This is exact.
    there = mx.array(x.transpose(1, 2).float().numpy()).astype(getattr(mx, name_of(x.dtype)))
    freqs = freqs if freqs is None else mx.array(freqs.numpy())
    offset = mx.array(offset.numpy()) if torch.is_tensor(offset) else offset
    options = {"base": None, "scale": 1.0, **options, "freqs": freqs, "offset": offset}
    # MLX runs on the CPU: the limits below are for its cos and sin there, not for the fast ones of a GPU.
    out = mx.fast.rope(there, rotary_dim, traditional=interleaved, stream=mx.cpu, **options)
    return torch.from_numpy(np.array(out.astype(mx.float32))).to(x.dtype).transpose(1, 2)


def mlx_limits(dtype, angle, angle_roundings):
    # In float32 MLX's polynomials for cos and sin have errors of about 2 u. In other dtypes MLX rounds cos and sin to
    # the dtype, which adds 1 u.
    return {"roundings": 6 if dtype == torch.float32 else 5, "angle": OUR_ANGLE + angle.abs() * angle_roundings * F32}


@every_two(
    size=SIZES,
    interleaved=PAIRINGS,
    dtype=SINGLE_OR_HALF,
    angles_of=[(1e4, 1.0, 0), (5e5, 1.0, 1900), (1e4, 0.25, 37), (5e5, 1.5, 1001)],
)
def test_rotate_agrees_with_mlx(size, interleaved, dtype, angles_of, device):
    base, scale, offset = angles_of
    seq, rotary_dim = size[1], size[-1]
    x, _ = q_and_k(size, dtype)
    theirs = mlx_rope(x, rotary_dim, interleaved, base=base, scale=scale, offset=offset)
    # MLX scales the position, which has the same effect as scaling the frequency.
    inv_freq = torch_rope.inv_freq(rotary_dim, base) * scale
    # MLX's frequency is exp2(i * float32(log(base) / half) * float32(log2(e))). These are 4 roundings of the exponent,
    # and each changes the frequency by a part u |log(frequency)| of it. 8 more roundings: exp2's polynomial (4),
    # position * scale, the product of that and the frequency, our frequency, and our frequency times scale.
    angle = angles(torch.arange(seq) + offset, inv_freq)
    limits = mlx_limits(dtype, angle, 8 + 4 * (inv_freq / scale).double().log().abs())

    x_there, inv_freq = x.to(device), inv_freq.to(device)
    ours = rotate(x_there, inv_freq=inv_freq, offset=offset, interleaved=interleaved)
    assert_agree(ours, theirs, x, rotary_dim, interleaved, **limits)
    cos, sin = torch_rope.cos_sin(torch.arange(offset + seq, device=device), inv_freq)
    ours = rotate(x_there, cos, sin, offset=offset, interleaved=interleaved)
    assert_agree(ours, theirs, x, rotary_dim, interleaved, **limits)


@every_two(size=SIZES, interleaved=PAIRINGS, dtype=SINGLE_OR_HALF)
def test_rotate_agrees_with_mlx_with_freqs_and_an_offset_per_sequence(size, interleaved, dtype, device):
    batch, seq, rotary_dim = size[0], size[1], size[-1]
    x, _ = q_and_k(size, dtype)
    freqs = torch.empty(rotary_dim // 2).uniform_(1, 1000)
    inv_freq = 1 / freqs  # MLX's freqs are divisors: its angle is position / freqs
    offsets = torch.randint(0, LAST - seq, (batch,), dtype=torch.int32)
    theirs = mlx_rope(x, rotary_dim, interleaved, freqs=freqs, offset=offsets)
    positions = offsets.unsqueeze(1) + torch.arange(seq, dtype=torch.int32)
    angle = {"inv_freq": inv_freq.to(device), "positions": positions.to(device)}
    ours = rotate(x.to(device), **angle, interleaved=interleaved)
    # The angle is rounded 3 times: MLX's reciprocal, our reciprocal, and MLX's product.
    limits = mlx_limits(dtype, angles(positions, inv_freq), 3)
    assert_agree(ours, theirs, x, rotary_dim, interleaved, **limits)


# --- rotary-embedding-torch -------------------------------------------------------------------------------------------


def rotary_embedding_torch(rotary_dim, **options):
    module = needed("rotary_embedding_torch")
    return module.RotaryEmbedding(rotary_dim, **options)


def product_in_float32(positions, inv_freq):
    """Returns the error of a peer that multiplies angles in float32 and uses torch's cos and sin (right to 1 u)."""
    return OUR_ANGLE + F32 + angles(positions, inv_freq) * F32


# rotary-embedding-torch counts positions in x's dtype. bfloat16 has all integers up to 256, and float16 up to 2048.
COUNTED = [(d, offset) for d in SINGLE_OR_HALF for offset in (0, 5, 200)] + [
    (d, LAST - 40) for d in (torch.float32, torch.float16)
]


@every_two(size=SIZES, counted=COUNTED)
def test_rotate_agrees_with_rotary_embedding_torch(size, counted, device):
    dtype, offset = counted
    seq, rotary_dim = size[1], size[-1]
    peer = rotary_embedding_torch(rotary_dim, theta=5e5)
    inv_freq = peer.freqs.detach()
    angle = product_in_float32(torch.arange(seq) + offset, inv_freq)
    for x in q_and_k(size, dtype):
        theirs = peer.rotate_queries_or_keys(x.transpose(1, 2), offset=offset).transpose(1, 2)
        ours = rotate(x.to(device), inv_freq=inv_freq.to(device), offset=offset, interleaved=True)
        assert_agree(ours, theirs, x, rotary_dim, True, angle=angle)


def test_rotate_agrees_with_rotary_embedding_torch_with_cached_keys(device):
    """q has only the last tokens, and k has all tokens.

    The peer's rotate_queries_and_keys is not tested: it is only for xPos, which is not a rotation.
    """
    peer = rotary_embedding_torch(64)
    inv_freq = peer.freqs.detach()
    q, k = torch.randn(2, 4, 3, 64), torch.randn(2, 300, 3, 64)
    theirs = peer.rotate_queries_with_cached_keys(q.transpose(1, 2), k.transpose(1, 2))
    for x, rotated, offset in zip((q, k), theirs, (296, 0), strict=True):
        ours = rotate(x.to(device), inv_freq=inv_freq.to(device), offset=offset, interleaved=True)
        angle = product_in_float32(torch.arange(x.shape[1]) + offset, inv_freq)
        assert_agree(ours, rotated.transpose(1, 2), x, 64, True, angle=angle)


# --- Hugging Face Transformers: the function and the rotary module of each model --------------------------------------


def first_half(table):
    return table[..., : table.shape[-1] // 2]


def every_second(table):
    return table[..., ::2]


# model: (prefix of the class names, interleaved, True if it can rotate less than head_dim, the function that makes our
# table of half the width from its table of full width).
# llama, gpt_neox and glm repeat the half: [f0, f1, .., f0, f1, ..]. glm's function takes the first half of the table
# and interleaves it itself. cohere repeats each column: [f0, f0, f1, f1, ..].
MODELS = {
    "llama": ("Llama", False, False, first_half),
    "gpt_neox": ("GPTNeoX", False, True, first_half),
    "glm": ("Glm", True, True, first_half),
    "cohere": ("Cohere", True, False, every_second),
}
models = pytest.mark.parametrize(
    "model, size",
    [(model, s) for model in MODELS for s in SIZES if MODELS[model][2] or s[-1] == s[-2]],
    ids=lambda p: p if isinstance(p, str) else "x".join(map(str, p)),
)


def hugging_face(model, size):
    """Returns (apply_rotary_pos_emb, rotary module, interleaved, function that makes our table) for a model."""
    needed("transformers", "5")
    *_, q_heads, k_heads, head_dim, rotary_dim = size
    prefix, interleaved, _, to_ours = MODELS[model]
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    config = getattr(modeling, f"{prefix}Config")(
        hidden_size=q_heads * head_dim,
        num_attention_heads=q_heads,
        num_key_value_heads=k_heads,
        head_dim=head_dim,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5e5,
            "partial_rotary_factor": rotary_dim / head_dim,
        },
    )
    rotary = getattr(modeling, f"{prefix}RotaryEmbedding")(config)
    assert rotary.inv_freq.shape == (rotary_dim // 2,)
    return modeling.apply_rotary_pos_emb, rotary, interleaved, to_ours


@models
@pytest.mark.parametrize("dtype", SINGLE_OR_HALF, ids=name_of)
def test_rotate_qk_agrees_with_hugging_face_in_values_and_gradients(size, dtype, model, device):
    """Both use the same tables. The gradient is a rotation too."""
    apply, rotary, interleaved, to_ours = hugging_face(model, size)
    batch, seq, *_, rotary_dim = size
    here = [x.requires_grad_() for x in q_and_k(size, dtype)]
    there = [x.detach().to(device).requires_grad_() for x in here]
    # Positions may be large, because both use the cos and sin that the module makes, in this dtype.
    cos, sin = rotary(here[0], torch.randint(0, 131072, (batch, seq)))
    assert cos.dtype == dtype and cos.shape == (batch, seq, rotary_dim)

    theirs = [x.transpose(1, 2) for x in apply(*(x.transpose(1, 2) for x in here), cos, sin)]
    ours = rotate_qk(*there, to_ours(cos).to(device), to_ours(sin).to(device), interleaved=interleaved)
    for a, b, x in zip(ours, theirs, here, strict=True):
        assert_agree(a, b, x, rotary_dim, interleaved)

    grads = [torch.randn_like(x) for x in theirs]
    theirs = torch.autograd.grad(theirs, here, grads)
    ours = torch.autograd.grad(ours, there, [g.to(device) for g in grads])
    for a, b, g in zip(ours, theirs, grads, strict=True):
        assert_agree(a, b, g, rotary_dim, interleaved)


@models
def test_rotate_qk_with_inv_freq_agrees_with_hugging_face(size, model, device):
    apply, rotary, interleaved, _ = hugging_face(model, size)
    batch, seq, *_, rotary_dim = size
    here = q_and_k(size, torch.float32)
    positions = torch.randint(0, LAST, (batch, seq))
    theirs = apply(*(x.transpose(1, 2) for x in here), *rotary(here[0], positions))
    angle = {"inv_freq": rotary.inv_freq.to(device), "positions": positions.to(device)}
    ours = rotate_qk(*(x.to(device) for x in here), **angle, interleaved=interleaved)
    for a, b, x in zip(ours, theirs, here, strict=True):
        limit = product_in_float32(positions, rotary.inv_freq)
        assert_agree(a, b.transpose(1, 2), x, rotary_dim, interleaved, angle=limit)


@models
def test_inv_freq_agrees_with_hugging_face(size, model):
    _, rotary, *_ = hugging_face(model, size)
    ours = torch_rope.inv_freq(size[-1], 5e5).double()
    # Their exponent is rounded, which changes the frequency by a part u |log(frequency)| of it; then the power (2 u)
    # and its reciprocal (1 u) are rounded. Ours is rounded once (1 u).
    limit = (4 + ours.log().abs()) * F32
    assert ((rotary.inv_freq.double() / ours - 1).abs() <= limit).all()


# --- The definition ---------------------------------------------------------------------------------------------------


def rotation_matrix(angle, head_dim, interleaved):
    """Returns matrices [..., head_dim, head_dim] from angles [..., pairs].

    They are 2 x 2 rotations of the pairs, and the identity for the channels after the last pair.
    """
    pairs = angle.shape[-1]
    matrix = torch.eye(head_dim, dtype=torch.float64).repeat(*angle.shape[:-1], 1, 1)
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        cos, sin = angle[..., i].cos(), angle[..., i].sin()
        matrix[..., a, a], matrix[..., a, b] = cos, -sin
        matrix[..., b, a], matrix[..., b, b] = sin, cos
    return matrix


def our_angle(dtype, angle):
    """Returns the error that the angle adds to an element. In float64 its product, cos and sin have errors of 1 u."""
    return OUR_ANGLE if dtype != torch.float64 else (abs(angle) + 1) * torch.finfo(dtype).eps / 2


@every_two(size=SIZES, interleaved=PAIRINGS, dtype=ALL)
def test_rotate_multiplies_by_the_block_diagonal_matrix(size, interleaved, dtype, device):
    needs(dtype, device)
    batch, seq, *_, head_dim, rotary_dim = size
    x, _ = q_and_k(size, dtype)
    inv_freq = torch_rope.inv_freq(rotary_dim)
    positions = torch.randint(1 - 2**24, 2**24, (batch, seq))
    angle = angles(positions, inv_freq)
    matrix = rotation_matrix(angle, head_dim, interleaved)
    expected = torch.einsum("bsij,bshj->bshi", matrix, x.double()).to(dtype)  # the other terms of a sum are exactly 0

    arguments = {"inv_freq": inv_freq.to(device), "positions": positions.to(device), "interleaved": interleaved}
    ours = rotate(x.to(device), **arguments)
    # Twice, because in float64 the expected angle, cos and sin are rounded as well.
    assert_agree(ours, expected, x, rotary_dim, interleaved, angle=2 * our_angle(dtype, angle))

    # The same with a table by token. A float32 table adds 1 u of float32.
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = (t.to(table_dtype).to(device) for t in (angle.cos(), angle.sin()))
    ours = rotate(x.to(device), cos, sin, interleaved=interleaved)
    assert_agree(ours, expected, x, rotary_dim, interleaved, angle=torch.finfo(table_dtype).eps / 2)


SHIFTS = [1, 7, 1000, 131071, 2**20 + 3, 2**24 - 64, -1, -131071, 64 - 2**24]


@every_two(size=SIZES, interleaved=PAIRINGS, dtype=[torch.float32, torch.float64], shift=SHIFTS)
def test_scores_depend_only_on_the_distance(size, interleaved, dtype, shift, device):
    """<R_m q, R_n k> is the same for (m, n) and (m + shift, n + shift)."""
    needs(dtype, device)
    seq, q_heads, k_heads, _, rotary_dim = size[1:]
    q, k = q_and_k(size, dtype)
    inv_freq = torch_rope.inv_freq(rotary_dim, device=device)

    def heads_first(q, k):
        return q.transpose(1, 2), k.transpose(1, 2).repeat_interleave(q_heads // k_heads, 1)

    def scores(offset):
        rotated = rotate_qk(q.to(device), k.to(device), inv_freq=inv_freq, offset=offset, interleaved=interleaved)
        q_heads_first, k_heads_first = heads_first(*(t.cpu().double() for t in rotated))
        return q_heads_first @ k_heads_first.mT

    q_length, k_length = (t.norm(dim=-1) for t in heads_first(q.double(), k.double()))
    # Each of the four rotated vectors is off by a part sqrt(2) (2 u + angle) of its length, which changes a score by
    # the same part of |q| |k|. 1e-14 is for the sums over head_dim in float64.
    limit = 4 * 2**0.5 * (torch.finfo(dtype).eps + our_angle(dtype, abs(shift) + seq)) + 1e-14
    assert ((scores(shift) - scores(0)).abs() <= limit * q_length.unsqueeze(-1) * k_length.unsqueeze(-2)).all()


@every_two(size=SIZES, interleaved=PAIRINGS, dtype=ALL)
def test_rotate_preserves_lengths_and_inverse_undoes_it(size, interleaved, dtype, device):
    needs(dtype, device)
    batch, seq, *_, rotary_dim = size
    x, _ = q_and_k(size, dtype)
    arguments = {
        "inv_freq": torch_rope.inv_freq(rotary_dim, device=device),
        "positions": torch.randint(0, 2**24, (batch, seq), device=device),
        "interleaved": interleaved,
    }
    rotated = rotate(x.to(device), **arguments)
    # A wrong angle does not change the length, and inverse undoes it. Errors of cos and sin, and rounding, do change
    # the length. sqrt(2), because a pair has two elements.
    error = 2**0.5 * (torch.finfo(dtype).eps + our_angle(dtype, 0))
    before, after = (torch.hypot(*pairs_of(t.cpu().double(), rotary_dim, interleaved)) for t in (x, rotated))
    assert ((after - before).abs() <= error * before).all()
    back = rotate(rotated, **arguments, inverse=True)
    assert_agree(back, x, x, rotary_dim, interleaved, roundings=0, angle=2 * error)


@every_two(size=SIZES, interleaved=PAIRINGS, dtype=ALL)
def test_rotate_at_position_0_returns_the_same_bits(size, interleaved, dtype, device):
    needs(dtype, device)
    x = q_and_k(size, dtype)[0].to(device)
    inv_freq = torch_rope.inv_freq(size[-1], device=device)
    positions = torch.zeros(size[1], dtype=torch.int64, device=device)
    for inverse in (False, True):
        arguments = {"inv_freq": inv_freq, "interleaved": interleaved, "inverse": inverse}
        assert torch.equal(rotate(x, **arguments, positions=positions), x)
        assert torch.equal(rotate(x, **arguments)[:, 0], x[:, 0])


# --- A CUDA inference engine (mini-vLLM): one table, q and k in place, interleaved pairs, int32 positions -------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
def test_rotate_qk_in_place_does_what_an_inference_engine_needs(dtype, device):
    tokens, q_heads, k_heads, head_dim, max_seq_len, theta = 128, 32, 8, 128, 8192, 10000.0
    cos, sin = torch_rope.cos_sin(
        torch.arange(max_seq_len, device=device), torch_rope.inv_freq(head_dim, base=theta, device=device)
    )
    angles = np.arange(max_seq_len)[:, None] * theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    frequency = 2.0**-24 * angles  # inv_freq is rounded to float32
    for table, exact in (cos, np.cos(angles)), (sin, np.sin(angles)):
        assert np.all(np.abs(table.cpu().double().numpy() - exact) <= OUR_ANGLE + frequency)

    q, k = (torch.randn(tokens, heads, head_dim).to(dtype).to(device) for heads in (q_heads, k_heads))
    before = q.clone(), k.clone()
    positions = torch.randint(0, max_seq_len, (tokens,), dtype=torch.int32, device=device)
    torch_rope.rotate_qk_(q, k, cos, sin, positions=positions, interleaved=True)
    c, s = (t.cpu().double()[positions.cpu()][:, None] for t in (cos, sin))
    for x, out in zip(before, (q, k), strict=True):
        even, odd = x.cpu().double()[..., 0::2], x.cpu().double()[..., 1::2]
        expected = torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)
        magnitude = torch.hypot(even, odd).repeat_interleave(2, -1)
        unit = F32 if dtype == torch.float32 else 2.0**-11
        smallest = 2.0**-24  # float16's smallest number
        assert torch.all((out.cpu().double() - expected).abs() <= (unit + 2 * F32) * magnitude + smallest)
