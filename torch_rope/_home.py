"""The device of a module that has no tensors of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Home:
    """A device that moves as a tensor of the module would, into a new object.

    A module that is made in a mode of fake tensors may have a device that is not there when the mode has ended.
    """

    def __init__(self, device: torch.device | str | None = None):
        self.device = torch.empty(0, device=device).device

    def _tensor(self) -> Tensor:
        """Returns a tensor without elements on the device, or on the CPU if the device is not there."""
        try:
            return torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError):
            return torch.empty(0, device="cpu")

    def moved(self, fn: Callable[[Tensor], Tensor]) -> "Home":
        """Returns where a function moves the tensors of a module, that of ``nn.Module._apply``."""
        try:
            return Home(fn(self._tensor()).device)
        except NotImplementedError:  # torch copies nothing from the meta device, not even a tensor without elements
            return Home(fn(torch.empty(0, device="cpu")).device)

    def __getstate__(self) -> Any:
        """Returns a tensor, because torch.load moves it as it moves the tensors of the model, or a device if it is fake."""
        t = self._tensor()
        return {"device": t if type(t) is Tensor else t.device}

    def __setstate__(self, state: Any) -> None:
        self.device = getattr(state["device"], "device", state["device"])
