"""The frequencies of real models: one function for each kind, and :func:`from_config` for the config of a model.

Each function returns :class:`Frequencies`: inv_freq, which :func:`torch_rope.rotate` and :func:`torch_rope.cos_sin`
take (float64, on the CPU, in radians per position), and attention_factor, which they take as the argument of that name.

In the formulas below, ``f[i] = base ** (-2 i / rotary_dim)`` for i = 0, 1, ... while 2 i < rotary_dim (Su et al.,
RoFormer, arXiv:2104.09864). Each kind changes f.

rotary_dim is the number of channels of a head that are rotated (:func:`partial_rotary_dim`). It is even in every known
model. If it is odd, there are (rotary_dim + 1) / 2 frequencies, so rotary_dim + 1 channels are rotated, while the
exponent keeps the odd number: transformers does the same.

The parameters of other engines translate like this:

- ggml: ``freq_scale`` multiplies the angle, so use ``linear(rotary_dim, base, factor=1 / freq_scale)``. MLX calls it
  ``scale``.
- MLX: ``freqs`` holds what the position is divided by, and replaces base: ``inv_freq = scale / freqs``.
- ggml: ``freq_factors`` (rope_freqs.weight in a GGUF file, for llama3 and longrope) divides the frequencies that base
  gives: ``default(rotary_dim, base).inv_freq / freq_factors``.
"""

from .config import from_config, is_interleaved, parse, rotates
from .kinds import (
    KINDS,
    Frequencies,
    default,
    dynamic,
    has_float64,
    in_two_parts,
    linear,
    llama3,
    longrope,
    ntk,
    partial_rotary_dim,
    proportional,
    yarn,
)

__all__ = [
    "KINDS", "Frequencies", "default", "dynamic", "from_config", "has_float64", "in_two_parts", "is_interleaved",
    "linear", "llama3", "longrope", "ntk", "parse", "partial_rotary_dim", "proportional", "rotates", "yarn",
]  # fmt: skip
