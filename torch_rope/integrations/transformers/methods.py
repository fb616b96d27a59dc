"""Rebuilds the methods of a model of transformers."""

import re
from collections.abc import Callable

from .. import _methods
from .rotary import RotaryFunction


class Rebuilder(_methods.Rebuilder):
    """Rebuilds the methods of one model of transformers."""

    rotary_names = re.compile("(^|_)(rotary|rope|rotate)(_|$)")
    module = "torch_rope.integrations.transformers"
    example = "AutoModelForCausalLM.from_pretrained(...)"

    def _examine(self, function: Callable) -> RotaryFunction:
        return RotaryFunction(function, self.rounding)

    def _is_left_out(self, module: str) -> bool:
        package = module.split(".")
        return package[0] == "torch" or (package[0] == "transformers" and package[1] != "models")
