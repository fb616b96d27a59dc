"""The rotary embedding of a model, as a module."""

import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from . import frequencies
from ._mistakes import MISSING, always_called, check_tensor, shown, unknown_argument, wrong_type
from ._modes import mode_of, undisturbed
from ._sources import NAMES, Sources
from .frequencies import lengths
from .frequencies.kinds import is_rounded
from .functional import call, rotate_qk


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
        device: the device on which the frequencies are made first. Default: PyTorch's default device.

    The frequencies follow from these arguments, so nothing loads, saves, casts or shards them. They are made where the
    module or q is, and keep their address (for CUDA graphs). ``rope.inv_freq`` is a copy of them, ``[rotary_dim / 2]``,
    float64 (or in two float32 parts); ``rope.cos`` and ``rope.sin`` copy the tables, ``[max_position, rotary_dim / 2]``.

    To rotate by other values, or to learn them, assign a tensor or a parameter to inv_freq, or to cos and sin. It is used
    as it is, for every kind; it moves with the module, but is not cast. To go back, assign None. A state_dict holds a
    parameter that is assigned, and nothing else. A checkpoint may hold the module's own inv_freq, as older models do.

    The frequencies of LongRoPE and dynamic NTK depend on the length of the sequence, which is the highest position of
    the call plus one. If positions are in a tensor, it is found on their device, and the host does not wait. Keys in a
    cache keep the rotation that they were written with, so a server should fix the length: pass ``long`` (LongRoPE) or
    ``seq_len``. Unless it is fixed, inv_freq, cos and sin of LongRoPE are ``[2, ...]``, of short and of long sequences.

    Raises:
        ValueError: arguments do not fit together, inv_freq is assigned in another length, or the kind's function raises it.
        TypeError: a keyword argument is none of this kind, or one that the kind needs is missing.
        RuntimeError: a checkpoint that is loaded holds another inv_freq.

    A call raises the errors of :func:`torch_rope.rotate_qk`, and ValueError if q does not have head_dim channels; with
    rotary_dim, it may have any number that is at least rotary_dim.
    """

    @always_called
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
        kinds = ", ".join(map(repr, frequencies.KINDS))
        _require(isinstance(kind, str) and kind in frequencies.KINDS, "kind", kind, f"one of {kinds}")
        _check_names("torch_rope.RotaryEmbedding", ["head_dim"], kind, arguments)
        good = max_position is None or (isinstance(max_position, int) and 1 <= max_position < 2**63)
        _require(good, "max_position", max_position, "a positive integer below 2**63")
        good = not hasattr(interleaved, "__len__") and interleaved in (True, False)  # no array
        _require(good, "interleaved", interleaved, "True (GPT-J) or False (NeoX, half-split)")
        advice = "" if isinstance(head_dim, (Real, str)) else "; RotaryEmbedding.from_config takes a config"
        _require(isinstance(head_dim, int) and head_dim >= 1, "head_dim", head_dim, "a positive integer" + advice)
        self._rotates_all = rotary_dim is None
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        function = frequencies.KINDS[kind]
        inv_freq, self.attention_factor = undisturbed(function, rotary_dim, base, **arguments)
        if 2 * len(inv_freq) > head_dim:
            _require(rotary_dim == head_dim, "rotary_dim", rotary_dim, f"at most head_dim, which is {head_dim}")
            _require(False, "head_dim", head_dim, "even to rotate all channels; or pass a smaller rotary_dim")
        self.head_dim, self.rotary_dim, self.base, self.kind = head_dim, 2 * len(inv_freq), base, kind
        self.arguments, self.interleaved, self.max_position = arguments, interleaved, max_position
        # Chooses the frequencies for the length of the sequence; None if they are the same for all lengths.
        self._by_length: lengths.Dynamic | lengths.LongRope | None = None
        trained = arguments.get("original_max_position", 0)
        is_fixed = arguments.get("long") is not None or arguments.get("seq_len") is not None
        if kind == "dynamic" and not is_fixed:
            must_be = "None for kind 'dynamic', whose angles change with the length of the sequence; or pass seq_len"
            _require(max_position is None, "max_position", max_position, must_be)
            self._by_length = lengths.Dynamic(arguments["factor"], trained, -2 / (rotary_dim - 2))
        elif kind == "longrope" and not is_fixed and (max_position is None or max_position > trained):
            long = undisturbed(function, rotary_dim, base, **arguments | {"long": True})
            inv_freq = undisturbed(torch.stack, [inv_freq, long.inv_freq])
            self._by_length = lengths.LongRope(trained)
        self._sources = Sources(inv_freq, max_position, device)
        for name in NAMES:
            self.register_buffer(name, None, persistent=False)  # the place of a tensor that is assigned

    @classmethod
    def from_config(
        cls,
        config: Any,
        layer_type: str | None = None,
        *,
        layer: int | None = None,
        interleaved: bool | None = None,
        **arguments: Any,
    ) -> "RotaryEmbedding":
        """Returns the rotary embedding of a model, described by its config.

        Args:
            config, layer_type, layer: as in :func:`torch_rope.frequencies.from_config`.
            interleaved: the pairing. Default: the one that belongs to the model_type of the config.
            arguments: other arguments of the constructor, such as max_position, device, or ``long=True``.

        The head_dim of the result is the number of rotated channels. The heads of q and k may have more channels.

        Raises the errors of :func:`torch_rope.frequencies.from_config` and of the constructor.
        """
        kind, read = frequencies.parse(config, layer_type, layer=layer)
        if cls.__init__ is RotaryEmbedding.__init__ and (made := arguments.get("kind", kind)) in frequencies.KINDS:
            _check_names("torch_rope.RotaryEmbedding.from_config", ["config", "layer_type", "layer"], made, arguments)
        rotary_dim = read.pop("head_dim" if kind == "proportional" else "rotary_dim")
        read |= {"rotary_dim": rotary_dim, "kind": kind}
        read["interleaved"] = frequencies.is_interleaved(config) if interleaved is None else interleaved
        return cls(rotary_dim + rotary_dim % 2, **read | arguments)

    @always_called
    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor | None = None, offset: int | torch.SymInt = 0, **unknown: NoReturn
    ) -> tuple[Tensor, Tensor]:
        """Returns q and k, rotated.

        Args:
            q, k: ``[seq, heads, head_dim]`` or ``[batch, seq, heads, head_dim]``, as in :func:`torch_rope.rotate_qk`.
            positions, offset: as in :func:`torch_rope.rotate_qk`. If q and k are DTensors and positions is a plain
                tensor, it must hold the positions of all ranks.
        """
        if type(q) is not Tensor and q is not MISSING:  # before a look at unknown, which may be a Proxy, too
            check_tensor("torch_rope.RotaryEmbedding", "q", q)
        if unknown:
            raise unknown_argument("torch_rope.RotaryEmbedding", unknown, ["q", "k", "positions", "offset"])
        made, places = self._sources.made.get(q.device) if isinstance(q, Tensor) else None, self._buffers
        if (
            made is not None
            and self._by_length is None
            and type(q) is Tensor
            and q.shape[-1] == self.head_dim
            and places.get("cos", 0) is places.get("sin", 0) is places.get("inv_freq", 0) is None  # none is assigned
        ):  # the usual case, for which angles() would take 2.6 microseconds of a decode step
            cos, sin, inv_freq = made
            args = q, k, cos, sin, inv_freq, positions, offset
            return call("rotate_qk", args, (self.attention_factor, self.interleaved, False, 0, False), offset)
        check_tensor("torch_rope.RotaryEmbedding", "q", q)
        if self._rotates_all and q.dim() > 2 and q.shape[-1] != self.head_dim:
            advice = f"; to rotate only the first channels of a head, make it with rotary_dim={self.head_dim}"
            if q.shape[-1] % self.head_dim == 0:
                advice = f"; if they are all heads of a token, pass q.unflatten(-1, (-1, {self.head_dim})){advice}"
            raise ValueError(
                f"torch_rope.RotaryEmbedding: q has head_dim {q.shape[-1]} but must have head_dim {self.head_dim}, as "
                "the module has" + (advice if q.shape[-1] > self.head_dim else "")
            )
        with mode_of(q):
            angles = self.angles(q.shape[-3] if q.dim() > 2 else 0, positions, offset, q.device)
        if hasattr(q, "device_mesh"):
            from .parallel import distributed_like

            angles = distributed_like(q.device_mesh, q.shape[-3], angles)
        return rotate_qk(q, k, **angles)

    def angles(
        self,
        seq: int,
        positions: Tensor | None = None,
        offset: int | torch.SymInt = 0,
        device: torch.device | None = None,
    ) -> dict[str, Any]:
        """Returns the angles of seq tokens, as keyword arguments of :func:`torch_rope.rotate_qk`.

        rotate_qk with these arguments does what calling the module does. The other operators take them as well. The
        tensors are the module's own, so write to none. device is that of q. Default: that of positions, or of the module.
        It must be given while the module is on meta, where from_pretrained of transformers leaves it until its first
        call, unless meta is PyTorch's default device.
        """
        if not isinstance(seq, int | torch.SymInt):
            of_trace = "torch.jit.trace makes a tensor of it: use torch.export, or fix the length by long or seq_len"
            advice = of_trace if torch.jit.is_tracing() else "call angles(seq, positions)"
            raise wrong_type("torch_rope.RotaryEmbedding", "seq", seq, "an integer", advice)
        if positions is not None:
            check_tensor("torch_rope.RotaryEmbedding", "positions", positions)
        assigned = self._assigned()
        if device is None:
            devices = [t.device for t in (positions, *assigned.values()) if t is not None]
            device = devices[0] if devices else self._sources.device
            good = bool(devices) or device.type != "meta" or torch.empty(0).device == device
            _require(good, "device", None, "that of q, because the module is on meta: angles(seq, device=q.device)")
        sources = self._sources.on(device)
        sources = sources | assigned if sources.keys() & assigned.keys() else assigned or sources
        if self._by_length is not None and not (assigned and self.kind == "dynamic"):
            if positions is None and torch.compiler.is_exporting():  # one program for all lengths must not branch
                positions = torch.arange(seq, device=device)
            length = lengths.length_of(seq, positions, offset)
            sources, positions = self._by_length(sources, length, positions, offset, self._sources.exact)
        flags = {"attention_factor": self.attention_factor, "interleaved": self.interleaved}
        return {"positions": positions, "offset": offset, **sources, **flags}

    def _assigned(self) -> dict[str, Tensor]:
        """Returns the tensors that are assigned, by name."""
        places = self._buffers | self._parameters  # a parametrization has taken its name out of both
        return {name: getattr(self, name) for name in NAMES if places.get(name, 0) is not None}

    def __getattr__(self, name: str) -> Any:
        """Returns a copy of cos, sin or inv_freq as the module makes it, if no tensor is assigned."""
        value = super().__getattr__(name)
        if value is not None or name not in NAMES:
            return value
        if (made := self._sources.get(name)) is None:
            raise AttributeError(f"torch_rope.RotaryEmbedding: a module without max_position has no table {name}")
        return made.clone()  # in place, a reader must not change what the module rotates by

    def __setattr__(self, name: str, value: Any) -> None:
        """Takes only tensors as cos, sin and inv_freq, which has a frequency for each pair that the module rotates."""
        # FSDP deletes a name before it assigns a part of a parameter to it.
        if name in NAMES and value is not None and name in self._buffers | self._parameters:
            check_tensor("torch_rope.RotaryEmbedding", name, value)
            length, pairs = (1, *value.shape)[-1], self.rotary_dim // 2
            must_be = f"rotary_dim / 2, which is {pairs}"
            _require(name != "inv_freq" or length == pairs, "the length of inv_freq", length, must_be)
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        """Moves the module. PyTorch calls this in ``to``, ``half``, ``cuda``, ``to_empty`` and so on, with a function fn
        for every tensor. What is assigned is moved, too, but never cast."""

        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        super()._apply(move, recurse)
        self._sources = self._sources.moved(fn)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Accepts the inv_freq of a checkpoint if it is the module's own, up to the rounding of its dtype."""
        name, errors, exact = prefix + "inv_freq", others[-1], self._sources.exact
        ours = exact.view(-1, exact.shape[-1])
        theirs = None if "inv_freq" in self._assigned() else state_dict.pop(name, None)
        if theirs is not None and not any(is_rounded(theirs, row) for row in ours):
            what, must_be = f"{list(theirs.shape)}", f"{list(ours[0].shape)}"
            if what == must_be:
                i = int((theirs.cpu() / ours[0] - 1).abs().argmax())  # differs most
                what, must_be = f"{theirs[i].item():.6g} for pair {i}", f"{ours[0, i].item():.6g}"
            errors.append(
                f"torch_rope.RotaryEmbedding: {name} is {what} but must be {must_be}, as the arguments of the module say; "
                "to load other frequencies, first assign a parameter of their shape to rope.inv_freq"
            )
        super()._load_from_state_dict(state_dict, prefix, *others)

    def reset_parameters(self) -> None:
        """Does nothing: FSDP calls it for the values of a module that was on the meta device, and this one lost none."""

    def extra_repr(self) -> str:
        arguments = {"base": self.base, "rotary_dim": self.rotary_dim, "kind": self.kind, **self.arguments}
        arguments |= {"interleaved": self.interleaved, "max_position": self.max_position}
        # The lists of LongRoPE are too long to show.
        short = [f"{name}={value!r}" for name, value in arguments.items() if not isinstance(value, list | tuple)]
        return ", ".join([str(self.head_dim), *short, *(f"{name} assigned" for name in self._assigned())])


def _check_names(function: str, first: list[str], kind: str, arguments: dict[str, Any]) -> None:
    """Raises TypeError unless the arguments are among the first, or others of a module with this kind of frequencies."""
    of_module, of_kind = (inspect.signature(f).parameters for f in (RotaryEmbedding, frequencies.KINDS[kind]))
    known = [*first, *list(of_module)[1:-1], *sorted(of_kind.keys() - of_module.keys())]
    if unknown := [name for name in arguments if name not in known]:
        raise unknown_argument(function, unknown, known)


def _require(good: bool, name: str, value: Any, must_be: str) -> None:
    if not good:
        error = TypeError if value is MISSING else ValueError
        raise error(f"torch_rope.RotaryEmbedding: {name} is {shown(value)} but must be {must_be}")
