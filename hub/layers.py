"""The layers that the kernels package puts in place of functions and modules of transformers."""

from .integrations.transformers.hub import apply_rotary_transformers

__all__ = ["apply_rotary_transformers"]
