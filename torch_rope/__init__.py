"""Rotary position embedding for PyTorch: the operators ``torch.ops.rope.*``, and functions that call them."""

from pathlib import Path

import torch


def _require_matching_torch() -> None:
    """Raises ImportError if the extension was built for another release of torch: loading it would crash."""
    record = Path(__file__).with_name("built_for_torch.txt")
    if not record.exists():
        raise ImportError(
            f"torch_rope in {record.parent} is not built. Build it with "
            "`pip install --no-build-isolation -e .` in its source folder. If torch_rope is also installed elsewhere, "
            "start Python in another folder to use that one."
        )
    built_for = record.read_text().strip()
    if built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(
            f"torch_rope was built for torch {built_for} and this is torch {torch.__version__}. Install the wheel for "
            "this torch, or build again with `pip install --no-build-isolation --no-deps --force-reinstall .` in the "
            "source folder."
        )


_require_matching_torch()

from torch_rope import _C, _register, frequencies, multimodal  # noqa: E402, F401  _C registers the operators
from torch_rope.functional import (  # noqa: E402
    axial_cos_sin,
    cos_sin,
    inv_freq,
    norm_rotate_qk,
    rotary_embedding,
    rotate,
    rotate_,
    rotate_into_cache,
    rotate_qk,
    rotate_qk_,
)
from torch_rope.module import RotaryEmbedding  # noqa: E402
from torch_rope.multimodal import positions_from_cu_seqlens  # noqa: E402

__all__ = [
    "RotaryEmbedding",
    "axial_cos_sin",
    "cos_sin",
    "frequencies",
    "inv_freq",
    "multimodal",
    "norm_rotate_qk",
    "positions_from_cu_seqlens",
    "rotary_embedding",
    "rotate",
    "rotate_",
    "rotate_into_cache",
    "rotate_qk",
    "rotate_qk_",
]
__version__ = "0.2.0"
