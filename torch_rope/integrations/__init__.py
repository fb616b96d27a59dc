"""Lets models of other libraries rotate with torch_rope."""
