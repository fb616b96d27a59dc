"""Other implementations compute the same rotation, and so does the definition itself.

How far two results may be apart is derived, not tuned. With u the unit roundoff of a dtype, x' = x cos - y sin by two rounded products
and one rounded sum is off by at most 2 u of the pair's magnitude, since |x cos| + |y sin| <= hypot(x, y); so two results from the same
cos and sin are within 4 u of each other. A peer that rounds cos and sin to the dtype adds 1 u. A peer that multiplies position and
frequency in float32 turns by an angle that is wrong by u |angle| for each rounding on the way to it, and by as much of the magnitude is
the result wrong. Channels past rotary_dim are equal bit for bit.
"""

import importlib
import math

import pytest
import torch
from cases import supported

import torch_rope
from torch_rope import rotate, rotate_qk

F32 = 2.0**-24  # unit roundoff of float32
OUR_ANGLE = 5e-7  # what an element may be off by because of cos and sin from inv_freq, of the pair's magnitude
LAST = 2048  # positions are below this where the peer's angles are float32: 1 u of them is then at most 1.2e-4 radians

# (batch, seq, heads of q, heads of k, head_dim, rotary_dim)
SIZES = [
    (2, 7, 3, 3, 64, 64),
    (1, 33, 8, 2, 128, 128),
    (3, 5, 3, 1, 80, 80),
    (2, 13, 8, 1, 80, 32),
    (1, 1, 1, 1, 128, 64),
    (2, 3, 3, 1, 64, 2),
]
HALF_OR_SINGLE = [torch.float32, torch.float16, torch.bfloat16]

sizes = pytest.mark.parametrize("size", SIZES, ids=lambda s: "x".join(map(str, s)))
pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])


def dtypes(values):
    return pytest.mark.parametrize("dtype", values, ids=lambda d: str(d).removeprefix("torch."))


def pairs_of(x, rotary_dim, interleaved):
    """The two members of each pair of x: [..., rotary_dim / 2] each."""
    x = x[..., :rotary_dim]
    return (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)


def assert_agree(ours, theirs, x, rotary_dim, interleaved, *, roundings=4, angle=0.0):
    """Both are rotations of x [batch, seq, heads, head_dim] and differ by at most (roundings u + angle) of each pair's magnitude.

    angle: a number, or a tensor [batch or 1, seq, rotary_dim / 2].
    """
    assert ours.shape == theirs.shape == x.shape
    assert ours.dtype == theirs.dtype == x.dtype
    ours, theirs, x = (t.detach().cpu() for t in (ours, theirs, x))
    assert torch.equal(ours[..., rotary_dim:], theirs[..., rotary_dim:])
    info = torch.finfo(x.dtype)
    # Below the smallest normal number u is absolute: half the distance of the subnormal numbers.
    magnitude = torch.hypot(*pairs_of(x.double(), rotary_dim, interleaved)).clamp(min=info.smallest_normal)
    limit = (
        roundings * info.eps / 2 + torch.as_tensor(angle).unsqueeze(-2 if torch.is_tensor(angle) else 0)
    ) * magnitude
    difference = pairs_of((ours.double() - theirs.double()).abs(), rotary_dim, interleaved)
    worst = (torch.stack(difference) / limit).max().item()
    assert worst <= 1, f"{worst:.3f} of the limit"


def angles(positions, inv_freq):
    """[batch or 1, seq, rotary_dim / 2] in float64, on the CPU."""
    return torch.atleast_2d(positions).double().unsqueeze(-1) * inv_freq.double()


