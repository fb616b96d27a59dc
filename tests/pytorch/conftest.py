import pytest


@pytest.fixture
def _nothing_compiled():
    """Nothing compiled is taken from an earlier test, or from a cache on disk: its key knows nothing of this library."""
    import torch

    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield
