"""Rotary position embedding for PyTorch: ``torch.ops.rope.*`` and thin documented functions over them."""

from pathlib import Path

import torch


def _require_matching_torch() -> None:
    """The library is built for one torch release; another one would crash while it loads, so look first."""
    record = Path(__file__).with_name("built_for_torch.txt")
    if not record.exists():
        raise ImportError(
            f"torch_rope in {record.parent} is not built: pip install --no-build-isolation -e . builds it there; "
            "or leave that folder, if torch_rope is installed elsewhere"
        )
    built_for = record.read_text().strip()
    if built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(
            f"torch_rope was built for torch {built_for} and this is torch {torch.__version__}: "
            "build it again, in its source folder: pip install --no-build-isolation --no-deps --force-reinstall ."
        )


_require_matching_torch()

from torch_rope import _C, _register, frequencies, multimodal  # noqa: E402, F401  loading _C registers the operators
from torch_rope.functional import (  # noqa: E402
    axial_cos_sin,
    cos_sin,
    inv_freq,
    norm_rotate_qk,
    rotate,
    rotate_,
    rotate_into_cache,
    rotate_qk,
    rotate_qk_,
)
from torch_rope.multimodal import positions_from_cu_seqlens  # noqa: E402
from torch_rope.rotary_embedding import RotaryEmbedding  # noqa: E402

__all__ = [
    "RotaryEmbedding",
    "axial_cos_sin",
    "cos_sin",
    "frequencies",
    "inv_freq",
    "multimodal",
    "norm_rotate_qk",
    "positions_from_cu_seqlens",
    "rotate",
    "rotate_",
    "rotate_into_cache",
    "rotate_qk",
    "rotate_qk_",
]
__version__ = "0.1.0"
