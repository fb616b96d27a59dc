"""The cos, sin and inv_freq of a module. They follow from its arguments, so they are no state, and have their own class."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._modes import as_seen, undisturbed
from .frequencies.kinds import float64, float64_range, on_device

NAMES = ("cos", "sin", "inv_freq")  # in the order of the operator's arguments
Made = tuple[Tensor | None, Tensor | None, Tensor | None]


class Sources:
    """Makes what a module rotates by, once on each device. No mode of a caller reaches the tensors.

    exact: the frequencies, float64 on the CPU: ``[rotary_dim / 2]``, or ``[2, rotary_dim / 2]`` for short and long
    sequences. device: that of the module. In a mode of fake tensors it may be one that is not there when the mode has ended.
    made: on each device cos, sin and inv_freq, of which either the first two or the last is None.
    """

    def __init__(self, exact: Tensor, max_position: int | None, device: torch.device | str | None):
        self.exact, self.max_position = exact, max_position
        self.made: dict[torch.device, Made] = {}
        self.device = torch.empty(0, device=device).device
        self.on(self.device)

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """Returns the tables or the frequencies on a device, by name. Fake tensors are not kept."""
        if (exact := as_seen(self.exact)) is not self.exact:
            made = self._make(exact, device)
        elif device in self.made:
            made = self.made[device]
        else:
            made = self.made.setdefault(device, undisturbed(self._make, exact, device))
            if self.device.type == "meta":  # a loader left the module there, and the call knows better
                self.device = device
        return {name: t for name, t in zip(NAMES, made, strict=True) if t is not None}

    def _make(self, exact: Tensor, device: torch.device) -> Made:
        """Returns cos, sin and inv_freq. Tables are ``[..., max_position, pairs]``, float32, made of float64 angles."""
        if self.max_position is None:
            return None, None, on_device(exact, device)
        positions = float64_range(self.max_position).unsqueeze(-1)
        if device.type == "meta":
            exact, positions = exact.to(device), positions.to(device)
        angle = positions * exact.unsqueeze(-2)
        return angle.cos().float().to(device), angle.sin().float().to(device), None

    def get(self, name: str) -> Tensor | None:
        """Returns cos, sin or inv_freq where the module is, or None if it has no tables."""
        if name == "inv_freq" and self.max_position is not None:
            return on_device(as_seen(self.exact), self.device)
        return self.on(self.device).get(name)

    def moved(self, fn: Callable[[Tensor], Tensor]) -> "Sources":
        """Returns itself, or another where a function moves the tensors of a module, that of ``nn.Module._apply``."""
        try:
            device = fn(self._tensor()).device
        except NotImplementedError:  # torch copies nothing from the meta device, not even a tensor without elements
            device = fn(torch.empty(0, device="cpu")).device
        return self if device == self.device else Sources(self.exact, self.max_position, device)

    def _tensor(self) -> Tensor:
        """Returns a tensor without elements on the device, or on the CPU if the device is not there."""
        try:
            return torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError):
            return torch.empty(0, device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        """Returns numbers, which nothing moves or casts, the device, and a tensor unless it is fake: torch.load moves it as
        it moves the tensors of the model, and torch.compile leaves it out where it saves what a program depends on."""
        t = self._tensor()
        device = t.device, t if type(t) is Tensor else None
        return {"exact": self.exact.tolist(), "max_position": self.max_position, "device": device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        device, t = state["device"]
        device = t.device if isinstance(t, Tensor) else device
        Sources.__init__(self, undisturbed(float64, state["exact"]), state["max_position"], device)
