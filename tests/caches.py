"""Caches, and what rotate_into_cache_ must write to them: these values, and no other bit of memory."""

import math

import numpy as np
import torch
from cases import CACHES, QUANTISED, moved, on_gpu, spread
from oracle import ANGLE_ERROR, assert_close, limits, numpy_of, quantise, rotate, ulp

from torch_rope import reference

rope = torch.ops.rope
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # the integer dtype with this many bytes


def bits(t):
    """Returns the elements as integers, on the CPU, so that NaNs and zeros compare by their bits."""
    return t.cpu().view(INTEGER[t.element_size()])


def memory_of(t):
    """Returns a key and the bits of all memory that t is a view of. Empty tensors have no address of their own."""
    storage = t.untyped_storage()
    return (storage.data_ptr(), t.dtype), bits(t.as_strided((storage.nbytes() // t.element_size(),), (1,), 0))


def garbage(shape, dtype):
    """Returns a tensor of random bits, many of them NaNs, as a cache may hold before it is written."""
    words = torch.randint(-(2**63), 2**63 - 1, (math.prod(shape) * dtype.itemsize // 8 + 1,))
    t = words.view(dtype)[: math.prod(shape)]
    if dtype.itemsize > 1:
        t[::7] = float("nan")
    return t.view(shape)


class Caches:
    """The caches k and v in one of the layouts, in memory that is filled with garbage.

    layout: a key of CACHES. v_shape: the heads and head_dim of the cache v, unless they are those of k. quantised: the
    dtypes of k and v, where None stands for `dtype`.
    """

    def __init__(
        self, layout, blocks, block_size, heads, head_dim, dtype, device, v_shape=None, quantised=(None, None)
    ):
        def views(dtype, heads, head_dim):
            make = lambda *shape: garbage(shape, dtype).to(device)  # noqa: E731
            return CACHES[layout](make, blocks, block_size, heads, head_dim)

        dtypes = [d or dtype for d in quantised]
        self.block_size = block_size
        self.k, self.v = views(dtypes[0], heads, head_dim)
        if v_shape is not None or dtypes[0] != dtypes[1]:
            self.v = views(dtypes[1], *(v_shape or (heads, head_dim)))[1]


def positions_of(q, positions=None, offset=0, **_):
    """Returns the position of each token, [batch, seq], as Python integers, which do not overflow."""
    batch, seq = (1, *q.shape)[-4:-2]
    positions = np.arange(seq) if positions is None else positions.cpu().numpy()
    return np.broadcast_to(positions.astype(object) + offset, (batch, seq))


def by_token(angles, positions):
    """Returns the angles with a table by token for one by position: with NaN for a position that the table lacks.

    Positions and offset then choose no angles, and are left out.
    """
    if "cos" not in angles:
        return angles
    angles = {name: a for name, a in angles.items() if name not in ("positions", "offset")}
    if angles["cos"].dim() > 2:
        return angles
    missing = ((positions < 0) | (positions >= len(angles["cos"]))).astype(bool)
    rows = torch.from_numpy(np.where(missing, 0, positions).astype(np.int64))
    missing = torch.from_numpy(missing).unsqueeze(-1)
    tables = {
        name: angles[name].cpu()[rows].masked_fill(missing, torch.nan).to(angles[name].device)
        for name in ("cos", "sin")
    }
    return angles | tables


def assert_stored(found, values, error, rounded, scale, wide):
    """Asserts that cells hold these numbers: rounded to their dtype or, if there is a scale, quantised.

    error: by how much each number may be off. rounded: the dtype that it is rounded to before it is quantised, or None.
    wide: the dtype of the arithmetic.
    """
    bounds = []
    with np.errstate(invalid="ignore"):  # a NaN may be a signalling one
        low_and_high = values - error, values + error
    for bound in low_and_high:
        bound = torch.from_numpy(bound.astype(np.float64)).to(rounded or wide).to(wide).numpy()
        bounds.append(bound if scale is None else quantise(bound, scale.cpu().numpy(), found.dtype))
    (low, high), found = bounds, numpy_of(found)
    nan = np.isnan(low)
    assert np.array_equal(np.isnan(found), nan)
    in_order = np.minimum(low, high), np.maximum(low, high)  # a negative scale exchanges them
    assert ((in_order[0] <= found) & (found <= in_order[1]) | nan).all()
    exact = ~nan & (error == 0)
    assert np.array_equal(np.signbit(found)[exact], np.signbit(low)[exact])


def assert_agrees(found, right, dtype):
    """Asserts that a tensor has the values of the reference, whose numbers may be rounded to a neighbour."""
    if found.dtype in QUANTISED:
        codes = [bits(t).int().masked_fill(t.float().isnan(), 0) for t in (found, right)]  # a NaN may have any sign
        assert torch.ne(*codes).sum() <= 2 + found.numel() / 100
        assert ((codes[0] - codes[1]).abs() <= 1).all()
    else:
        eps, error_of_angles = torch.finfo(dtype).eps, 1e-12 if dtype == torch.float64 else ANGLE_ERROR
        torch.testing.assert_close(found, right, rtol=2 * eps, atol=4 * eps + error_of_angles, equal_nan=True)


def check(q, k, v, caches, angles, slots=None, norm=None, results=None, eager_rounding=False, **options):
    """Calls the operator and checks q, q_out, k, v, the caches and all memory around them.

    q or q_out, and the cells that are written, must have the bits that the functional operators return, and these must be
    close to the oracle. What is quantised, and v after a norm, must be what the oracle stores there. All other memory
    must be as before. On the CPU the reference must agree.

    norm: a dict of q_norm_weight, k_norm_weight and norm_eps, or None. results: a dict of q_out, q_scale, k_scale,
    v_scale and norm_v, or None.
    """
    norm, results, eager = norm or {}, results or {}, {"eager_rounding": True} if eager_rounding else {}
    given, positions = angles | norm | results | options | eager | {"slots": slots}, positions_of(q, **angles)
    if slots is None:  # sequence b is written to block b, by position
        where = positions + np.arange(len(positions))[:, None] * caches.block_size
    else:
        where = np.broadcast_to(slots.cpu().numpy(), positions.shape)
    angles = by_token(angles, positions)
    where = torch.from_numpy(where.astype(np.int64)).flatten()
    written = where >= 0
    cells = where[written] // caches.block_size, where[written] % caches.block_size
    of_q = tuple(torch.from_numpy(index).flatten() for index in np.indices(positions.shape))  # the same, in q

    wide, factor = torch.promote_types(q.dtype, torch.float32), options.get("attention_factor", 1.0)
    functional = rope.norm_rotate_qk if norm else rope.rotate_qk
    rotated = [out.cpu() for out in functional(q, k, **norm, **angles, **options, **eager)]
    by_oracle = []
    for x, out, weight in (q, rotated[0], "q_norm_weight"), (k, rotated[1], "k_norm_weight"):
        with_norm = {"norm_weight": norm[weight], "norm_eps": norm["norm_eps"]} if norm else {}
        by_oracle.append(rotate(x, **angles, **options, **with_norm))
        known = ~np.isnan(by_oracle[-1][0])
        if not eager_rounding:
            near = limits(x.dtype, angles, factor, bool(norm))
            assert_close(out[torch.from_numpy(known)], tuple(n[known] for n in by_oracle[-1]), *near)

    q_out = results.get("q_out", q)
    tensors = q, k, v, caches.k, caches.v, q_out
    expected = {key: memory.clone() for key, memory in map(memory_of, tensors)}
    right = [t.clone() for t in tensors]
    rope.rotate_into_cache_(*tensors[:5], **given)
    if not on_gpu(str(q.device)):
        right[-1] = right[0] if q_out is q else right[-1]
        reference.rotate_into_cache_(*right[:5], **given | ({"q_out": right[-1]} if "q_out" in given else {}))
        for found, r in zip(tensors, right, strict=True):
            assert_agrees(found, r, q.dtype)

    def view(t):
        """Returns t in the expected memory."""
        return expected[memory_of(t)[0]].as_strided(t.shape, t.stride(), t.storage_offset())

    if "q_scale" not in results:
        nan = q_out.cpu().isnan()  # a NaN may have any bits
        assert torch.equal(nan, rotated[0].isnan())
        rotated[0] = torch.where(nan, q_out.cpu(), rotated[0])
    for i, (out, x, name) in enumerate(((q_out, rotated[0], "q"), (caches.k, rotated[1], "k"), (caches.v, v, "v"))):
        scale, norm_v = results.get(f"{name}_scale"), name == "v" and results.get("norm_v", False)
        found, target = (t if t.dim() == 4 else t[None] for t in (bits(out), view(out)))
        at, tokens = (of_q, written | True) if name == "q" else (cells, written)
        if scale is None and not norm_v:
            target[at] = bits(x).flatten(0, -3)[tokens]
            continue
        target[at] = found[at]
        values = numpy_of(x, np.longdouble if norm_v else np.float64)
        error = np.zeros_like(values)
        if norm_v:
            values /= np.sqrt((values**2).sum(-1, keepdims=True) / max(v.shape[-1], 1) + norm.get("norm_eps", 1e-6))
            error = 6 * ulp(abs(values), wide)
        elif name != "v" and not eager_rounding:
            values, magnitude = by_oracle[i]
            ulps, plus = limits(wide, angles, factor, bool(norm))
            error = ulps * ulp(magnitude, wide) + plus * magnitude
        values, error = (n.reshape(len(where), *n.shape[-2:])[tokens.numpy()] for n in (values, error))
        rounded = q.dtype if eager_rounding or scale is None else None
        assert_stored(found[at].view(out.dtype), values, error, rounded, scale, wide)
    for key, memory in map(memory_of, tensors):
        assert torch.equal(memory, expected[key])


def make_norm(kind, head_dim, dtype, device, norm_eps=1e-6, heads=(1, 1)):
    """Returns the arguments of the norm, an empty dict if there is none.

    kind: "none", "dtype of x", "float32" (q_norm_weight is float32, k_norm_weight has the dtype of x), "strided", or
    "over heads": [heads, head_dim] for these heads of q and of k.
    """
    if kind == "none":
        return {}
    shapes = [(*[n] * (kind == "over heads"), head_dim) for n in heads]
    q, k = ((torch.rand(shape, dtype=torch.float64) * 2 - 0.5).to(dtype) for shape in shapes)
    if kind == "float32":
        q = q.float()
    if kind == "strided":
        q, k = spread(q, (2,), (1,)), spread(k, (3,), (2,))
    if kind == "over heads":
        k = spread(k, (1, 2), (1, 1))
    return {"q_norm_weight": moved(q, device), "k_norm_weight": moved(k, device), "norm_eps": norm_eps}
