"""Rotary position embedding for PyTorch: the operators ``torch.ops.rope.*``, and functions that call them."""

from . import _inductor_slices, _register, frequencies, multimodal  # noqa: F401
from ._decompositions import decompositions
from .functional import (
    axial_cos_sin,
    cos_sin,
    inv_freq,
    norm_rotate_qk,
    norm_rotate_qk_,
    rotate,
    rotate_,
    rotate_into_cache_,
    rotate_qk,
    rotate_qk_,
)
from .module import RotaryEmbedding
from .positions import positions_from_cu_seqlens, slots_of_window

__all__ = [
    "RotaryEmbedding",
    "axial_cos_sin",
    "cos_sin",
    "decompositions",
    "frequencies",
    "inv_freq",
    "multimodal",
    "norm_rotate_qk",
    "norm_rotate_qk_",
    "positions_from_cu_seqlens",
    "rotate",
    "rotate_",
    "rotate_into_cache_",
    "rotate_qk",
    "rotate_qk_",
    "slots_of_window",
]
__version__ = "0.2.0"
