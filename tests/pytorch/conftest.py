import pytest


@pytest.fixture
def _nothing_compiled():
    """Takes no compiled program from an earlier test or from the cache on disk.

    The key of that cache does not depend on this library's code.
    """
    import torch

    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield
