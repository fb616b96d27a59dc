"""The rotary embedding of a model, as a module."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_rope import frequencies
from torch_rope.families import INTERLEAVED, ROPE_INTERLEAVE
from torch_rope.functional import rotate_qk


class RotaryEmbedding(nn.Module):
    """Rotates the queries and keys of an attention layer.

    ::

        rope = RotaryEmbedding(128, base=500000.0)
        rope = RotaryEmbedding(128, base=500000.0, kind="llama3", factor=8.0, original_max_position=8192)
        rope = RotaryEmbedding.from_config(config)  # of transformers, or a dict
        q, k = rope(q, k)  # token s is at position s
        q, k = rope(q, k, offset=cache_length)
        q, k = rope(q, k, positions)

    Args:
        head_dim: channels of a head.
        base: of the frequencies, ``base ** (-2 i / rotary_dim)``.
        rotary_dim: how many channels are rotated, the first of each head; all of them unless said.
        kind: of the frequencies, a key of ``torch_rope.frequencies.KINDS``. What its function takes beside rotary_dim
            and base is given as keyword arguments.
        interleaved: pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        max_position: look up cos and sin of the positions below it in tables: float32, from angles in float64. Without
            it the angle is computed in the kernel, and there is no longest position.
        device: of the buffers.

    The buffers, frequencies in float64 (float32 on Apple GPUs) or float32 tables, follow the
    module to another device, but nothing casts them: not ``.to(torch.bfloat16)``, not ``.half()``, not autocast. They are
    filled again after ``to_empty``, are not in the state_dict, and keep their address (CUDA graphs).

    LongRoPE and dynamic NTK choose by the length: the highest position of the call plus one. In a tensor it is looked for
    on its device, which nothing waits for. Those are a few launches more: a model whose layers share positions calls
    :meth:`angles` once for all. Keys in a cache stay as they were rotated, as in any implementation of these two.

    Raises ValueError for arguments that do not fit together, and what ``frequencies`` and :func:`torch_rope.rotate_qk` do.
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
            raise ValueError(f"torch_rope.RotaryEmbedding: kind is {kind!r}, needs one of {known}")
        if kind == "dynamic" and max_position is not None:
            raise ValueError(
                "torch_rope.RotaryEmbedding: kind is 'dynamic' and there is a max_position, but its angles change with "
                "the length, so no table holds them; leave max_position out"
            )
        if max_position is not None and max_position < 1:
            raise ValueError(f"torch_rope.RotaryEmbedding: max_position is {max_position}, needs a positive number")
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        function = frequencies.KINDS[kind]
        inv_freq, self.attention_factor = function(rotary_dim, base, **arguments)
        if 2 * len(inv_freq) > head_dim:
            raise ValueError(
                f"torch_rope.RotaryEmbedding: rotary_dim is {rotary_dim}, needs at most head_dim, which is {head_dim}"
            )
        self.head_dim, self.rotary_dim, self.base, self.kind = head_dim, 2 * len(inv_freq), base, kind
        self.arguments, self.interleaved, self.max_position = arguments, interleaved, max_position
        # The length above which the angles are others.
        self._changes_above = arguments["original_max_position"] if kind in ("dynamic", "longrope") else None
        if kind == "dynamic":
            self._exponent = -2 / (rotary_dim - 2)
        if kind == "longrope":
            if max_position is not None and max_position <= self._changes_above:
                self._changes_above = None
            else:
                inv_freq = torch.stack([inv_freq, function(rotary_dim, base, **arguments, long=True)[0]])
        # What the buffers are filled from, float64 on the CPU. [rotary_dim / 2], or [2, rotary_dim / 2]: short and long.
        self._inv_freq = inv_freq
        self._names = ("inv_freq",) if max_position is None else ("cos", "sin")
        self._fill(torch.empty(0).device if device is None else torch.device(device))

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
        """That of a model, from a config of transformers or a dict as :func:`torch_rope.frequencies.from_config` reads it.

        The pairing follows from model_type, unless interleaved says it. head_dim is as large as the rotated channels
        need: heads may have more.
        """
        kind, arguments = frequencies.parse(config, layer_type)
        rotary_dim = arguments.pop("head_dim" if kind == "proportional" else "rotary_dim")
        return cls(
            rotary_dim + rotary_dim % 2,
            rotary_dim=rotary_dim,
            kind=kind,
            interleaved=_is_interleaved(config) if interleaved is None else interleaved,
            max_position=max_position,
            device=device,
            **arguments,
        )

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None, offset: int | torch.SymInt = 0
    ) -> tuple[Tensor, Tensor]:
        """q and k rotated: ``[seq, heads, head_dim]`` or ``[batch, seq, heads, head_dim]``, positions and offset as in
        :func:`torch_rope.rotate_qk`. Beside q and k that are DTensors, positions in a plain tensor are those of all ranks."""
        return rotate_qk(q, k, **_beside(q, self.angles(q.shape[-3], positions, offset)))

    def angles(self, seq: int, positions: Tensor | None = None, offset: int | torch.SymInt = 0) -> dict[str, Any]:
        """The keyword arguments of :func:`torch_rope.rotate_qk` for seq tokens at these positions: with them it does what
        forward does, and so do the other operators."""
        angles = {"positions": positions, "offset": offset}
        angles |= {"attention_factor": self.attention_factor, "interleaved": self.interleaved}
        buffers = {name: getattr(self, name) for name in self._names}
        if self._changes_above is None:
            return angles | buffers
        length = self._length(seq, positions, offset)
        if self.kind == "dynamic":
            return angles | {"inv_freq": self._dynamic(length)}
        long = length > self._changes_above
        if not isinstance(long, Tensor):
            return angles | {name: short_and_long[1 if long else 0] for name, short_and_long in buffers.items()}
        if self.max_position is None:
            return angles | {"inv_freq": torch.where(long, self.inv_freq[1], self.inv_freq[0])}
        # One table after the other. A negative position stays one, for the operator to refuse.
        angles["positions"] = positions + self.max_position * (long & (positions + offset >= 0))
        return angles | {name: short_and_long.flatten(0, 1) for name, short_and_long in buffers.items()}

    @staticmethod
    def _length(seq: int, positions: Tensor | None, offset: int | torch.SymInt) -> int | torch.SymInt | Tensor:
        """The highest position plus one, with positions in a tensor on their device."""
        if positions is None:
            return offset + seq
        if not (seq and len(positions)):
            return 0
        if _mesh(positions) is not None:
            positions = positions.full_tensor()  # no rank has them all
        return positions.amax() + (offset + 1)

    def _dynamic(self, length: int | torch.SymInt | Tensor) -> Tensor:
        """The frequencies of frequencies.dynamic for this length, on the device."""
        if not isinstance(length, Tensor):
            if length <= self._changes_above:
                return self.inv_freq
            length = torch.full((), length, dtype=self.inv_freq.dtype, device=self.inv_freq.device)
        factor = self.arguments["factor"]
        s = (factor * length.to(self.inv_freq.dtype) / self._changes_above - (factor - 1)).clamp(min=1.0)
        exponents = (torch.ones_like(self.inv_freq).cumsum(0) - 1) * self._exponent  # a DTensor where inv_freq is one
        return self.inv_freq * s**exponents

    # -- buffers --

    def _made(self, device: torch.device) -> dict[str, Tensor]:
        """The buffers on a device."""
        if self.max_position is None:
            try:
                buffers = [self._inv_freq.to(device, copy=True)]
            except TypeError:  # it has no float64
                buffers = [self._inv_freq.float().to(device)]
        else:
            shape = (*self._inv_freq.shape[:-1], self.max_position, self._inv_freq.shape[-1])
            buffers = [torch.empty(shape, dtype=torch.float32, device=device) for _ in self._names]
            some = 1 << 16  # rows at a time: the angles of all would need twice the memory of the tables
            for first in range(0, 0 if device.type == "meta" else self.max_position, some):
                rows = torch.arange(first, min(first + some, self.max_position), dtype=torch.float64, device="cpu")
                angle = rows.unsqueeze(-1) * self._inv_freq.unsqueeze(-2)
                for buffer, values in zip(buffers, (angle.cos(), angle.sin()), strict=True):
                    buffer.narrow(-2, first, len(rows)).copy_(values.float())
        return dict(zip(self._names, buffers, strict=True))

    def _fill(self, device: torch.device) -> None:
        for name, made in self._made(device).items():
            self.register_buffer(name, made, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        """What ``to``, ``half``, ``cuda``, ``to_empty`` and the like call for every tensor of a module. Ours take only the
        device from it, which fn tells by what it does to an integer."""
        own = {name: self._buffers.pop(name) for name in self._names if name in self._buffers}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(own)
        for here in {t.device for t in own.values()}:
            there = fn(torch.empty(0, dtype=torch.uint8, device=here)).device
            if there != here:
                self._fill(there)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """A loader that gives a module on the meta device its memory, as transformers', has no values for the buffers."""
        buffer = self.__dict__.get("_buffers", {}).get(name)
        super().__setattr__(name, value)
        if buffer is not None and buffer.is_meta and isinstance(value, Tensor) and not value.is_meta:
            value.copy_(self._made(value.device)[name])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fills the buffers where they are, as FSDP expects of a module that has been on the meta device."""
        for name, made in self._made(getattr(self, self._names[0]).device).items():
            buffer = getattr(self, name)
            (buffer if _mesh(buffer) is None else buffer.to_local()).copy_(made)

    def extra_repr(self) -> str:
        said = {"base": self.base, "rotary_dim": self.rotary_dim, "kind": self.kind, **self.arguments}
        said |= {"interleaved": self.interleaved, "max_position": self.max_position}
        said = {name: value for name, value in said.items() if not isinstance(value, list | tuple)}  # of LongRoPE
        return ", ".join([str(self.head_dim), *(f"{name}={value!r}" for name, value in said.items())])


def _mesh(t: Tensor) -> Any:
    """Of a DTensor; None of any other."""
    return getattr(t, "device_mesh", None)


def _beside(q: Tensor, angles: dict[str, Any]) -> dict[str, Any]:
    """angles as an operator takes them with q: beside a DTensor all tensors are DTensors, ours the same on every rank."""
    mesh = _mesh(q)
    if mesh is None:
        return angles
    from torch.distributed.tensor import DTensor

    positions = angles["positions"]
    if positions is not None and _mesh(positions) is None and positions.shape[-1] != q.shape[-3]:
        raise ValueError(
            f"torch_rope.RotaryEmbedding: positions is a plain tensor {list(positions.shape)} and q, a DTensor, has seq "
            f"{q.shape[-3]}; needs the positions of all tokens, or a DTensor of those that each rank has: "
            "DTensor.from_local(positions, mesh, [Shard(-1)])"
        )
    return {
        name: DTensor.from_local(a, mesh, run_check=False) if isinstance(a, Tensor) and _mesh(a) is None else a
        for name, a in angles.items()
    }


def _is_interleaved(config: Any) -> bool:
    def get(name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    if get("text_config") is not None:
        return _is_interleaved(get("text_config"))
    kind = get("model_type")
    return kind in INTERLEAVED and not (kind in ROPE_INTERLEAVE and get("rope_interleave") is False)
