"""Replaces rotary functions through transformers' own mechanism, the kernels package."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._rotary import Rotary


def kernel_mapping() -> dict:
    """Returns a mapping for ``kernels.use_kernel_mapping`` that replaces rotary functions by torch_rope.

    It replaces the functions that transformers names "rotary_pos_emb", for every mode, on "cpu", "cuda" and "mps".

    Raises:
        ImportError: kernels is not installed, or transformers does not use the installed release of it.
    """
    from kernels import LocalLayerRepository, Mode
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        raise ImportError(
            "torch_rope.integrations.transformers.kernel_mapping: kernelize would change nothing; install a release of kernels "
            f"from {import_utils.KERNELS_MIN_VERSION} on, below {import_utils.KERNELS_MAX_VERSION}"
        )
    layer = LocalLayerRepository(Path(__file__).parent.with_name("kernel"), layer_name="apply_rotary_transformers")
    modes = {Mode.TRAINING | Mode.TORCH_COMPILE: layer}  # such an entry serves every mode
    return {"rotary_pos_emb": dict.fromkeys(("cpu", "cuda", "mps"), modes)}


# kernels makes a module of a rotary function, and gives it the forward below. Its class still has the function.
_rotaries: dict[type, Rotary] = {}


@torch.compiler.assume_constant_result
def _rotary_of(kernel: Any) -> None:
    """Finds the Rotary of a class of kernels."""
    from . import LIBRARY  # which needs this module

    if kernel not in _rotaries:
        [function] = [c.cell_contents for c in kernel.forward.__closure__]
        _rotaries[kernel] = LIBRARY.rotary_of(function, kernel.kernel_layer_name, "eager")


class apply_rotary_transformers(nn.Module):  # noqa: N801  transformers' own mapping has this name
    """The layer that the kernels package puts in the place of a rotary function, with gradients.

    Raises NotImplementedError if the function is not a rotation that torch_rope supports.
    """

    can_torch_compile = has_backward = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        _rotary_of(type(self))
        return _rotaries[type(self)](q, k, cos, sin, unsqueeze_dim)
