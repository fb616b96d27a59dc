"""Short names for calls on Metal, and what the simulator records of them."""

import math

import pytest
import torch

import torch_rope

HALVES = [torch.float32, torch.float16, torch.bfloat16]
INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
NORM = pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
ops = torch.ops.rope
BUFFERS = str.split(
    "params q_in q_out k_in k_out v_in v_out cos sin inv_freq positions slots q_weight k_weight q_before k_before"
    " sums k_scale v_scale"
)
TABLE_BUFFERS = str.split("params q_given k_given q k order starts cos_grad sin_grad")


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).to("mps")


def freqs(rotary_dim):
    return torch_rope.inv_freq(rotary_dim, device="mps")


def tables(rows, rotary_dim):
    return [t.to("mps") for t in torch_rope.cos_sin(torch.arange(rows), torch_rope.inv_freq(rotary_dim))]


def weights_of(*shape, k_shape=None):
    return dict(q_norm_weight=randn(*shape), k_norm_weight=randn(*k_shape or shape))


def table_backward(given, x, cos, sin, positions=None, offset=0, **flags):
    return ops._rotate_table_backward(
        *(given, None, x, None) if torch.is_tensor(x) else (*given, *x), cos, sin, None, positions, offset, **flags
    )


def shares_of(tokens, heads):
    """Returns how many threads share the heads of a token: kSpread in csrc/mps/plan.h."""
    return math.ceil(heads / math.ceil(heads * tokens / 2048))


def read(x, times=1):
    """Returns the bytes (read, written) of a buffer of which each element is read this often. See written()."""
    return (round(times * x.nbytes), 0)


def written(x):
    return (0, x.nbytes)


class Dispatch:
    """What a kernel did, by the names of the buffers."""

    def __init__(self, record, names=BUFFERS):
        self.record, self.buffers = record, {names[i]: buffer for i, buffer in record["buffers"].items()}
        self.bytes = {name: (b["bytes_read"], b["bytes_written"]) for name, b in self.buffers.items()}

    def __getitem__(self, name):
        return self.record[name]

    def check(self, **expected):
        assert {name: self.bytes[name] for name in expected} == expected

    def widths(self, name):
        """Returns the sizes of all accesses to a buffer, in bytes."""
        return set(map(int, [*self.buffers[name]["loads"], *self.buffers[name]["stores"]]))


def one_dispatch(simulator, names=BUFFERS):
    """Returns what the only kernel did that ran since the call before."""
    (record,) = simulator.last_dispatches()
    return Dispatch(record, names)
