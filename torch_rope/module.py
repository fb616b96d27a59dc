"""The rotary embedding of a model, as a module."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import frequencies
from .functional import rotate_qk


class RotaryEmbedding(nn.Module):
    """Rotates the queries and keys of an attention layer.

    ::

        rope = RotaryEmbedding(128, base=500000.0)
        rope = RotaryEmbedding(128, base=500000.0, kind="llama3", factor=8.0, original_max_position=8192)
        rope = RotaryEmbedding.from_config(config)  # a config of transformers, or a dict
        q, k = rope(q, k)  # token s has position s
        q, k = rope(q, k, offset=cache_length)  # token s has position cache_length + s
        q, k = rope(q, k, positions)  # token s has position positions[..., s]

    Args:
        head_dim: the number of channels of a head.
        base: the base of the frequencies ``base ** (-2 i / rotary_dim)``. Default: 10000.
        rotary_dim: how many channels are rotated, the first ones of each head. Default: head_dim.
        kind: the kind of the frequencies, a key of ``torch_rope.frequencies.KINDS``. The parameters of its function,
            except rotary_dim and base, are passed as keyword arguments. Default: "default".
        interleaved: if True, pairs are (2i, 2i + 1); if False, (i, i + rotary_dim / 2). Default: False.
        max_position: if given, cos and sin are looked up in tables that have a row for each position below
            max_position. The tables are float32 and made from float64 angles. If None, the kernel computes the angles,
            and positions have no upper limit.
        device: the device of the buffers. Default: PyTorch's default device.

    The buffers are ``inv_freq`` in float64 (two float32 parts on Apple GPUs), or the float32 tables ``cos`` and
    ``sin``. They follow the module to another device, but ``.to(torch.bfloat16)``, ``.half()`` and autocast do not cast
    them. They are filled again after ``to_empty``, are not in the state_dict, and keep their address (for CUDA graphs).
    FSDP1 with ``MixedPrecision(buffer_dtype=...)`` does cast them, through ``buffer.data``; the module then still
    rotates by the values that they were filled with. To use other values, assign a tensor: ``rope.inv_freq = mine``.

    A parameter or a parametrization in the place of a buffer is not cast by ``.to(torch.bfloat16)`` either. But mixed
    precision of FSDP casts a parameter, and then a call raises TypeError.

    The frequencies of LongRoPE and dynamic NTK depend on the length of the sequence, which is the highest position of
    the call plus one. If positions are in a tensor, the highest one is found on its device, and the host does not wait.
    That takes a few launches more, so a model whose layers share positions should call :meth:`angles` once for all
    layers. Keys that are in a cache keep the rotation that they were written with, as in every implementation of these
    two kinds. The module remembers no length, so each call depends on its arguments alone. transformers remembers the
    longest length for dynamic NTK: after a long sequence it rotates a shorter one, down to original_max_position, by
    the frequencies of the long one.

    Raises:
        ValueError: arguments do not fit together, or the function of ``torch_rope.frequencies`` raises it.
        TypeError: a keyword argument is none of this kind, or one that the kind needs is missing.

    A call raises the errors of :func:`torch_rope.rotate_qk`, and ValueError if q does not have head_dim channels. With
    rotary_dim, its heads may have any number of channels that is at least rotary_dim.
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        *,
        rotary_dim: int | None = None,
        kind: str = "default",
        interleaved: bool = False,
        max_position: int | None = None,
        device: torch.device | str | None = None,
        **arguments: Any,
    ):
        super().__init__()
        if kind not in frequencies.KINDS:
            known = ", ".join(map(repr, frequencies.KINDS))
            raise ValueError(f"torch_rope.RotaryEmbedding: kind is {kind!r} but must be one of {known}")
        if kind == "dynamic" and max_position is not None:
            raise ValueError(
                f"torch_rope.RotaryEmbedding: max_position is {max_position} but must be None for kind 'dynamic', "
                "whose angles change with the length of the sequence, so that no table can hold them; omit max_position"
            )
        if max_position is not None and max_position < 1:
            raise ValueError(f"torch_rope.RotaryEmbedding: max_position is {max_position} but must be at least 1")
        if not isinstance(head_dim, int) or head_dim < 1:
            raise ValueError(f"torch_rope.RotaryEmbedding: head_dim is {head_dim!r} but must be a positive integer")
        self._rotates_all = rotary_dim is None
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        function = frequencies.KINDS[kind]
        parameters = dict([*inspect.signature(function).parameters.items()][1:])  # without rotary_dim
        if unknown := [name for name in arguments if name not in parameters]:
            raise TypeError(
                f"torch_rope.RotaryEmbedding: {unknown[0]} is given but must not be, because kind {kind!r} takes only "
                f"{', '.join(parameters)}"
            )
        needed = [name for name, p in parameters.items() if p.default is p.empty and name != "base"]
        if missing := [name for name in needed if name not in arguments]:
            raise TypeError(
                f"torch_rope.RotaryEmbedding: {missing[0]} is missing but must be given, because kind {kind!r} needs "
                f"{', '.join(needed)}"
            )
        inv_freq, self.attention_factor = function(rotary_dim, base, **arguments)
        if 2 * len(inv_freq) > head_dim:
            wrong = f"rotary_dim is {rotary_dim} but must be at most head_dim, which is {head_dim}"
            if rotary_dim == head_dim:
                wrong = f"head_dim is {head_dim} but must be even to rotate all channels; or pass a smaller rotary_dim"
            raise ValueError(f"torch_rope.RotaryEmbedding: {wrong}")
        self.head_dim, self.rotary_dim, self.base, self.kind = head_dim, 2 * len(inv_freq), base, kind
        self.arguments, self.interleaved, self.max_position = arguments, interleaved, max_position
        # The length of the sequence above which the angles change; None if they never do.
        self._changes_above = arguments["original_max_position"] if kind in ("dynamic", "longrope") else None
        if kind == "dynamic":
            self._exponent = -2 / (rotary_dim - 2)
        if kind == "longrope":
            if max_position is not None and max_position <= self._changes_above:
                self._changes_above = None
            else:
                inv_freq = torch.stack([inv_freq, function(rotary_dim, base, **arguments, long=True)[0]])
        # The frequencies that the buffers are filled from, float64 on the CPU: [rotary_dim / 2], or [2, rotary_dim / 2]
        # for short and long sequences.
        self._inv_freq = inv_freq
        self._names = ("inv_freq",) if max_position is None else ("cos", "sin")
        # The name of each buffer that was filled -> (the buffer, another tensor of the same memory).
        self._filled: dict[str, tuple[Tensor, Tensor]] = {}
        self._fill(torch.empty(0).device if device is None else torch.device(device), *self._names)

    @classmethod
    def from_config(
        cls,
        config: Any,
        layer_type: str | None = None,
        *,
        interleaved: bool | None = None,
        max_position: int | None = None,
        device: torch.device | str | None = None,
    ) -> "RotaryEmbedding":
        """Returns the rotary embedding of a model, described by its config.

        Args:
            config, layer_type: as in :func:`torch_rope.frequencies.from_config`.
            interleaved: the pairing. Default: the one that belongs to the model_type of the config.
            max_position, device: as in the constructor.

        The head_dim of the result is the number of rotated channels. The heads of q and k may have more channels.

        Raises the errors of :func:`torch_rope.frequencies.from_config` and of the constructor.
        """
        kind, arguments = frequencies.parse(config, layer_type)
        rotary_dim = arguments.pop("head_dim" if kind == "proportional" else "rotary_dim")
        return cls(
            rotary_dim + rotary_dim % 2,
            rotary_dim=rotary_dim,
            kind=kind,
            interleaved=frequencies.is_interleaved(config) if interleaved is None else interleaved,
            max_position=max_position,
            device=device,
            **arguments,
        )

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None, offset: int | torch.SymInt = 0
    ) -> tuple[Tensor, Tensor]:
        """Returns q and k, rotated.

        Args:
            q, k: ``[seq, heads, head_dim]`` or ``[batch, seq, heads, head_dim]``, as in :func:`torch_rope.rotate_qk`.
            positions, offset: as in :func:`torch_rope.rotate_qk`. If q and k are DTensors and positions is a plain
                tensor, it must hold the positions of all ranks.
        """
        shape = q.shape
        if self._rotates_all and len(shape) > 2 and shape[-1] != self.head_dim:
            raise ValueError(
                f"torch_rope.RotaryEmbedding: q has head_dim {shape[-1]} but must have head_dim {self.head_dim}, as "
                f"the module has; to rotate only the first channels of a head, make it with rotary_dim={self.head_dim}"
            )
        seq = shape[-3] if len(shape) > 2 else 0  # rotate_qk says what is wrong
        return rotate_qk(q, k, **_distributed_like(q, self.angles(seq, positions, offset)))

    def angles(self, seq: int, positions: Tensor | None = None, offset: int | torch.SymInt = 0) -> dict[str, Any]:
        """Returns the angles of seq tokens, as keyword arguments of :func:`torch_rope.rotate_qk`.

        rotate_qk with these arguments does what calling the module does. The other operators take them as well.
        """
        angles = {"positions": positions, "offset": offset}
        angles |= {"attention_factor": self.attention_factor, "interleaved": self.interleaved}
        buffers = {name: self._exact(name) for name in self._names}
        if self._changes_above is None:
            return angles | buffers
        length = self._length(seq, positions, offset)
        if self.kind == "dynamic":
            return angles | {"inv_freq": self._dynamic(buffers["inv_freq"], length)}
        long = length > self._changes_above
        if not isinstance(long, Tensor):
            return angles | {name: short_and_long[1 if long else 0] for name, short_and_long in buffers.items()}
        if self.max_position is None:
            short_freq, long_freq = buffers["inv_freq"]
            return angles | {"inv_freq": torch.where(long, long_freq, short_freq)}
        # The long table follows the short one, so max_position is added to look up a row of the long table. A negative
        # position stays negative, so that the operator raises an error.
        angles["positions"] = positions + self.max_position * (long & (positions + offset >= 0))
        return angles | {name: short_and_long.flatten(0, 1) for name, short_and_long in buffers.items()}

    @staticmethod
    def _length(seq: int, positions: Tensor | None, offset: int | torch.SymInt) -> int | torch.SymInt | Tensor:
        """Returns the highest position plus one. If positions are in a tensor, so is the result, on the same device."""
        if positions is None:
            return offset + seq
        if not (seq and len(positions)):
            return 0
        if _mesh(positions) is not None:
            positions = positions.full_tensor()  # no rank has all of them
        return positions.amax() + (offset + 1)

    def _dynamic(self, inv_freq: Tensor, length: int | torch.SymInt | Tensor) -> Tensor:
        """Returns the frequencies of frequencies.dynamic for this length, computed on the device of inv_freq."""
        if not isinstance(length, Tensor):
            if length <= self._changes_above:
                return inv_freq
            if inv_freq.dim() == 2 and self._is_filled("inv_freq"):  # two parts, because the device has no float64
                return frequencies.in_two_parts(self._dynamic(self._inv_freq, length)).to(inv_freq.device)
            length = torch.full((), length, dtype=inv_freq.dtype, device=inv_freq.device)
        factor = self.arguments["factor"]
        s = (factor * length.to(inv_freq.dtype) / self._changes_above - (factor - 1)).clamp(min=1.0)
        # 0, 1, 2, ... times the exponent. ones_like makes a DTensor if inv_freq is a DTensor.
        exponents = (torch.ones_like(inv_freq).cumsum(-1) - 1) * self._exponent
        return inv_freq * s**exponents

    # -- buffers --

    def _new_buffers(self, device: torch.device) -> dict[str, Tensor]:
        """Returns new buffers on a device, by name."""
        if self.max_position is None:
            rows = [frequencies.on_device(row, device) for row in self._inv_freq.view(-1, self._inv_freq.shape[-1])]
            buffers = [torch.stack(rows) if self._inv_freq.dim() == 2 else rows[0].clone()]
        else:
            shape = (*self._inv_freq.shape[:-1], self.max_position, self._inv_freq.shape[-1])
            buffers = [torch.empty(shape, dtype=torch.float32, device=device) for _ in self._names]
            step = 1 << 16  # rows at a time: the angles of all rows would need twice the memory of the tables
            for first in range(0, 0 if device.type == "meta" else self.max_position, step):
                rows = torch.arange(first, min(first + step, self.max_position), dtype=torch.float64, device="cpu")
                angle = rows.unsqueeze(-1) * self._inv_freq.unsqueeze(-2)
                for buffer, values in zip(buffers, (angle.cos(), angle.sin()), strict=True):
                    buffer.narrow(-2, first, len(rows)).copy_(values.float())
        return dict(zip(self._names, buffers, strict=True))

    @torch.inference_mode(False)  # training may follow
    def _fill(self, device: torch.device, *names: str) -> None:
        """Makes these buffers on a device."""
        new = self._new_buffers(device)
        for name in names:
            self.register_buffer(name, new[name], persistent=False)
            self._keep(name)

    def _keep(self, name: str) -> None:
        """Remembers the memory of a buffer that has its values now."""
        buffer = self._buffers[name]
        self._filled[name] = buffer, buffer.detach()

    def _is_filled(self, name: str) -> bool:
        """Returns whether the buffer is the one that was filled, and no parameter, DTensor or tensor of the user."""
        return name in self._filled and self._buffers.get(name) is self._filled[name][0]

    def _exact(self, name: str) -> Tensor:
        """Returns a buffer with the values that it was filled with, whatever ``buffer.data`` has become since."""
        if not self._is_filled(name):
            return getattr(self, name)
        buffer, exact = self._filled[name]
        if exact.device != buffer.device:  # FSDP1 has moved it
            self._fill(buffer.device, name)
            exact = self._filled[name][1]
        return exact

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        """Moves the tensors of the module to another device or to shared memory, and never casts them.

        PyTorch calls this method in ``to``, ``half``, ``cuda``, ``to_empty``, ``share_memory`` and so on, with a
        function fn for every tensor of the module. fn may cast floating-point tensors, so it gets integers of the same
        memory. In ``type`` it casts these too; then only its device counts.
        """

        def move(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return fn(t)
            integers = _integers(t)
            moved = fn(integers)
            return (moved if moved.dtype == integers.dtype else integers.to(moved.device)).view(t.dtype)

        filled = {name: self._buffers.pop(name) for name in self._names if self._is_filled(name)}
        on_meta = [name for name in self._names if getattr(self._buffers.get(name), "is_meta", False)]
        try:
            super()._apply(move, recurse)
        finally:
            self._buffers.update(filled)
        if any(not self._buffers[name].is_meta for name in on_meta):  # a DTensor got memory
            self.reset_parameters()
        # Values do not follow to a device without float64, nor through to_empty, so buffers that move are filled again.
        # No element is copied for that, but the memory is shared if fn shares it.
        there = {name: fn(_integers(buffer)[:0]).device for name, buffer in filled.items()}
        if moved := [name for name, device in there.items() if device != filled[name].device]:
            self._fill(there[moved[0]], *moved)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Fills a buffer when a tensor with memory replaces it on the meta device.

        A loader that gives memory to a module on the meta device, such as that of transformers, has no values for the
        buffers, because they are not in the state_dict.
        """
        buffer = self.__dict__.get("_buffers", {}).get(name)
        super().__setattr__(name, value)
        if buffer is not None and buffer.is_meta and name in self._buffers and value is not None and not value.is_meta:
            self._fill(value.device, name)

    def __delattr__(self, name: str) -> None:
        self.__dict__.get("_filled", {}).pop(name, None)
        super().__delattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy and for pickle, in which the memory of a buffer occurs once."""
        exact = {name: self._exact(name) for name in self._names if self._is_filled(name)}
        return {**self.__dict__, "_buffers": {**self._buffers, **exact}, "_filled": dict.fromkeys(exact)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in self._filled:
            self._keep(name)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fills the buffers in place, as FSDP expects of a module that has been on the meta device."""
        for name, values in self._new_buffers(self._exact(self._names[0]).device).items():
            buffer = self._exact(name)
            (buffer if _mesh(buffer) is None else buffer.to_local()).copy_(values)

    def extra_repr(self) -> str:
        shown = {"base": self.base, "rotary_dim": self.rotary_dim, "kind": self.kind, **self.arguments}
        shown |= {"interleaved": self.interleaved, "max_position": self.max_position}
        # The lists of LongRoPE are too long to show.
        shown = {name: value for name, value in shown.items() if not isinstance(value, list | tuple)}
        return ", ".join([str(self.head_dim), *(f"{name}={value!r}" for name, value in shown.items())])


def _integers(t: Tensor) -> Tensor:
    """Returns the memory of t as a tensor of integers."""
    return t.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def _mesh(t: Tensor) -> Any:
    """Returns the mesh of a DTensor, or None for any other tensor."""
    return getattr(t, "device_mesh", None)


def _distributed_like(q: Tensor, angles: dict[str, Any]) -> dict[str, Any]:
    """Returns angles in the form that an operator takes together with q.

    An operator takes either plain tensors or DTensors. So if q is a DTensor, each plain tensor in angles, which must be
    the same on every rank, becomes a replicated DTensor.
    """
    mesh = _mesh(q)
    if mesh is None:
        return angles
    from torch.distributed.tensor import DTensor

    positions = angles["positions"]
    if positions is not None and _mesh(positions) is None and positions.shape[-1] != q.shape[-3]:
        raise ValueError(
            f"torch_rope.RotaryEmbedding: positions is a plain tensor of shape {list(positions.shape)} but must have "
            f"the positions of all {q.shape[-3]} tokens of the DTensor q; or pass a DTensor, made of the positions "
            "that each rank has: DTensor.from_local(positions, mesh, [Shard(-1)])"
        )
    return {
        name: DTensor.from_local(a, mesh, run_check=False) if isinstance(a, Tensor) and _mesh(a) is None else a
        for name, a in angles.items()
    }
