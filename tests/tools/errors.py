"""Wrong usages, and what each of them raises. Prints all errors: python tests/tools/errors.py

The first table has mistakes that torch and Python would report in words of their own. tests/operators/test_errors.py has
the errors of the operators.
"""

import re
import sys
from pathlib import Path

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("", "operators")]

import torch_rope  # noqa: E402
from torch_rope import RotaryEmbedding, frequencies, multimodal  # noqa: E402, F401  the table uses them
from torch_rope.integrations import diffusers, transformers  # noqa: E402, F401

# Usage -> type of the error: the message, in which "..." stands for anything.
TABLE = """
rope(q, k, 4096) -> TypeError: rope.rotate_qk: positions is 4096 but must be a tensor; pass offset=4096 if the first token is
rope(q, k, [0, 1, 2]) -> TypeError: rope.rotate_qk: positions is of type list but must be a tensor; torch.as_tensor makes one
rope(q, k, offset=4096.0) -> TypeError: rope.rotate_qk: offset is 4096.0 but must be an integer
rope(q, k, offset=torch.tensor(3)) -> TypeError: torch_rope: offset is a tensor of shape [] but must be an integer; pass positio
rope(q, k, position_ids=ints) -> TypeError: rope.rotate_qk: position_ids is not an argument; its name here is positions
rope.angles(ints) -> TypeError: torch_rope.RotaryEmbedding: seq is of type Tensor but must be an integer; call angles(seq, positions)
torch_rope.norm_rotate_qk(q, k, freq, freq, cos, sin, eps=1e-5) -> TypeError: rope.norm_rotate_qk: eps is not ... here is norm_eps
torch_rope.norm_rotate_qk(q, k, freq, freq, cos, sin, norm_eps=None) -> TypeError: ...: norm_eps is None but must be a number
torch_rope.rotate_qk(q, k, inv_freq=freq, interleaved="gptj") -> TypeError: rope.rotate_qk: interleaved is 'gptj' but must be True or
    False; True pairs channels 2i and 2i + 1 (GPT-J), False i and i + rotary_dim / 2 (NeoX, half-split)
torch_rope.rotate(q, torch.complex(cos, sin)) -> ValueError: rope.rotate: sin is None but must be given together with cos; ... inv_freq;
    torch.view_as_real(table).unbind(-1) makes cos and sin of a complex table
torch_rope.rotate(q, cos, sin, offset=2**63) -> ValueError: rope.rotate: offset is 9223372036854775808 but must be at least -2**63 and
torch_rope.cos_sin(32, freq) -> TypeError: rope.cos_sin: positions is 32 but must be a tensor; torch.arange(32) has the positions below
torch_rope.inv_freq(64, "10000") -> ValueError: torch_rope.inv_freq: base is '10000' but must be a positive number
positions_of([3, 5, 2]) -> ValueError: torch_rope.positions_from_cu_seqlens: cu_seqlens is [3, 5, 2] but must begin with 0 and never
    decrease; pass lengths as torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
positions_of([0, 5, 10]) -> ValueError: ...: total is 9 but must be at least 10, the last number of cu_seqlens
positions_of([[0, 5]]) -> ValueError: ...: cu_seqlens has shape [1, 2] but must have shape [sequences + 1]
positions_of([0, 3], 3, torch.zeros(3).long()) -> ValueError: ...: offsets has shape [3] but must have shape [1], one offset for
torch_rope.positions_from_cu_seqlens([0, 5], 5) -> TypeError: ...: cu_seqlens is of type list but must be a tensor; torch.as_tensor
torch_rope.slots_of_window([1, 2], 4) -> TypeError: torch_rope.slots_of_window: positions is of type list but must be a tensor
torch_rope.slots_of_window(ints.view(1, 1, 3), 4) -> ValueError: ...: positions has shape [1, 1, 3] but must have shape [seq] or
torch_rope.slots_of_window(ints / 1, 4) -> TypeError: ...: positions is float32 but must be int32 or int64
torch_rope.slots_of_window(ints, 0) -> ValueError: ...: window is 0 but must be at least 1
RotaryEmbedding(64, theta=1e4) -> TypeError: torch_rope.RotaryEmbedding: theta is not an argument; its name here is base
RotaryEmbedding(64, factor=4.0, rope_type="yarn") -> TypeError: ...: rope_type is not an argument; its name here is kind
RotaryEmbedding(64, dim=32) -> TypeError: ...: dim is not an argument; its name here is head_dim
RotaryEmbedding(64, max_position_embeddings=4096) -> TypeError: ...: max_position_embeddings is not ... here is max_position
RotaryEmbedding(64, kind="linear", factor=2.0, truncate=True) -> TypeError: ...: truncate is not an argument; the arguments are head_
RotaryEmbedding(64, kind="yarn") -> TypeError: yarn() missing 2 required keyword-only arguments: 'factor' and 'original_max_position'
RotaryEmbedding(64, kind="yarns") -> ValueError: ...: kind is 'yarns' but must be one of 'default'
RotaryEmbedding(64, base="10000") -> ValueError: torch_rope.frequencies.default: base is '10000' but must be a positive number
RotaryEmbedding(64, interleaved="gptj") -> ValueError: ...: interleaved is 'gptj' but must be True (GPT-J) or False (NeoX
RotaryEmbedding(64, max_position=0) -> ValueError: ...: max_position is 0 but must be a positive integer
RotaryEmbedding(64, kind="dynamic", factor=2.0, original_max_position=9, max_position=9) -> ValueError: ...: max_position is 9 but must
    be None for kind 'dynamic', whose angles change with the length
RotaryEmbedding(64, rotary_dim=66) -> ValueError: ...: rotary_dim is 66 but must be at most head_dim, which is 64
RotaryEmbedding(63) -> ValueError: ...: head_dim is 63 but must be even to rotate all channels; or pass a smaller
RotaryEmbedding.from_config(nn.Linear(2, 2)) -> ValueError: ...: config is <class '...Linear'> but must be the config of a model; pass
    model.config
frequencies.partial_rotary_dim(65, 1.0) -> ValueError: ...: head_dim is 65 but must be an even number to rotate all
frequencies.longrope(2, 1e4, short_factor=[1.0], long_factor=[1.0] * 3, original_max_position=9, factor=2.0) -> ValueError:
    torch_rope.frequencies.longrope: len(long_factor) is 3 but must be rotary_dim / 2, which is 1
frequencies.longrope(2, 1e4, short_factor=[0], long_factor=[1.0], original_max_position=9, factor=2.0) -> ValueError:
    torch_rope.frequencies.longrope: short_factor[0] is 0 but must be a positive number
multimodal.from_config(nn.Linear(2, 2)) -> ValueError: ... but must be the config of a model; pass model.config
multimodal.from_config({"model_type": "llama"}) -> ValueError: ...: model_type is 'llama' but must be one of 'qwen2_vl'
multimodal.sections(freq, [4, 4]) -> ValueError: ...: sections is [4, 4] but must be three counts of pairs with the sum 8
multimodal.by_axis(freq, [0, 1]) -> ValueError: ...: axes is [0, 1] but must have 8 numbers that are at least 0 and below 2
multimodal.axial(freq, 0) -> ValueError: ...: axes is 0 but must be at least 1
transformers.patch({"model_type": "llama"}) -> TypeError: torch_rope.integrations.transformers.patch: model is of type dict but must be a
    loaded model, such as AutoModelForCausalLM.from_pretrained(...) returns
transformers.patch(nn.Linear(2, 2)) -> ValueError: Linear is not patched: no module of it calls a rotary function
diffusers.patch(nn.Linear(2, 2), rounding="exact") -> ValueError: ...: rounding is 'exact' but must be "eager" or "once"
diffusers.patch(nn.Linear(2, 2), fuse="yes") -> TypeError: ...: fuse is 'yes' but must be True or False
transformers.patch(of("diffusers")) -> ValueError: ...: model is of type Model, a model of diffusers; pass it to
    torch_rope.integrations.diffusers.patch
diffusers.patch(of("transformers")) -> ValueError: ...: model is of type Model, a model of transformers; pass it to
    torch_rope.integrations.transformers.patch
"""
CASES = re.findall(r"(.+) -> (TypeError|ValueError): (.+)", re.sub(r"\n +", " ", TABLE))


def run(usage: str):
    """Runs a usage. It may use the names below, and those of this module."""
    rope, freq, ints = RotaryEmbedding(16), torch.ones(8), torch.arange(3)
    cos, sin = torch_rope.cos_sin(ints, freq)
    q, k = torch.zeros(2, 3, 4, 16), torch.zeros(2, 3, 1, 16)

    def positions_of(cu_seqlens, total=9, *offsets):
        return torch_rope.positions_from_cu_seqlens(torch.tensor(cu_seqlens), total, *offsets)

    def of(library):
        return type("Model", (nn.Linear,), {"__module__": f"{library}.models"})(2, 2)

    return eval(usage, globals() | locals())


def message_of(function, *args, **kwargs) -> str:
    try:
        return f"no error, but {function(*args, **kwargs)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    for usage, *_ in CASES:
        print(usage, message_of(run, usage), sep="\n    ")
    import test_errors

    for [case] in (param.values for param in test_errors.CASES + test_errors.OVERLAPS + test_errors.RANGES):
        op, arguments, _ = next(test_errors.calls(case, "cpu"))
        print(f"{case.operators}: {case.changes}", message_of(op, **arguments), sep="\n    ")
