"""What ``kernels.LocalLayerRepository`` loads: a module with ``layers``."""

from torch_rope.integrations import transformers as layers  # noqa: F401
