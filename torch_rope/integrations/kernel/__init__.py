"""The module that ``kernels.LocalLayerRepository`` loads. It must have an attribute ``layers``."""

from torch_rope.integrations import transformers as layers  # noqa: F401
