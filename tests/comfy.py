"""Calls of the functions of comfy-kitchen, and what they compute."""

import torch

from torch_rope.selfcheck.calls import spread

DIM, DTYPES = 16, [torch.float32, torch.bfloat16, torch.float16]


def moved(t, device):
    """Returns a copy of t on the device, with the same strides and with the same memory around it."""
    storage = t.as_strided((t.untyped_storage().size() // t.element_size(),), (1,), 0).to(device)
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def rotations(*shape, dtype=torch.float32, factor=1.25):
    """Returns a table of rotations by random angles, times a factor: [*shape, 2, 2], with gaps between its elements."""
    angle = torch.randn(shape, dtype=torch.float64) * 100
    cos, sin = factor * angle.cos(), factor * angle.sin()
    table = torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2)).to(dtype)
    return spread(table, (1,) * len(shape) + (2, 3), (0,) * (len(shape) + 2))


def arguments(name, xs, table, scales=(), **more):
    """Returns the arguments of a function by name."""
    keys = ["x"] if "1" in name else ["xq", "xk"] if name.startswith("apply") else ["q", "k"]
    scale_keys = ["scale"] if "1" in name else ["q_scale", "k_scale"]
    return dict(zip(keys, xs, strict=False)) | {"freqs_cis": table} | dict(zip(scale_keys, scales, strict=False)) | more


def formula(name, x, table, scale=None, epsilon=1e-6, rot_dim=0):
    """Returns the result of a function, and the magnitude of each element's pair, in float64."""
    x, table = x.double(), table.double()
    if scale is not None:
        x = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * scale.double()
    interleaved, rotary_dim = "split_half" not in name, rot_dim or x.shape[-1]
    if interleaved and x.dim() == 4 and table.dim() == 6 and table.shape[2] > 1:
        table = table[:, :, : x.shape[2]]  # the table may be longer
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    pair = [table[..., row, 0] * a + table[..., row, 1] * b for row in (0, 1)]
    size = [torch.hypot(*pair)] * 2
    parts = (torch.stack(t, -1).flatten(-2) if interleaved else torch.cat(t, -1) for t in (pair, size))
    value, size = (part.view(rotated.shape) for part in parts)
    return torch.cat([value, rest], -1).numpy(), torch.cat([size, rest.abs()], -1).numpy()
