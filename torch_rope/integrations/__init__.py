"""torch_rope under models that others wrote."""
