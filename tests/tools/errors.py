"""Wrong usages of functions and modules, and what they raise; tests/bad_calls.py has those of the operators.

`python tests/tools/errors.py` prints the messages of both.
"""

import inspect
import math  # noqa: F401
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import bad_calls  # noqa: E402

import torch_rope  # noqa: E402
from torch_rope import *  # noqa: E402, F403  the tables use these names
from torch_rope.integrations import diffusers, timm, transformers  # noqa: E402, F401

# Usage -> a part of the message, in which "..." stands for anything.
TABLES = {
    TypeError: """
rope(q, k, 4096) -> rope.rotate_qk: positions is 4096 but must be a tensor; pass offset=4096 if the first token is
rope(q, k, [0, 1, 2]) -> rope.rotate_qk: positions is of type list but must be a tensor; torch.as_tensor makes one
rope(q, k, offset=torch.tensor(3)) -> rope.rotate_qk: offset is of type Tensor but must be an integer; pass positions
rotate_qk(query=q, key=k, cos=cos, sin=sin) -> rope.rotate_qk: query is not an argument; its name here is q
rope(query=q, k=k) -> torch_rope.RotaryEmbedding: query is not an argument; its name here is q
rope(k=k) -> torch_rope.RotaryEmbedding: q is missing but must be a tensor
rotate_qk(q, cos=cos, sin=sin) -> rope.rotate_qk: k is missing but must be a tensor
rotate_into_cache_(q, k, k, key_cache=q) -> rope.rotate_into_cache_: key_cache is not ... its name here is k_cache
cos_sin(ints, freqs=freq) -> torch_rope.cos_sin: freqs is not an argument; its name here is inv_freq
positions_from_cu_seqlens(ints, max_seqlen=3) -> max_seqlen is ... its name here is total, the number
slots_of_window(ints, window_size=3) -> torch_rope.slots_of_window: window_size is ... its name here is window
inv_freq(64, theta=3) -> torch_rope.inv_freq: theta is not an argument; its name here is base
frequencies.default(dim=64) -> torch_rope.frequencies.default: dim is not an argument; its name here is rotary_dim
frequencies.yarn(64, 1e4, original_max_position_embeddings=9) -> its name here is original_max_position
multimodal.axial(freqs=freq) -> torch_rope.multimodal.axial: freqs is not an argument; its name here is inv_freq
transformers.patch(linear, fused=True) -> torch_rope.integrations.transformers.patch: fused is ... its name here is fuse
RotaryEmbedding.from_config({"model_type": "llama"}, interleave=True) -> from_config: interleave ... here is interleaved
RotaryEmbedding.from_config({"model_type": "llama"}, layer_idx=0) -> the arguments are config, layer_type, layer,
rope(q, k, position_ids=ints) -> torch_rope.RotaryEmbedding: position_ids is not ... its name here is positions
rope(q, k, cos=cos) -> torch_rope.RotaryEmbedding: cos is not an argument; the arguments are q, k, positions, offset
rotate_qk(q, k, rope.angles(3)) -> rope.rotate_qk: cos is of type dict but must be a tensor; pass ... as **angles
multimodal.position_parts(ints[None], freq.double()[None], "cpu") -> positions is int64 but must be float64
multimodal.position_parts(None, freq.double()[None], "cpu") -> positions is None but must be a tensor
multimodal.sections([0.5] * 8, [2, 3, 3]) -> torch_rope.multimodal.sections: inv_freq is of type list but must be a tensor
multimodal.interleaved(freq, None) -> torch_rope.multimodal.interleaved: sections is None but must be a list of integers
torch_rope.positions_from_cu_seqlens(None, 6) -> cu_seqlens is None but must be a tensor
positions_of([0, 5], 6.0) -> total is 6.0 but must be an integer
rotate(q, cos, sin, interleaved=ints) -> rope.rotate: interleaved is of type Tensor but must be True or False
rope.angles(ints) -> torch_rope.RotaryEmbedding: seq is of type Tensor but must be an integer; call angles(seq,
torch.jit.trace(dynamic, (q, k)) -> seq is of type Tensor but must be an integer; torch.jit.trace makes a
norm_rotate_qk(q, k, freq, freq, cos, sin, eps=1e-5) -> rope.norm_rotate_qk: eps is not ... here is norm_eps
norm_rotate_qk(q, k, freq, freq, cos, sin, norm_eps=None) -> norm_eps is None but must be a number
rotate_qk(q, k, inv_freq=freq, interleaved="gptj") -> interleaved is 'gptj' but must be True or False; True pairs
cos_sin(32, freq) -> rope.cos_sin: positions is 32 but must be a tensor; torch.arange(32) has the positions below
positions_of([0.0, 5.0]) -> cu_seqlens is float32 but must be int32 or int64
positions_of([0, 3], 3, torch.zeros(1)) -> offsets is float32 but must be int32 or int64
slots_of_window(ints / 1, 4) -> positions is float32 but must be int32 or int64
RotaryEmbedding(64, factor=4.0, rope_type="yarn") -> rope_type is not an argument; its name here is kind
RotaryEmbedding(dim=64) -> dim is not an argument; its name here is head_dim
RotaryEmbedding(64, kind="linear", factor=2.0, truncate=True) -> truncate is not an argument; the arguments are head_
RotaryEmbedding(64, kind="yarn") -> torch_rope.frequencies.yarn: factor is missing but must be given
transformers.patch({"model_type": "llama"}) -> model is of type dict but must be a loaded model, such as
diffusers.patch("name") -> model is 'name' but must be a loaded model, such as FluxTransformer2DModel
timm.patch(None) -> model is None but must be a loaded model, such as timm.create_model
diffusers.patch(linear, fuse="yes") -> fuse is 'yes' but must be True or False
rotate(q, cos, sin, attention_factor=learned) -> attention_factor is of type Parameter but must be a number; pass a float, or
setattr(rope, "attention_factor", learned) or rope(q, k) -> rope.rotate_qk: attention_factor is of type Parameter but must be
inv_freq(64, learned) -> base is of type Parameter but must be a positive number; pass a float, or compute inv_freq
RotaryEmbedding(64, learned) -> torch_rope.frequencies.default: base is of type Parameter but must be a positive number
kind("yarn", factor=learned) -> factor is of type Parameter but must be a number that is at least 1; pass a float
""",
    ValueError: """
rotate_qk_(q, k, cos, sin, rotary_start=-(2**63) - 1) -> rope.rotate_qk_: rotary_start is -9223372036854775809 but must
rotate(q, torch.complex(cos, sin)) -> sin is None but must be ... torch.view_as_real(table).unbind(-1) makes cos
rotate(q, cos, sin, offset=2**63) -> rope.rotate: offset is 9223372036854775808 but must be at least -2**63 and
inv_freq(1 << 70) -> rotary_dim is 1180591620717411303424 but must be an even number that is at least 0 and below 2**63
slots_of_window(ints, 1 << 70) -> window is 1180591620717411303424 but must be at least 1 and below 2**63
slots_of_window(ints.expand(4, 3), 1 << 62) -> window is 4611686018427387904 but must be at most 2305843009213693952
RotaryEmbedding(8, max_position=1 << 70) -> max_position is 1180591620717411303424 but must be a positive integer below
kind("linear", factor=1 << 2000) -> torch_rope.frequencies.linear: factor is 11481...but must be a positive number
inv_freq(64, "10000") -> torch_rope.inv_freq: base is '10000' but must be a positive number
positions_of([3, 5, 2]) -> cu_seqlens is [3, 5, 2] but must begin with 0 ... pass lengths as
positions_of([0, 5, 3]) -> cu_seqlens is [0, 5, 3] but must begin with 0 and never decrease
positions_of([0, 5, 10]) -> total is 9 but must be at least 10, the last number of cu_seqlens
positions_of([0, 4, 6], cp_size=2) -> cu_seqlens is [0, 4, 6] but must have lengths that are multiples of 2 * cp_size, which is 4
positions_of([0, 4], 1, cp_size=2) -> total is 1 but must be at least 2, the last number of cu_seqlens / cp_size
positions_of([0, 4], cp_rank=2, cp_size=2) -> cp_rank is 2 but must be below cp_size, which is 2
positions_of([[0, 5]]) -> cu_seqlens has shape [1, 2] but must have shape [sequences + 1]
positions_of([0, 3], 3, torch.zeros(3).long()) -> offsets has shape [3] but must have shape [1], one offset for
slots_of_window(ints.view(1, 1, 3), 4) -> positions has shape [1, 1, 3] but must have shape [seq] or
RotaryEmbedding(64, kind="yarns") -> kind is 'yarns' but must be one of 'default'
RotaryEmbedding(64, interleaved="gptj") -> interleaved is 'gptj' but must be True (GPT-J) or False (NeoX
RotaryEmbedding(64, kind="dynamic", factor=2.0, original_max_position=9, max_position=9) -> max_position is 9 but must
RotaryEmbedding("64") -> head_dim is '64' but must be a positive integer
RotaryEmbedding(0) -> head_dim is 0 but must be a positive integer
RotaryEmbedding(63, rotary_dim=63) -> head_dim is 63 but must be even to rotate all channels; or pass a smaller
RotaryEmbedding(64, rotary_dim=66) -> rotary_dim is 66 but must be at most head_dim, which is 64
RotaryEmbedding.from_config(linear) -> config is <class '...Linear'> but must be the config of a model; pass
kind("default", rotary_dim=0) -> torch_rope.frequencies.default: rotary_dim is 0 but must be a positive integer
kind("default", base=math.nan) -> torch_rope.frequencies.default: base is nan but must be a positive number
kind("ntk", factor=0.5) -> torch_rope.frequencies.ntk: factor is 0.5 but must be a number that is at least 1
kind("ntk", rotary_dim=2) -> torch_rope.frequencies.ntk: rotary_dim is 2 but must be an integer above 2
kind("yarn", factor=0.5) -> torch_rope.frequencies.yarn: factor is 0.5 but must be a number that is at least 1
kind("yarn", base=1) -> torch_rope.frequencies.yarn: base is 1 but must be more than 1
kind("yarn", beta_fast=0) -> torch_rope.frequencies.yarn: beta_fast is 0 but must be a positive number
kind("yarn", beta_slow=33.0) -> torch_rope.frequencies.yarn: beta_slow is 33.0 but must be at most beta_fast, which is 32.0
kind("yarn", attention_factor=-1.0) -> torch_rope.frequencies.yarn: attention_factor is -1.0 but must be a positive number
kind("longrope", original_max_position=1) -> longrope: original_max_position is 1 but must be more than 1
kind("longrope", factor=None) -> longrope: factor is None but must be a number unless attention_factor is given
kind("longrope", long_factor=[1.0] * 3) -> longrope: len(long_factor) is 3 but must be rotary_dim / 2, which is 2
kind("longrope", short_factor=[1.0, 0]) -> longrope: short_factor[1] is 0 but must be a positive number
kind("longrope", seq_len=5, long=True) -> longrope: seq_len is 5 but must be None if long is given
kind("llama3", high_freq_factor=0.5) -> high_freq_factor is 0.5 but must be at least low_freq_factor, which is 1.0
kind("llama3", low_freq_factor=0) -> torch_rope.frequencies.llama3: low_freq_factor is 0 but must be a positive number
kind("proportional", head_dim=63) -> torch_rope.frequencies.proportional: head_dim is 63 but must be an even number
kind("proportional", partial_rotary_factor=-0.5) -> partial_rotary_factor is -0.5 but must be a number in [0, 1]
kind("partial_rotary_dim", head_dim=64.0) -> partial_rotary_dim: head_dim is 64.0 but must be a positive integer
kind("partial_rotary_dim", partial_rotary_factor=1.5) -> partial_rotary_factor is 1.5 but must be a number in (0, 1]
kind("partial_rotary_dim", head_dim=65, partial_rotary_factor=1.0) -> head_dim is 65 but must be an even number to rotate
multimodal.from_config({"model_type": "llama"}) -> model_type is 'llama' but must be one of 'qwen2_vl'
multimodal.sections(freq, [4, 4]) -> sections is [4, 4] but must be three counts of pairs with the sum 8
multimodal.height_width_time(freq, [3, 4, 1]) -> but must have as many pairs of height as of width
multimodal.by_axis(freq, [0, 1] * 4, 1) -> axes is [0, 1, ... but must have 8 numbers that are at least 0 and below 1,
axial_cos_sin(torch.zeros(2, 5), freq) -> inv_freq has shape [8] but must have shape [axes, rotary_dim
multimodal.by_axis(freq, [0, 1]) -> axes is [0, 1] but must have 8 numbers that are at least 0 and below 2
multimodal.position_parts(freq.double(), freq.double()[None], "cpu") -> positions has shape [8] and inv_freq [1, 8] but
transformers.patch(linear) -> Linear is not patched: no module of it calls a rotary function
diffusers.patch(linear, rounding="exact") -> rounding is 'exact' but must be "eager" or "once"
transformers.patch(of_diffusers) -> a model of diffusers; pass it to torch_rope.integrations.diffusers.patch
diffusers.patch(of_transformers) -> a model of transformers; pass it to torch_rope.integrations.transformers.patch
""",
}
CASES = [(*line.split(" -> "), error) for error, table in TABLES.items() for line in table.strip().split("\n")]
# Arguments that are right for each kind of frequencies.
GOOD = {"rotary_dim": 4, "base": 1e4, "factor": 2.0, "original_max_position": 4096, "head_dim": 64}
GOOD |= {"partial_rotary_factor": 0.5, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}


