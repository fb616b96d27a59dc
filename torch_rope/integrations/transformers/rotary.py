"""Finds out what a rotary function does, by calling it."""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

_rotate = torch.ops.rope.rotate.default
_rotate_qk = torch.ops.rope.rotate_qk.default

# The forms of the tables that rotary functions take, shown for two angles a and b. Each form is a pair of functions:
# the first makes the tables from cos and sin [.., rotary_dim / 2], the second reads cos and sin back from the tables.
# Most rotary modules make the first form. The last form, with a dimension for the heads, is that of Llama 4's images.
_TABLES = {
    "a, b, a, b": (
        lambda cos, sin: (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)),
        lambda cos, sin: (cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]),
    ),
    "a, a, b, b": (
        lambda cos, sin: (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)),
        lambda cos, sin: (cos[..., ::2], sin[..., ::2]),
    ),
    "a, b": (lambda cos, sin: (cos, sin), lambda cos, sin: (cos, sin)),
    "complex": (
        lambda cos, sin: (torch.complex(cos, sin),),
        lambda table: torch.view_as_real(table).unbind(-1),
    ),
    "complex, with heads": (
        lambda cos, sin: (torch.complex(cos, sin).unsqueeze(-2),),
        lambda table: torch.view_as_real(table.squeeze(1)).unbind(-1),
    ),
}
# The last is DeepSeek V3's: it reads pair i from channels 2i and 2i + 1, and writes the result to channels i and
# i + rotary_dim / 2.
_PAIRINGS = ["half-split", "interleaved", "interleaved in, half-split out"]


def has_form(form: str, *tables: Tensor) -> bool:
    """Returns whether tables are cos and sin in this form of _TABLES."""
    make, read = _TABLES[form]
    return len(tables) == 2 and all(map(torch.equal, make(*read(*tables)), tables))


