"""A call of each operator on CUDA."""

import torch
from cases import written_by
from programs import call_of, tensors_of

from torch_rope.selfcheck.calls import Source

rope = torch.ops.rope
ROWS, BLOCKS, CELLS = 12, 6, 16  # rows of a table; blocks of a cache, and cells of a block


def make_call(op, source, device):
    """Returns the arguments of a call by name.

    source: "table" or "token"; or "inv_freq", with a norm over all heads and quantised results.
    """
    more = {"size": (3, 7, 4, 2, 64, 64), "rows": ROWS, "blocks": BLOCKS, "cells": CELLS, "dtype": torch.bfloat16}
    if source == "inv_freq":
        more |= {"q_weight": "float32", "over_heads": True, "norm_v": True, "q_out": "bhsd"}
        more |= {"quantised": (torch.int8, torch.int8), "q_dtype": torch.int8}
    return call_of(op, device, Source(source, "int64 [B,S]"), slots="int64 [B,S]", **more)


def results_of(op, given):
    """Makes a call with copies of its tensors, and returns the copies that it writes and its results."""
    given = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    out = getattr(rope, op)(**given)
    return [*(given[name] for name in written_by(op) if name in given), *tensors_of(out)]


def call_outside(op, source, changes, device):
    """Makes a call in which the last token of a sequence is out of range, and returns the text of the error."""
    given = make_call(op, source, device) | {"positions": torch.arange(7, device=device).repeat(3, 1)}
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