def run(usage: str, wrapped=lambda function: function):
    """Runs a usage, as a function that `wrapped` may compile. It may use the names below, and those of this module."""
    rope, freq, ints = torch_rope.RotaryEmbedding(16), torch.ones(8), torch.arange(3)
    dynamic = torch_rope.RotaryEmbedding(16, kind="dynamic", factor=2.0, original_max_position=9)
    cos, sin = torch_rope.cos_sin(ints, freq)
    q, k, learned = torch.zeros(2, 3, 4, 16), torch.zeros(2, 3, 1, 16), nn.Parameter(torch.ones(()))

    def positions_of(cu_seqlens, total=9, *offsets, **rank):
        return torch_rope.positions_from_cu_seqlens(torch.tensor(cu_seqlens), total, *offsets, **rank)

    def kind(name, **changes):
        function = getattr(torch_rope.frequencies, name)
        return function(**{n: v for n, v in (GOOD | changes).items() if n in inspect.signature(function).parameters})

    linear = nn.Linear(2, 2)
    of_diffusers, of_transformers = (
        type("Model", (nn.Linear,), {"__module__": f"{library}.models"})(2, 2)
        for library in ("diffusers", "transformers")
    )
    return wrapped(eval(f"lambda: {usage}", globals() | locals()))()


def message_of(function, *args, **kwargs) -> str:
    try:
        return f"no error, but {function(*args, **kwargs)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    for usage, *_ in CASES:
        print(usage, message_of(run, usage), sep="\n    ")
    for [case] in (param.values for param in bad_calls.CASES + bad_calls.OVERLAPS + bad_calls.RANGES):
        op, arguments, _ = next(bad_calls.calls(case, "cpu"))
        print(f"{case.operators}: {case.changes}", message_of(op, **arguments), sep="\n    ")