def sample_tables(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the tables that a rotary module makes from positions of several shapes, along one axis or several axes.

    The tables must be examined as well as the function: even if the function is a rotation, a table may contain
    different angles for the two channels of a pair. Yields nothing if the module is no rotary module.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    arguments = code.co_varnames[1 : code.co_argcount] if code else ()
    if arguments[:2] != ("x", "position_ids"):
        return
    module = copy.deepcopy(module)  # the call may change the frequencies, if they depend on the length
    x = torch.zeros(1, 5, 1, device=next((t.device for t in module.buffers()), None))
    if x.is_meta:
        return
    for shape in ((4, 1, 5), (3, 1, 5), (2, 1, 5), (2, 5), (5, 2), (1, 5)):
        positions = (3 * torch.arange(torch.Size(shape).numel(), device=x.device) % 7).view(shape)
        layer_types = getattr(module, "layer_types", None) if "layer_type" in arguments else None
        for layer_type in [(t,) for t in layer_types] if layer_types else [()]:
            try:
                tables = module(x, positions, *layer_type)
            except Exception:  # the module does not take positions of this shape
                continue
            if isinstance(tables, tuple):
                yield tables


def _seq_is_before_heads(table: Tensor, unsqueeze_dim: int) -> bool:
    """Returns True if a table [.., seq, rotary_dim], unsqueezed at unsqueeze_dim, broadcasts over x
    [.., seq, heads, head_dim], and False if it broadcasts over x [.., heads, seq, head_dim]."""
    from_the_end = unsqueeze_dim - table.dim() - 1 if unsqueeze_dim >= 0 else unsqueeze_dim
    if from_the_end != -2 and from_the_end != -3:
        raise ValueError(
            f"torch_rope: unsqueeze_dim is {unsqueeze_dim} but must be {table.dim() - 1} for x [.., seq, heads, "
            f"head_dim] or {table.dim() - 2} for x [.., heads, seq, head_dim], because the tables have shape "
            f"{list(table.shape)}"
        )
    return from_the_end == -2


@dataclass(frozen=True)
class Rotation:
    """A description of what a rotary function does."""

    tables: str  # a key of _TABLES
    pairing: str  # one of _PAIRINGS
    inverse: bool
    unsqueeze_dim: int | None  # None if the function has an argument of this name

    @property
    def flags(self):
        flags = {"interleaved": True} if self.pairing != "half-split" else {}
        if self.inverse:
            flags["inverse"] = True
        return flags

    @property
    def simple(self):
        return self.pairing != "interleaved in, half-split out"

    def check(self, tables):
        return len(tables) == 1 or has_form(self.tables, *tables)

    def operands(self, tensors, tables, unsqueeze_dim):
        cos, sin = _TABLES[self.tables][1](*tables)
        if cos.dtype != torch.float32 and cos.dtype != tensors[0].dtype:
            cos, sin = cos.float(), sin.float()
        if _seq_is_before_heads(cos, unsqueeze_dim):
            return list(tensors), cos, sin, lambda x: x
        return [x.transpose(-3, -2) for x in tensors], cos, sin, lambda x: x.transpose(-3, -2)

    def functions(self) -> tuple[Callable, Callable]:
        """Returns two functions that do this rotation with torch_rope: one of x, and one of q and k.

        Their other arguments are a tuple of tables, and unsqueeze_dim.
        """
        read = _TABLES[self.tables][1]
        flags = {"interleaved": True} if self.pairing != "half-split" else {}
        if self.inverse:
            flags["inverse"] = True
        reordered = self.pairing == "interleaved in, half-split out"

        def angles(x, tables):
            cos, sin = read(*tables)
            if cos.dtype != torch.float32 and cos.dtype != x.dtype:
                cos, sin = cos.float(), sin.float()
            return cos, sin

        def reorder(x):
            return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

        def rotate_x(x, tables, unsqueeze_dim):
            cos, sin = angles(x, tables)
            seq_first = _seq_is_before_heads(cos, unsqueeze_dim)
            x = _rotate(x if seq_first else x.transpose(-3, -2), cos, sin, **flags)
            if reordered:
                x = reorder(x)
            return x if seq_first else x.transpose(-3, -2)

        def rotate_q_and_k(q, k, tables, unsqueeze_dim):
            cos, sin = angles(q, tables)
            seq_first = _seq_is_before_heads(cos, unsqueeze_dim)
            if not seq_first:
                q, k = q.transpose(-3, -2), k.transpose(-3, -2)
            q, k = _rotate_qk(q, k, cos, sin, **flags)
            if reordered:
                q, k = reorder(q), reorder(k)
            return (q, k) if seq_first else (q.transpose(-3, -2), k.transpose(-3, -2))

        return rotate_x, rotate_q_and_k


@dataclass(frozen=True)
class Call:
    """A call of torch_rope that stands for a call of a rotary function."""

    function: str
    operator: str
    rotation: Rotation
    of_parts: bool = False  # True if another rotary function calls it with parts of x and of the tables

    def __str__(self):
        inverse = ", inverse" if self.rotation.inverse else ""
        return f"{self.function} is torch.ops.rope.{self.operator}, {self.rotation.pairing}{inverse}"


class RotaryFunction:
    """A rotary function, and the rotation that it was found to do.

    The function takes one tensor or q and k, and cos and sin or one complex table. The constructor raises
    NotImplementedError if the function has other arguments, or does something other than rotate.
    """

    def __init__(self, function: Callable, rounding="once"):
        self.function = function
        # The kernels package turns a function into a module whose forward has the signature.
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
        self.parameters = signature.parameters
        self.tables = [n for n in ("cos", "sin") if n in self.parameters]
        self.tables = self.tables or [n for n in self.parameters if n.startswith("freqs")]
        self.tensors = [n for n in self.parameters if n not in (*self.tables, "unsqueeze_dim", "position_ids")]
        if len(self.tables) not in (1, 2) or len(self.tensors) not in (1, 2):
            raise NotImplementedError(
                f"the function has the arguments {signature} but must have one or two tensors, and cos and sin or freqs"
            )
        choices = [Rotation(*c) for c in product(_TABLES, _PAIRINGS, [False, True], [None, 1, -2]) if self._may_be(*c)]
        # A function without unsqueeze_dim may agree with two choices on single sequences. The right choice is the one
        # that agrees on batches too.
        agreed = [self._samples_that_agree(rotation) for rotation in choices]
        if not any(agreed) or agreed.count(max(agreed)) > 1:
            raise NotImplementedError(
                "the function must rotate pairs of channels by the angles of cos and sin but computes something else"
            )
        self.rotation = choices[agreed.index(max(agreed))]
        for fewer in ({"q_seq": 4}, {"table_seq": 4}):
            if any(self._call(self.function, sample) for sample in self._samples(self.rotation, **fewer)):
                raise NotImplementedError(
                    "the function accepts q, k and tables of different lengths but must accept only one length"
                )

    def _may_be(self, tables: str, pairing: str, inverse: bool, unsqueeze_dim: int | None) -> bool:
        """Returns whether the function's arguments allow this rotation."""
        if tables == "complex, with heads" and unsqueeze_dim != -2:
            return False
        is_complex = tables.startswith("complex")
        return is_complex == (len(self.tables) == 1) and (unsqueeze_dim is None) == ("unsqueeze_dim" in self.parameters)

    def _samples(self, rotation: Rotation, head_dim=16, q_seq=5, k_seq=5, table_seq=5) -> Iterator[dict[str, Any]]:
        """Yields random arguments in the layouts that models use.

        Without a dimension for the heads in the tables: a batch with a table row for each token of each sequence, and
        one sequence without a batch dimension (images). With it: a batch whose sequences share their table rows.
        """
        plain = {"dtype": torch.float32, "device": "cpu"}
        dims = [(4, 2)] if rotation.tables == "complex, with heads" else [(4, 3), (3, 2)]
        unsqueeze_dims = [1, 2] if rotation.unsqueeze_dim is None else [rotation.unsqueeze_dim]
        for (x_dim, table_dim), unsqueeze_dim in product(dims, unsqueeze_dims):
            g = torch.Generator().manual_seed(0)
            shape = (2, table_seq, 8)[-table_dim:]
            cos, sin = torch.randn(2, *shape, generator=g, **plain)
            if unsqueeze_dim > table_dim - 1:  # the new dimension would be after rotary_dim
                continue
            sample = dict(zip(self.tables, _TABLES[rotation.tables][0](cos, sin), strict=True))
            for name, seq, heads in zip(self.tensors, (q_seq, k_seq), (4, 3), strict=False):
                seq_and_heads = (seq, heads) if _seq_is_before_heads(cos, unsqueeze_dim) else (heads, seq)
                sample[name] = torch.randn((2, *seq_and_heads, head_dim)[-x_dim:], generator=g, **plain)
            if "unsqueeze_dim" in self.parameters:
                sample["unsqueeze_dim"] = unsqueeze_dim
            if "position_ids" in self.parameters:  # functions that have this argument ignore it
                sample["position_ids"] = torch.zeros(2, table_seq, dtype=torch.int64, device="cpu")
            yield sample

    def _call(self, function: Callable, sample: dict[str, Any]) -> list[Tensor] | None:
        """Returns the function's results as a list, or None if the function does not take these arguments."""
        try:
            with torch.no_grad():
                results = function(**sample)
        except Exception:
            return None
        results = [r for r in (results if isinstance(results, tuple) else [results]) if r is not None]
        shapes = [sample[n].shape for n in self.tensors if sample[n] is not None]
        return results if [r.shape for r in results] == shapes else None

    def _samples_that_agree(self, rotation: Rotation) -> int:
        """Returns for how many samples this rotation by torch_rope gives the results of the function.

        Returns 0 if the results differ for any sample. rotary_dim is 16.
        """
        ours, agree = self._calling(rotation), 0
        for sample in (*self._samples(rotation, head_dim=16), *self._samples(rotation, head_dim=24)):
            expected = self._call(self.function, sample)
            if expected is not None:
                actual = self._call(ours, sample)
                if actual is None or not all(map(lambda a, e: torch.allclose(a, e, 1e-5, 1e-5), actual, expected)):
                    return 0
                agree += 1
        return agree

    def _calling(self, rotation: Rotation, k_may_be_none: bool = False) -> Callable:
        """Returns a function with the arguments of this one that does the rotation with torch_rope."""
        rotate_x, rotate_q_and_k = rotation.functions()
        unsqueeze_dim = "unsqueeze_dim" if rotation.unsqueeze_dim is None else rotation.unsqueeze_dim
        arguments = [n if p.default is p.empty else f"{n}={p.default!r}" for n, p in self.parameters.items()]
        # The arguments are written out in source code, because binding *args and **kwargs takes longer than rotating a
        # token.
        source = f"rotate({', '.join(self.tensors)}, ({', '.join(self.tables)},), {unsqueeze_dim})"
        if k_may_be_none:
            call = ", ".join(f"{n}={n}" for n in self.parameters)
            source += f" if {self.tensors[1]} is not None else original({call})"
        make = eval(f"lambda rotate, original: lambda {', '.join(arguments)}: {source}")
        return make(rotate_x if len(self.tensors) == 1 else rotate_q_and_k, self.function)

    def rotate(self, tensors, tables, unsqueeze_dim):
        f = self.rotation.functions()
        if len(tensors) == 1:
            return f[0](*tensors, tables, unsqueeze_dim)
        if tensors[1] is None:
            return f[0](tensors[0], tables, unsqueeze_dim)
        return f[1](*tensors, tables, unsqueeze_dim)

    def with_signature(self, f, *first):
        u = "unsqueeze_dim" if self.rotation.unsqueeze_dim is None else self.rotation.unsqueeze_dim
        args = [*first, *(n if p.default is p.empty else f"{n}={p.default!r}" for n, p in self.parameters.items())]
        lead = "".join(f"{n}, " for n in first)
        return eval(
            f"lambda f: lambda {', '.join(args)}: f({lead}({', '.join(self.tensors)},), ({', '.join(self.tables)},), {u})"
        )(f)

    def replacement(self, name: str) -> Callable:
        """Returns a function of this name, with the arguments of this one, that calls torch_rope."""
        without_k = [s | {n: None} for s in self._samples(self.rotation) for n in self.tensors[1:]]
        new = self._calling(self.rotation, any(self._call(self.function, sample) for sample in without_k))
        new.__name__ = new.__qualname__ = name
        new._torch_rope = (Call(name, "rotate" if len(self.tensors) == 1 else "rotate_qk", self.rotation),)
        return new
