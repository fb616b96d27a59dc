"""A call of each operator on CUDA."""

import torch
from cases import schema_of, written_by

import torch_rope

rope = torch.ops.rope
ROWS, BLOCKS, CELLS = 12, 6, 16  # rows of a table; blocks of a cache, and cells of a block


def names_of(op):
    return [a.name for a in schema_of(op).arguments]


def make_call(op, source, device):
    """Returns the arguments of a call by name.

    source: "cos" for tables by position, and a norm of each head, if the operator needs one. "cos by token" for those by
    token. "inv_freq" for a norm over all heads and quantised caches.
    """
    with torch.device(device):
        q, k, v = torch.randn(3, 7, 8, 64).bfloat16().split([4, 2, 2], 2)
        given = {"x": q, "q": q, "k": k, "v": v, "q_out_grad": q.clone(), "k_out_grad": k.clone()}
        given |= {"positions": torch.arange(7).repeat(3, 1), "slots": torch.randperm(BLOCKS * CELLS)[:21].view(3, 7)}
        freq = torch_rope.inv_freq(64)
        if source != "inv_freq":
            tables = torch_rope.cos_sin(torch.arange(ROWS), freq)
            given["cos"], given["sin"] = tables if source == "cos" else (t[None, :7] for t in tables)
            given["k_cache"], given["v_cache"] = torch.zeros(2, BLOCKS, CELLS, 2, 64).bfloat16()
            if "cache" not in op:
                given["q_norm_weight"], given["k_norm_weight"] = torch.rand(2, 64)
        else:
            given["inv_freq"] = freq.repeat(3, 1) if "axial" in op else freq
            given["k_cache"], given["v_cache"] = torch.zeros(2, BLOCKS, CELLS, 2, 64, dtype=torch.int8)
            given["k_scale"], given["v_scale"] = torch.rand(2, 2)
            given |= {"q_out": torch.zeros(3, 4, 7, 64, dtype=torch.int8).transpose(1, 2), "q_scale": torch.rand(4)}
            given |= {"q_norm_weight": torch.rand(4, 64), "k_norm_weight": torch.rand(2, 64), "norm_v": True}
    return {name: given[name] for name in names_of(op) if name in given}


def results_of(op, given):
    """Makes a call with copies of its tensors, and returns the copies that it writes and its results."""
    given = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    out = getattr(rope, op)(**given)
    written = [given[name] for name in written_by(op) if name in given]
    return written + ([] if out is None else list(out) if isinstance(out, tuple) else [out])


def call_outside(op, source, changes, device):
    """Makes a call in which the last token of a sequence is out of range, and returns the text of the error."""
    given = make_call(op, source, device)
    for name, value in changes.items():
        if value is None or name == "offset":
            given[name] = value
        else:
            given[name][1, -1] = value
    try:
        results_of(op, given)
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:  # torch.AcceleratorError is one
        return str(error)
    return "no error"
