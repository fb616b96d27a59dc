"""Compares torch_rope with other implementations of rotary position embedding: python -m benchmarks --help."""
