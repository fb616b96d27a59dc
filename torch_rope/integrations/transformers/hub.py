"""Replaces rotary functions through transformers' own mechanism, the kernels package."""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from .rotary import RotaryFunction


def kernel_mapping() -> dict:
    """Returns a mapping for ``kernels.use_kernel_mapping`` that replaces rotary functions by torch_rope.

    It replaces the functions that transformers names "rotary_pos_emb", for every mode, on "cpu", "cuda" and "mps"::

        with kernels.use_kernel_mapping(kernel_mapping()):
            kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu")

    Nothing is downloaded. The kernels package replaces a function for all models of its modeling file, until the next
    ``kernelize`` of one of them. Functions without that name stay as they are; :func:`patch` replaces them too.
    :func:`patch` also examines the tables of the rotary module, which a kernel does not see.

    Raises:
        ImportError: kernels is not installed, or transformers does not use the installed release of it.
    """
    from kernels import LocalLayerRepository, Mode
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        raise ImportError(
            "torch_rope.integrations.transformers.kernel_mapping: transformers does not use the installed release of "
            "kernels, so kernelize would change nothing; install a release of kernels from "
            f"{import_utils.KERNELS_MIN_VERSION} on, below {import_utils.KERNELS_MAX_VERSION}"
        )
    layer = LocalLayerRepository(
        Path(__file__).parent.with_name("kernel"), layer_name=apply_rotary_transformers.__name__
    )
    modes = (Mode.INFERENCE, Mode.TRAINING)
    modes += tuple(mode | Mode.TORCH_COMPILE for mode in modes)
    return {"rotary_pos_emb": {device: dict.fromkeys(modes, layer) for device in ("cpu", "cuda", "mps")}}


class apply_rotary_transformers(nn.Module):  # noqa: N801  transformers' own mapping has this name
    """The layer that the kernels package substitutes for a rotary function.

    kernels makes a module from the rotary function and gives it this forward. So ``type(self)`` in forward is the
    module's class, by which forward finds out what the original function does. forward raises NotImplementedError if
    the function is not a rotation that torch_rope supports.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return _under_kernels[_under_kernel(type(self))](q, k, cos, sin, unsqueeze_dim)


_kernels: list[type[nn.Module]] = []
_under_kernels: list[Callable] = []


@torch.compiler.assume_constant_result  # the constant is an index, because a function cannot be a constant
def _under_kernel(kernel: type[nn.Module]) -> int:
    """Returns the index in _under_kernels of the replacement for the function that this module class was made from."""
    if kernel not in _kernels:
        # The module has no state, so self may be None.
        function = RotaryFunction(functools.partial(kernel.forward, None))
        _under_kernels.append(function.replacement(kernel.kernel_layer_name))
        _kernels.append(kernel)
    return _kernels.index(kernel)
