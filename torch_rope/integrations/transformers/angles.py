"""Makes a rotary module of transformers compute exact angles.

A rotary module multiplies positions and frequencies in float32, which loses digits at far positions, and its
frequencies have lost digits if the module was cast to bfloat16. The forward that :func:`exact_rotary` returns computes
the tables with torch.ops.rope.axial_cos_sin, from float64 frequencies that :mod:`torch_rope.frequencies` makes of the
config.
"""

import copy
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import frequencies
from ..._ops import ops

_axial_cos_sin = ops.axial_cos_sin.default


class _NotExactError(Exception):
    """A rotary module cannot compute exact angles, for the reason in the message."""


def exact_rotary(module: nn.Module) -> tuple[Callable | None, str]:
    """Returns a forward for a rotary module that computes exact angles, and a text about it.

    The module, and a new one of the same class and config, are called with small positions. The forward that is
    returned makes the same tables, but for rounding. It stores nothing in the module, except for the kind dynamic: there
    a buffer, which is not part of the state_dict, holds the longest length so far.

    Args:
        module: any module. A rotary module takes (x, position_ids) or (x, position_ids, layer_type), returns cos and
            sin or one complex table, and has a config.

    Returns:
        (forward, text). forward is a function that takes the module and the arguments of its forward, and returns
        tables of the same shapes and dtypes, or None if the module must be left as it is. text says what the forward
        does, or why there is none. It is empty for a module that is no rotary module.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = code.co_varnames[1 : code.co_argcount] if code else ()
    if names not in (("x", "position_ids"), ("x", "position_ids", "layer_type")):
        return None, ""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        try:
            all_angles = {t: _Angles(module, t) for t in _layer_types(module, names)}
        except _NotExactError as error:
            return None, f"left as it is, because {error}"
        for angles in all_angles.values():
            angles.prepare(module)

    @torch.no_grad()
    def forward(self, x, position_ids, layer_type=None):
        return all_angles[layer_type].tables(self, x, position_ids)

    kinds = dict.fromkeys(angles.kind for angles in all_angles.values())
    return forward, f"exact angles from the {' and '.join(kinds)} frequencies of the config"


def restore(replaced: Any) -> None:
    """Removes what :func:`exact_rotary` stored in a module."""
    module = replaced.module
    for name in [n for n, _ in module.named_buffers(recurse=False) if n.startswith(_LONGEST)]:
        delattr(module, name)


_LONGEST = "_longest_length"  # the name of a buffer, or its beginning


def _layer_types(module: nn.Module, names: tuple[str, ...]) -> list[str | None]:
    """Returns the layer types that have frequencies of their own, or [None] if all layers share the frequencies."""
    layer_types = getattr(module, "layer_types", None) if "layer_type" in names else None
    return [t for t in layer_types if hasattr(module, f"{t}_inv_freq")] if layer_types else [None]


class _View(NamedTuple):
    """A way in which a module reads position_ids."""

    axes: int
    positions: Callable[[Tensor], Tensor]  # returns the positions [axes, *tokens] as a view of position_ids
    shapes: list[tuple[int, ...]]  # shapes of position_ids to try; positions does not broadcast the first one


_VIEWS = [
    _View(1, lambda p: p.unsqueeze(0), [(1, 5), (2, 5), (2, 2, 5), (3, 2, 5), (4, 2, 5)]),
    _View(1, lambda p: p.unsqueeze(0), [(3, 1, 5), (3, 2, 5)]),  # a table for each axis, as older modules make
    *(_View(n, lambda p, n=n: p.expand(n, -1, -1), [(n, 1, 5), (n, 2, 5), (2, 5)]) for n in (2, 3, 4)),
    *(_View(n, lambda p: p.movedim(-1, 0), [(1, 5, n), (2, 5, n)]) for n in (2, 3)),
    *(_View(n, lambda p: p.movedim(-1, 0), [(5, n), (7, n)]) for n in (2, 3)),
    *(_View(n, lambda p: p.movedim(-1, 0).unsqueeze(1), [(5, n), (7, n)]) for n in (2, 3)),
]
_EPS = torch.finfo(torch.float32).eps
_ROUNDING = 32 * _EPS  # the relative error of a float32 frequency of transformers: some roundings, and that of a power


class _Angles:
    """The angles that a rotary module makes for one layer type, and the form of its tables.

    The constructor raises _NotExactError if the module does not make the angles that its config describes.

    Attributes:
        kind: the kind of the frequencies, a key of frequencies.KINDS, or "axial".
    """

    def __init__(self, module: nn.Module, layer_type: str | None):
        self._layer_type = layer_type
        self._longest = _LONGEST if layer_type is None else f"{_LONGEST}_of_{layer_type}"
        self._dtype: torch.dtype | None = None  # of cos and sin, or None if it is the dtype of x
        self._is_complex = False
        try:
            of_pairs = self._read_config(module)
        except Exception as error:
            raise _NotExactError(f"its frequencies are not known: {error}") from None
        new, used = self._copies(module)
        self._find_form(new, of_pairs)
        self._compare_frequencies(used)

    # ---- making tables ----

    def tables(self, module: nn.Module, x: Tensor, position_ids: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Returns what the forward of the module returns."""
        cos, sin = _axial_cos_sin(
            self._view.positions(position_ids),
            self._inv_freq(module, position_ids),
            attention_factor=self._attention_factor,
            dtype=self._dtype or x.dtype,
        )
        return torch.complex(cos, sin) if self._is_complex else (cos, sin)

    def prepare(self, module: nn.Module) -> None:
        """Copies what the frequencies are made of to the device of a module.

        For dynamic, whose frequencies depend on the longest length so far, gives the module a buffer for that length.
        """
        device = next(module.buffers(), torch.empty(0)).device
        self._constants(device)
        if self.kind == "dynamic":
            length = getattr(module, "max_seq_len_cached", self._trained)
            length = int(getattr(module, f"{self._layer_type}_max_seq_len_cached", length))
            module.register_buffer(self._longest, torch.tensor(length, device=device), persistent=False)

    def _inv_freq(self, module: nn.Module, position_ids: Tensor) -> Tensor:
        """Returns the frequencies for these positions: [axes, channels], or [2, axes, channels] in two parts."""
        device = position_ids.device
        if self.kind == "longrope":
            short, long = self._constants(device)
            return torch.where(position_ids.amax() >= self._trained, long, short)
        if self.kind == "dynamic":
            return self._dynamic(getattr(module, self._longest), position_ids)
        return self._constants(device)[0]

    def _dynamic(self, longest: Tensor, position_ids: Tensor) -> Tensor:
        """Returns the frequencies for the longest length so far, which a short sequence resets, as in transformers."""
        length = position_ids.amax() + 1
        longest.mul_(length >= self._trained).clamp_(min=length).clamp_(min=self._trained)
        inv_freq, exponents = self._constants(position_ids.device)
        has_float64 = inv_freq.dtype == torch.float64
        if not has_float64:
            inv_freq, exponents = self._on_cpu
        s = longest.to(inv_freq) * (self._factor / self._trained) - (self._factor - 1)
        inv_freq = inv_freq * s**exponents
        return inv_freq if has_float64 else frequencies.in_two_parts(inv_freq).to(position_ids.device)

    def _constants(self, device: torch.device) -> list[Tensor]:
        """Returns on a device what the frequencies are made of. Buffers would be cast with the module."""
        if device not in self._on_devices:
            self._on_devices[device] = [frequencies.on_device(t, device) for t in self._on_cpu]
        return self._on_devices[device]

    # ---- finding out which tables the module makes ----

    def _read_config(self, module: nn.Module) -> list[Tensor]:
        """Returns what the frequencies are made of, in the order of the pairs, float64."""
        config = getattr(module, "config", None)
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "axial":  # a vision tower: all axes have these frequencies
            self.kind, make = "axial", frequencies.default
            arguments = {"rotary_dim": 2 * module.inv_freq.numel(), "base": rope["rope_theta"]}
        else:
            self.kind, arguments = frequencies.parse(config, self._layer_type)
            make = frequencies.KINDS[self.kind]
        inv_freq, self._attention_factor = make(**arguments)
        self._trained, self._factor = arguments.get("original_max_position"), arguments.get("factor")
        if self.kind == "longrope":
            return [inv_freq, make(**arguments, long=True).inv_freq]
        if self.kind == "dynamic":  # f[i] * s ** (-2 i / (rotary_dim - 2))
            pairs = torch.arange(len(inv_freq), dtype=torch.float64)
            return [inv_freq, -2 * pairs / (arguments["rotary_dim"] - 2)]
        return [inv_freq]

    def _copies(self, module: nn.Module) -> tuple[nn.Module, nn.Module]:
        """Returns a new module of the same class and config, and a copy of the module, both on the CPU."""
        if any(b.is_meta for b in module.buffers()):
            raise _NotExactError("it is on the meta device")
        if not all(name.endswith("inv_freq") for name in module.state_dict()):
            raise _NotExactError("it has weights, which may change its angles")
        forward = vars(module).get("_old_forward") or vars(module).get("forward")  # hooks of accelerate set both
        if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
            raise _NotExactError("its forward was replaced")
        try:
            return type(module)(module.config), copy.deepcopy(module).cpu()
        except Exception as error:
            raise _NotExactError(f"no module like it can be made to compare with: {error}") from None

    def _call(self, module: nn.Module, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> Any:
        """Returns the tables of a module for x of a dtype, or None if it does not take position_ids."""
        layer_type = () if self._layer_type is None else (self._layer_type,)
        try:
            return type(module).forward(module, torch.zeros(1, 1, 1, dtype=dtype), position_ids, *layer_type)
        except Exception:
            return None

    def _find_form(self, new: nn.Module, of_pairs: list[Tensor]) -> None:
        """Finds the view, the frequency that each channel of the tables has on each axis, and the dtype."""
        found = []
        for view in _VIEWS:
            tables = self._unit_tables(new, view)
            if tables is None:
                continue
            first = nn.functional.pad(of_pairs[0], (1, 0))  # a channel that does not follow an axis has the frequency 0
            off = (tables.angle().unsqueeze(-1) - first).abs() / first.clamp(min=1e-300)
            pairs = off.argmin(-1)
            self._use(view, [nn.functional.pad(t, (1, 0))[pairs] for t in of_pairs])
            # A module may take a wrong number of dimensions by mistake, but then no table has all frequencies.
            if torch.isin(of_pairs[0], self._on_cpu[0]).all() and self._agrees(new):
                found.append((self._view, self._on_cpu))
        if not found:
            raise _NotExactError("its tables are not cos and sin of positions times the frequencies of its config")
        if len({constants[0].shape[-1] for _, constants in found}) > 1:
            raise _NotExactError("its positions may have any number of axes")
        self._use(*found[0])
        position_ids = torch.zeros(self._view.shapes[0], dtype=torch.int64)
        tables = self._call(new, position_ids, torch.bfloat16)
        self._is_complex = isinstance(tables, Tensor)
        if self._is_complex or tables[0].dtype != torch.bfloat16:
            self._dtype = torch.float32

    def _use(self, view: _View, constants: list[Tensor]) -> None:
        """Makes tables from these constants, [axes, channels] each, from now on."""
        self._view, self._on_cpu = view, constants
        self._on_devices: dict[torch.device, list[Tensor]] = {}

    def _unit_tables(self, module: nn.Module, view: _View) -> Tensor | None:
        """Returns the tables for the position 1 on one axis and 0 on all others, complex [axes, channels]."""
        position_ids = torch.zeros(view.shapes[0], dtype=torch.int64)
        positions = view.positions(position_ids)
        for axis in range(view.axes):
            positions[axis, ..., axis] = 1
        tables = self._call(module, position_ids)
        if tables is None:
            return None
        tables = _as_complex(tables)
        return tables.flatten(0, -2)[: view.axes] if tables.shape[:-1] == positions.shape[1:] else None

    def _agrees(self, new: nn.Module) -> bool:
        """Returns whether a new module makes these tables, for all shapes of positions and all lengths that matter."""
        lengths = [6, 100]
        if self.kind in ("dynamic", "longrope"):  # transformers resets its frequencies for the last length
            lengths = [self._trained + more for more in (0, 1, self._trained, 3)] + [6]
        self.prepare(new)
        random, taken = torch.Generator().manual_seed(0), 0
        for shape, length in itertools.product(self._view.shapes, lengths):
            position_ids = torch.randint(6, shape, generator=random)
            position_ids.view(-1)[-1] = length - 1
            expected = self._call(new, position_ids)
            if expected is None:
                continue
            expected = _as_complex(expected)
            actual = _as_complex(self.tables(new, torch.zeros(1, dtype=torch.float32), position_ids))
            if actual.shape != expected.shape:
                return False
            positions = self._view.positions(position_ids).double()
            angle = torch.einsum("a...,ac->...c", positions, self._on_cpu[0])
            if ((actual - expected).abs() > self._attention_factor * (4 * _EPS + _ROUNDING * angle)).any():
                return False
            taken += 1
        return taken > 0

    def _compare_frequencies(self, used: nn.Module) -> None:
        """Raises _NotExactError if the module has other frequencies than its config, but for rounding."""
        tables, inv_freq = self._unit_tables(used, self._view), self._on_cpu[0]
        relative, absolute = _rounding(used)
        if (
            tables is None
            or tables.shape != inv_freq.shape
            or not torch.allclose(tables.angle(), inv_freq, relative, absolute)
            or not torch.allclose(tables.abs(), torch.tensor(self._attention_factor, dtype=torch.float64), _ROUNDING)
        ):
            raise _NotExactError("its frequencies were changed, and are not those of its config any more")


def _as_complex(tables: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Returns tables as complex numbers, whose angle is the one that a channel is rotated by."""
    return tables.to(torch.complex128) if isinstance(tables, Tensor) else torch.complex(*(t.double() for t in tables))


def _rounding(module: nn.Module) -> tuple[float, float]:
    """Returns the relative and absolute error that the frequencies of a module have if they were rounded only.

    They may have been cast to another dtype, and back.
    """
    found = [(_ROUNDING, 0.0)]
    for buffer in module.buffers():
        for dtype in (torch.bfloat16, torch.float16):
            if buffer.is_floating_point() and torch.equal(buffer, buffer.to(dtype).to(buffer.dtype)):
                found.append((torch.finfo(dtype).eps, torch.finfo(dtype).eps * torch.finfo(dtype).tiny))
    return max(found)
