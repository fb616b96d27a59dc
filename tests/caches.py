"""Caches, and what rotate_into_cache_ must write to them: these values, and no other bit of memory."""

import math

import numpy as np
import torch
from cases import on_gpu
from oracle import ANGLE_ERROR, assert_close, limits, numpy_of, quantise, rotate, ulp, without_factor

from torch_rope import reference
from torch_rope.selfcheck.calls import QUANTISED

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


def refill(t):
    """Fills all memory that t is a view of with garbage."""
    memory = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    memory.copy_(garbage(memory.shape, t.dtype))


def misplace_pads(call):
    """Changes the positions of pads (tokens with a negative slot) to numbers that a table by position has no row for."""
    positions = call.get("positions")
    if positions is None or "cos" not in call:
        return
    pads = call["slots"].cpu() < 0
    if pads.dim() == 2 and positions.shape[:-1].numel() == 1:  # all sequences share the positions
        pads = pads.all(0)
    info = torch.iinfo(positions.dtype)
    numbers = torch.tensor([-1 - call.get("offset", 0), info.min, info.max, 2**30])
    numbers = numbers[torch.randint(len(numbers), positions.shape)].to(positions)
    positions.copy_(torch.where(pads.view(positions.shape).to(positions.device), numbers, positions))


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
        # A NaN may have any sign, and so may what was rounded to zero.
        codes = [bits(t).int().masked_fill(~(t.float().abs() > 0).cpu(), 0) for t in (found, right)]
        assert torch.ne(*codes).sum() <= 2 + found.numel() / 100
        largest = right.double().nan_to_num().abs().max() if right.numel() else 0
        cancelled = (found.double() - right.double()).abs() < 1e-6 * largest
        assert (((codes[0] - codes[1]).abs() <= 1) | cancelled).all()
    else:
        eps, error_of_angles = torch.finfo(dtype).eps, 1e-12 if dtype == torch.float64 else ANGLE_ERROR
        torch.testing.assert_close(found, right, rtol=2 * eps, atol=4 * eps + error_of_angles, equal_nan=True)


def check(call):
    """Makes a call of rotate_into_cache_ and checks q, q_out, k, v, the caches and all memory around them.

    The caches are filled with garbage first. q or q_out, and the cells that are written, must have the bits that the
    functional operators return, and these must be close to the oracle. What is quantised, and v after a norm, must be
    what the oracle stores there. All other memory must be as before. On the CPU the reference must agree.
    """
    q, k, v, k_cache, v_cache = (call[name] for name in ("q", "k", "v", "k_cache", "v_cache"))
    q_out, slots, eager = call.get("q_out", q), call.get("slots"), call.get("eager_rounding", False)
    refill(k_cache)
    refill(v_cache)
    positions = positions_of(**call)
    blocks, block_size = (1, *k_cache.shape)[-4:-2]
    if slots is None:  # sequence b is written to block b, by position
        where = positions + np.arange(len(positions))[:, None] * block_size
    else:
        where = np.broadcast_to(slots.cpu().numpy(), positions.shape)
    where = torch.from_numpy(where.astype(np.int64)).flatten()
    written = where >= 0
    cells = where[written] // block_size, where[written] % block_size
    of_q = tuple(torch.from_numpy(index).flatten() for index in np.indices(positions.shape))  # the same, in q

    names = "cos sin inv_freq positions offset attention_factor interleaved rotary_start q_factor".split()
    rotation = by_token({name: call[name] for name in names if name in call}, positions)
    numbers = {name: call[name] for name in ("norm_eps", "norm_weight_offset") if name in call}
    if "q_norm_weight" in call:
        of_norm = {
            name: call[name] for name in ("q_norm_weight", "k_norm_weight", "round_before_weight") if name in call
        }
        rotated = rope.norm_rotate_qk(q, k, **of_norm, **numbers, **rotation, eager_rounding=eager)
    else:
        rotated = rope.rotate_qk(q, k, **rotation, eager_rounding=eager)
    rotated = [out.cpu() for out in rotated]
    wide, by_oracle = torch.promote_types(q.dtype, torch.float32), []
    of_limits = rotation, call.get("attention_factor", 1.0), "q_norm_weight" in call
    for x, out, name in (q, rotated[0], "q"), (k, rotated[1], "k"):
        weight, of_side = call.get(f"{name}_norm_weight"), rotation if name == "q" else without_factor(rotation)
        norm = {} if weight is None else {"norm_weight": weight} | numbers
        by_oracle.append(rotate(x, **of_side, **norm))
        known = ~np.isnan(by_oracle[-1][0])
        if not eager:
            assert_close(
                out[torch.from_numpy(known)], tuple(n[known] for n in by_oracle[-1]), *limits(q.dtype, *of_limits)
            )

    tensors = q, k, v, k_cache, v_cache, q_out
    expected = {key: memory.clone() for key, memory in map(memory_of, tensors)}
    right = [t.clone() for t in tensors]
    rope.rotate_into_cache_(**call)
    if not on_gpu(str(q.device)):
        right[-1] = right[0] if q_out is q else right[-1]
        others = dict(zip(("q", "k", "v", "k_cache", "v_cache"), right, strict=False))
        reference.rotate_into_cache_(**call | others | ({"q_out": right[-1]} if "q_out" in call else {}))
        for found, r in zip(tensors, right, strict=True):
            assert_agrees(found, r, q.dtype)

    def view(t):
        """Returns t in the expected memory."""
        return expected[memory_of(t)[0]].as_strided(t.shape, t.stride(), t.storage_offset())

    if "q_scale" not in call:
        nan = q_out.cpu().isnan()  # a NaN may have any bits
        assert torch.equal(nan, rotated[0].isnan())
        rotated[0] = torch.where(nan, q_out.cpu(), rotated[0])
    for i, (out, x, name) in enumerate(((q_out, rotated[0], "q"), (k_cache, rotated[1], "k"), (v_cache, v, "v"))):
        scale, norm_v = call.get(f"{name}_scale"), name == "v" and call.get("norm_v", False)
        found, target = (t if t.dim() == 4 else t[None] for t in (bits(out), view(out)))
        at, tokens = (of_q, written | True) if name == "q" else (cells, written)
        if scale is None and not norm_v:
            target[at] = bits(x).flatten(0, -3)[tokens]
            continue
        target[at] = found[at]
        values = numpy_of(x, np.longdouble if norm_v else np.float64)
        error = np.zeros_like(values)
        if norm_v:
            values /= np.sqrt((values**2).sum(-1, keepdims=True) / max(v.shape[-1], 1) + call.get("norm_eps", 1e-6))
            error = ulp(abs(values), q.dtype) if call.get("round_before_weight") else 0
            if "v_norm_weight" in call:
                weight = numpy_of(call["v_norm_weight"], np.longdouble) + call.get("norm_weight_offset", 0.0)
                values, error = values * weight, error * abs(weight)
            error = error + 6 * ulp(abs(values), wide)
        elif name != "v" and not eager:
            values, magnitude = by_oracle[i]
            ulps, plus = limits(wide, *of_limits)
            error = ulps * ulp(magnitude, wide) + plus * magnitude
        values, error = (n.reshape(len(where), *n.shape[-2:])[tokens.numpy()] for n in (values, error))
        rounded = q.dtype if eager or scale is None else None
        assert_stored(found[at].view(out.dtype), values, error, rounded, scale, wide)
    for key, memory in map(memory_of, tensors):
        assert torch.equal(memory, expected[key])