def random_tables(shape, rotary_dim, dtype):
    """cos and sin of random angles: [*shape, rotary_dim / 2]."""
    angle = torch.rand(*shape, rotary_dim // 2, dtype=torch.float64) * 2 * math.pi
    return angle.cos().to(dtype), angle.sin().to(dtype)


def heads_first(size, dtype):
    """q and k as [batch, heads, seq, head_dim], on the CPU."""
    batch, seq, q_heads, k_heads, head_dim, _ = size
    return torch.randn(batch, q_heads, seq, head_dim).to(dtype), torch.randn(batch, k_heads, seq, head_dim).to(dtype)


# --- ONNX: the reference of the RotaryEmbedding operator, and torch's own implementation of it -----------------------------------------


def onnx_reference():
    module = pytest.importorskip("onnx.reference.ops.op_rotary_embedding", reason="onnx 1.19 or later is not installed")

    def call(*tensors, **attributes):
        return torch.from_numpy(
            module.rotary_embedding(*(t if t is None else t.numpy() for t in tensors), **attributes)
        )

    return call


def torch_onnx():
    module = pytest.importorskip("torch.onnx.ops", reason="this torch has no torch.onnx.ops")
    return module.rotary_embedding


@pytest.mark.parametrize(
    "peer, dtype",
    [(onnx_reference, d) for d in (torch.float32, torch.float16, torch.float64)]
    + [(torch_onnx, d) for d in (torch.float32, torch.float16, torch.bfloat16)],
    ids=lambda p: getattr(p, "__name__", str(p).removeprefix("torch.")),
)
@pytest.mark.parametrize("by_position", [True, False], ids=["position_ids", "per_token"])
@pytest.mark.parametrize("rank", [3, 4])
@pairings
@sizes
def test_onnx(size, interleaved, rank, by_position, peer, dtype, device):
    if not supported(device, dtype):
        pytest.skip("Apple GPUs have no float64")
    call = peer()
    batch, seq, heads, _, head_dim, rotary_dim = size
    # 4-D: [batch, heads, seq, head_dim]. 3-D: [batch, seq, heads * head_dim].
    x = torch.randn(*((batch, heads, seq, head_dim) if rank == 4 else (batch, seq, heads * head_dim))).to(dtype)
    as_ours = (lambda t: t.transpose(1, 2)) if rank == 4 else (lambda t: t.unflatten(-1, (heads, head_dim)))
    cos, sin = random_tables((100,) if by_position else (batch, seq), rotary_dim, dtype)
    positions = torch.randint(0, 100, (batch, seq)) if by_position else None
    theirs = call(
        x,
        cos,
        sin,
        positions,
        interleaved=int(interleaved),
        num_heads=heads if rank == 3 else 0,
        rotary_embedding_dim=rotary_dim if rotary_dim < head_dim else 0,  # 0, the default, means all of head_dim
    )
    ours = rotate(
        as_ours(x.to(device)),
        cos.to(device),
        sin.to(device),
        positions=positions.to(device) if by_position else None,
        interleaved=interleaved,
    )
    assert_agree(ours, as_ours(theirs), as_ours(x), rotary_dim, interleaved)


# --- MLX: mx.fast.rope -----------------------------------------------------------------------------------------------------------------


def mlx_rope(x, rotary_dim, interleaved, *, base=None, freqs=None, scale=1.0, offset=0):
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    # Through float32, exact both ways: numpy has no bfloat16.
    there = mx.array(x.float().numpy()).astype(getattr(mx, str(x.dtype).removeprefix("torch.")))
    freqs = freqs if freqs is None else mx.array(freqs.numpy())
    offset = mx.array(offset.numpy()) if torch.is_tensor(offset) else offset
    # On the CPU: the bounds hold for its cos and sin, not for the fast ones of a GPU.
    out = mx.fast.rope(
        there, rotary_dim, traditional=interleaved, base=base, scale=scale, offset=offset, freqs=freqs, stream=mx.cpu
    )
    return torch.tensor(out.astype(mx.float32).tolist()).to(x.dtype).view(x.shape)


def mlx_limits(dtype, positions, inv_freq, angle_roundings):
    """float32: 4 u, and 2 u for MLX's polynomials. Smaller dtypes: MLX rounds cos and sin to the dtype."""
    return {
        "roundings": 6 if dtype == torch.float32 else 5,
        "angle": OUR_ANGLE + angles(positions, inv_freq).abs() * angle_roundings * F32,
    }


@pytest.mark.parametrize("base, scale, offset", [(1e4, 1.0, 0), (5e5, 1.0, 1900), (1e4, 0.25, 37), (5e5, 1.5, 1001)])
@dtypes(HALF_OR_SINGLE)
@pairings
@sizes
def test_mlx_base(size, interleaved, dtype, base, scale, offset, device):
    seq, rotary_dim = size[1], size[-1]
    x, _ = heads_first(size, dtype)
    theirs = mlx_rope(x, rotary_dim, interleaved, base=base, scale=scale, offset=offset)
    # MLX scales the position, which is to scale the frequency.
    inv_freq = torch_rope.inv_freq(rotary_dim, base) * scale
    positions = torch.arange(seq) + offset
    # MLX's frequency is exp2(i * float32(log(base) / half) * float32(log2(e))): four roundings in an exponent are four u |log(frequency)|
    # of the frequency. 8 more: its exp2, position * scale, times frequency, and our frequency and its scale.
    rope = mlx_limits(dtype, positions, inv_freq, 8 + 4 * (inv_freq / scale).double().log().abs())

    there = x.to(device).transpose(1, 2)
    ours = rotate(there, inv_freq=inv_freq.to(device), offset=offset, interleaved=interleaved)
    assert_agree(ours, theirs.transpose(1, 2), x.transpose(1, 2), rotary_dim, interleaved, **rope)

    cos, sin = torch_rope.cos_sin(torch.arange(offset + seq, device=device), inv_freq.to(device))
    ours = rotate(there, cos, sin, offset=offset, interleaved=interleaved)
    assert_agree(ours, theirs.transpose(1, 2), x.transpose(1, 2), rotary_dim, interleaved, **rope)


@dtypes(HALF_OR_SINGLE)
@pairings
@sizes
def test_mlx_freqs_and_an_offset_per_row(size, interleaved, dtype, device):
    batch, seq, rotary_dim = size[0], size[1], size[-1]
    x, _ = heads_first(size, dtype)
    # MLX's freqs are divisors, position / freqs: periods in positions per radian.
    freqs = torch.empty(rotary_dim // 2).uniform_(1, 1000)
    inv_freq = (1 / freqs.double()).float()
    offsets = torch.randint(0, LAST - seq, (batch,), dtype=torch.int32)
    theirs = mlx_rope(x, rotary_dim, interleaved, freqs=freqs, offset=offsets)
    positions = offsets.unsqueeze(1) + torch.arange(seq, dtype=torch.int32)
    ours = rotate(
        x.to(device).transpose(1, 2),
        inv_freq=inv_freq.to(device),
        positions=positions.to(device),
        interleaved=interleaved,
    )
    # 3 roundings of an angle: both reciprocals and MLX's product.
    assert_agree(
        ours,
        theirs.transpose(1, 2),
        x.transpose(1, 2),
        rotary_dim,
        interleaved,
        **mlx_limits(dtype, positions, inv_freq, 3),
    )


# --- rotary-embedding-torch ------------------------------------------------------------------------------------------------------------


def lucidrains(rotary_dim, **options):
    module = pytest.importorskip("rotary_embedding_torch", reason="rotary-embedding-torch is not installed")
    return module.RotaryEmbedding(rotary_dim, **options)


def lucidrains_limits(positions, inv_freq):
    """Its angle is one product in float32; its cos and sin are float32 and right to 1 u."""
    return {"roundings": 4, "angle": OUR_ANGLE + F32 + angles(positions, inv_freq) * F32}


@pytest.mark.parametrize("offset", [0, 5, 200, LAST - 40])
@dtypes(HALF_OR_SINGLE)
@sizes
def test_rotary_embedding_torch(size, dtype, offset, device):
    seq, rotary_dim = size[1], size[-1]
    if offset + seq > 2 / torch.finfo(dtype).eps:
        pytest.skip(f"the peer counts positions in x's dtype, and {dtype} does not have these integers")
    peer = lucidrains(rotary_dim, theta=5e5)
    inv_freq = peer.freqs.detach()
    for x in heads_first(size, dtype):
        theirs = peer.rotate_queries_or_keys(x, offset=offset)
        ours = rotate(x.to(device).transpose(1, 2), inv_freq=inv_freq.to(device), offset=offset, interleaved=True)
        limits = lucidrains_limits(torch.arange(seq) + offset, inv_freq)
        assert_agree(ours, theirs.transpose(1, 2), x.transpose(1, 2), rotary_dim, True, **limits)


def test_rotary_embedding_torch_decodes_with_cached_keys(device):
    """The last queries against all keys. (rotate_queries_and_keys is xPos alone, which scales as well as rotates.)"""
    peer = lucidrains(64)
    inv_freq = peer.freqs.detach()
    q, k = torch.randn(2, 3, 4, 64), torch.randn(2, 3, 300, 64)
    for x, theirs, offset in zip((q, k), peer.rotate_queries_with_cached_keys(q, k), (296, 0), strict=True):
        ours = rotate(x.to(device).transpose(1, 2), inv_freq=inv_freq.to(device), offset=offset, interleaved=True)
        limits = lucidrains_limits(torch.arange(x.shape[2]) + offset, inv_freq)
        assert_agree(ours, theirs.transpose(1, 2), x.transpose(1, 2), 64, True, **limits)


# --- Hugging Face Transformers: each model's own function, with cos and sin from its own module ------------------------------------------

# model -> (config, rotary module, interleaved, takes rotary_dim < head_dim, its full-width table -> ours of half the width).
# llama, gpt_neox and glm repeat the half: [f0, f1, .., f0, f1, ..] (glm's function takes the first half and interleaves that itself).
# cohere repeats each element: [f0, f0, f1, f1, ..].
MODELS = {
    "llama": ("LlamaConfig", "LlamaRotaryEmbedding", False, False, lambda t: t[..., : t.shape[-1] // 2]),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXRotaryEmbedding", False, True, lambda t: t[..., : t.shape[-1] // 2]),
    "glm": ("GlmConfig", "GlmRotaryEmbedding", True, True, lambda t: t[..., : t.shape[-1] // 2]),
    "cohere": ("CohereConfig", "CohereRotaryEmbedding", True, False, lambda t: t[..., ::2]),
}


def hugging_face(name, size):
    """(apply_rotary_pos_emb, rotary module, interleaved, to half-width table) of a model with these sizes."""
    pytest.importorskip("transformers", minversion="5", reason="transformers 5 or later is not installed")
    _, _, q_heads, k_heads, head_dim, rotary_dim = size
    config_name, rotary_name, interleaved, partial, to_half = MODELS[name]
    if rotary_dim < head_dim and not partial:
        pytest.skip(f"{name} rotates all of head_dim")
    config = getattr(importlib.import_module(f"transformers.models.{name}.configuration_{name}"), config_name)(
        hidden_size=q_heads * head_dim,
        num_attention_heads=q_heads,
        num_key_value_heads=k_heads,
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": rotary_dim / head_dim},
    )
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    rotary = getattr(modeling, rotary_name)(config)
    assert rotary.inv_freq.shape == (rotary_dim // 2,)
    return modeling.apply_rotary_pos_emb, rotary, interleaved, to_half


models = pytest.mark.parametrize("name", MODELS)


@models
@dtypes(HALF_OR_SINGLE)
@sizes
def test_hugging_face_values_and_gradients(size, dtype, name, device):
    """On the same tables. Forward and backward both: the backward is a rotation of the gradient."""
    apply, rotary, interleaved, to_half = hugging_face(name, size)
    batch, seq, *_, rotary_dim = size
    q, k = (x.requires_grad_() for x in heads_first(size, dtype))
    cos, sin = rotary(q, torch.randint(0, 131072, (batch, seq)))
    assert cos.dtype == dtype and cos.shape == (batch, seq, rotary_dim)
    theirs = apply(q, k, cos, sin)

    there = [x.detach().to(device).requires_grad_() for x in (q, k)]
    cos, sin = to_half(cos).to(device), to_half(sin).to(device)  # a row per token, a column per pair
    ours = rotate_qk(*(x.transpose(1, 2) for x in there), cos, sin, interleaved=interleaved)
    for x, a, b in zip((q, k), ours, theirs, strict=True):
        assert_agree(a, b.transpose(1, 2), x.transpose(1, 2), rotary_dim, interleaved)

    grads = [torch.randn_like(x) for x in theirs]
    theirs = torch.autograd.grad(theirs, (q, k), grads)
    ours = torch.autograd.grad(ours, there, [g.to(device).transpose(1, 2) for g in grads])
    for g, a, b in zip(grads, ours, theirs, strict=True):
        assert_agree(*(t.transpose(1, 2) for t in (a, b, g)), rotary_dim, interleaved)


@models
@sizes
def test_hugging_face_with_angles_computed_in_the_op(size, name, device):
    apply, rotary, interleaved, _ = hugging_face(name, size)
    batch, seq, *_, rotary_dim = size
    q, k = heads_first(size, torch.float32)
    positions = torch.randint(0, LAST, (batch, seq))
    theirs = apply(q, k, *rotary(q, positions))
    there = [x.to(device).transpose(1, 2) for x in (q, k)]
    ours = rotate_qk(
        *there, inv_freq=rotary.inv_freq.to(device), positions=positions.to(device), interleaved=interleaved
    )
    # Their angle is one product in float32, their cos and sin are right to 1 u.
    angle = OUR_ANGLE + F32 + angles(positions, rotary.inv_freq) * F32
    for x, a, b in zip((q, k), ours, theirs, strict=True):
        assert_agree(a, b.transpose(1, 2), x.transpose(1, 2), rotary_dim, interleaved, angle=angle)

    # Their frequencies: the exponent is rounded (u |log(frequency)| of the frequency), the power and its reciprocal too; ours once.
    ours = torch_rope.inv_freq(rotary_dim, 5e5).double()
    assert ((rotary.inv_freq.double() / ours - 1).abs() <= F32 * (4 + ours.log().abs())).all()


# --- The definition --------------------------------------------------------------------------------------------------------------------

FLOATS = [torch.float64, *HALF_OR_SINGLE]


def rotation_matrix(angle, head_dim, interleaved):
    """[..., head_dim, head_dim] from angles [..., pairs]: a 2 x 2 rotation per pair, the identity past the last pair."""
    pairs = angle.shape[-1]
    matrix = torch.eye(head_dim, dtype=torch.float64).repeat(*angle.shape[:-1], 1, 1)
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        cos, sin = angle[..., i].cos(), angle[..., i].sin()
        matrix[..., a, a], matrix[..., a, b] = cos, -sin
        matrix[..., b, a], matrix[..., b, b] = sin, cos
    return matrix


def angle_error(dtype, angle):
    """Of the op with inv_freq. float64: the angle is one product in double, and so is the test's."""
    return OUR_ANGLE if dtype != torch.float64 else angle.abs() * torch.finfo(dtype).eps


@dtypes(FLOATS)
@pairings
@sizes
def test_is_the_block_diagonal_matrix(size, interleaved, dtype, device):
    if not supported(device, dtype):
        pytest.skip("Apple GPUs have no float64")
    batch, seq, heads, _, head_dim, rotary_dim = size
    x = torch.randn(batch, seq, heads, head_dim, dtype=torch.float64).to(dtype)
    inv_freq = torch_rope.inv_freq(rotary_dim)
    positions = torch.randint(-(2**24) + 1, 2**24, (batch, seq))
    angle = angles(positions, inv_freq)
    matrix = rotation_matrix(angle, head_dim, interleaved)
    expected = (x.double().unsqueeze(-2) @ matrix.unsqueeze(2).mT).squeeze(-2).to(dtype)
    ours = rotate(x.to(device), inv_freq=inv_freq.to(device), positions=positions.to(device), interleaved=interleaved)
    # A product with the matrix has the two products and the sum of a rotation, and head_dim - 2 exact zeros.
    assert_agree(ours, expected, x, rotary_dim, interleaved, angle=angle_error(dtype, angle))

    # A row per position: position p of the table is the p-th of the random ones.
    table = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = (t[0].to(table).to(device) for t in (angle.cos(), angle.sin()))
    ours = rotate(x[:1].to(device), cos, sin, interleaved=interleaved)
    # 1 u of float32 more: the table is rounded.
    assert_agree(
        ours, expected[:1], x[:1], rotary_dim, interleaved, angle=0.0 if table == torch.float64 else F32, roundings=5
    )


@pytest.mark.parametrize("shift", [1, 7, 1000, 131071, 2**20 + 3, 2**24 - 64, -1, -131071, 64 - 2**24])
@dtypes([torch.float32, torch.float64])
@pairings
@sizes
def test_scores_depend_on_the_distance_alone(size, interleaved, dtype, shift, device):
    """<R_m q, R_n k> is the same for (m, n) and (m + shift, n + shift)."""
    if not supported(device, dtype):
        pytest.skip("Apple GPUs have no float64")
    seq, q_heads, k_heads, rotary_dim = size[1], size[2], size[3], size[-1]
    q, k = (x.transpose(1, 2).to(device) for x in (t.to(dtype) for t in heads_first(size, torch.float64)))
    inv_freq = torch_rope.inv_freq(rotary_dim)

    def scores(offset):
        rotated = rotate_qk(q, k, inv_freq=inv_freq.to(device), offset=offset, interleaved=interleaved)
        rotated_q, rotated_k = (t.cpu().double().transpose(1, 2) for t in rotated)
        return rotated_q @ rotated_k.repeat_interleave(q_heads // k_heads, 1).mT

    norm_q, norm_k = (t.cpu().double().norm(dim=-1).transpose(1, 2) for t in (q, k))
    norm_k = norm_k.repeat_interleave(q_heads // k_heads, 1)
    # Each of four rotated vectors is off by sqrt(2) (2 u + angle) of its length, and a score by as much of |q| |k|.
    # 1e-14: the sums over head_dim in float64.
    largest = float(angle_error(dtype, torch.tensor(abs(shift) + seq, dtype=torch.float64)))
    limit = 4 * 2**0.5 * (torch.finfo(dtype).eps + largest) + 1e-14
    assert ((scores(shift) - scores(0)).abs() <= limit * norm_q.unsqueeze(-1) * norm_k.unsqueeze(-2)).all()


@dtypes(FLOATS)
@pairings
@sizes
def test_preserves_length_and_is_undone_by_its_inverse(size, interleaved, dtype, device):
    if not supported(device, dtype):
        pytest.skip("Apple GPUs have no float64")
    batch, seq, heads, _, head_dim, rotary_dim = size
    x = torch.randn(batch, seq, heads, head_dim, dtype=torch.float64).to(dtype)
    positions = torch.randint(0, 2**24, (batch, seq))
    angle = {"inv_freq": torch_rope.inv_freq(rotary_dim).to(device), "positions": positions.to(device)}
    turned = rotate(x.to(device), **angle, interleaved=interleaved)
    # An element is off by 2 u of the pair's magnitude, and cos and sin by 5e-7 (float64: 2 u): sqrt(2) of that for the pair. The error
    # of the angle itself changes no length and is undone.
    u = torch.finfo(dtype).eps / 2
    error = 2**0.5 * (2 * u + (2 * u if dtype == torch.float64 else OUR_ANGLE))
    before, after = (torch.hypot(*pairs_of(t.cpu().double(), rotary_dim, interleaved)) for t in (x, turned))
    assert ((after - before).abs() <= error * before).all()
    back = rotate(turned, **angle, interleaved=interleaved, inverse=True)
    assert_agree(back, x, x, rotary_dim, interleaved, roundings=0, angle=2 * error)


@dtypes(FLOATS)
@pairings
@sizes
def test_position_0_is_the_identity_bit_for_bit(size, interleaved, dtype, device):
    if not supported(device, dtype):
        pytest.skip("Apple GPUs have no float64")
    batch, seq, heads, _, head_dim, rotary_dim = size
    x = torch.randn(batch, seq, heads, head_dim, dtype=torch.float64).to(dtype).to(device)
    inv_freq = torch_rope.inv_freq(rotary_dim).to(device)
    positions = torch.zeros(seq, dtype=torch.int64, device=device)
    for inverse in (False, True):
        assert torch.equal(
            rotate(x, inv_freq=inv_freq, positions=positions, interleaved=interleaved, inverse=inverse), x
        )
    assert torch.equal(rotate(x, inv_freq=inv_freq, interleaved=interleaved)[:, 0], x[:, 0])
