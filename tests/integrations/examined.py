"""The fixture that lets each rotary function be examined once, which the conftest files of two folders import."""

import copy

import pytest
import torch

examined = {}  # what was found out about each function


@pytest.fixture
def examine_once(monkeypatch):
    """Lets each rotary function be examined once for all tests, because that takes most of the time of patch."""
    from torch_rope.integrations import _conventions, transformers

    def once(examine):
        def examine_or_copy(self, function):
            # Functions that are defined inside of a method are made again for each model.
            code = function if function.__closure__ else function.__code__
            key = type(self), code, self.rounding, torch.get_default_dtype()
            if key not in examined:
                examined[key] = examine(self, function)
            new = copy.copy(examined[key])
            new.rotator = copy.copy(new.rotator)
            return new

        return examine_or_copy

    for rebuilder in (_conventions.ConventionRebuilder, transformers.methods.Rebuilder):
        monkeypatch.setattr(rebuilder, "_examine", once(rebuilder._examine))
