"""torch_rope against every other implementation: python -m benchmarks run | table | plot | compare."""
