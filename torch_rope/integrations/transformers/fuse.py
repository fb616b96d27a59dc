"""Fuses the norm of q and k, the rotation and the write into a cache of transformers in the methods of a model.

A method of an attention module does these one after the other::

    q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
    k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
    v = self.v_proj(x).view(shape).transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    k, v = past_key_values.update(k, v, self.layer_idx)

The rebuilt method passes each of these calls to an object of its own, :class:`Step`, which puts the norms off until the
rotation, and the rotation until the write. Between these calls the method must do nothing but take views. A trial finds
out whether this is so: the method runs before and after on random numbers, without a cache and with one, and what
differs by more than rounding is not fused.
"""

import ast
import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..._ops import ops as _ops
from .._methods import (
    Calls,
    Rebuilder,
    Registered,
    Site,
    decorated,
    with_caller,
)
from .._norm import Norm, close, find_norm, quietly
from .._rebuild import Source, wrapped
from .rotary import RotaryFunction

_rotate_qk_, _rotate_ = _ops.rotate_qk_.default, _ops.rotate_.default
_norm_rotate_qk, _rotate_into_cache_ = _ops.norm_rotate_qk.default, _ops.rotate_into_cache_.default
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_STEP, _ROOM = "_torch_rope_step", "_torch_rope_room"


# ---- the caches of transformers ----


def _layer_to_write(cache: Any, index: int) -> Any:
    """Returns the layer of a cache of transformers that rotate_into_cache_ can write, or None."""
    if type(cache).update is not Cache.update or cache.offloading:
        return None
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if type(layer) is DynamicLayer and _is_compiling():
        return None  # torch.compile fuses torch.cat with what follows, and would see the memory grow
    return layer if type(layer) in _ROOMS else None


def _fits(layer: Any, x: Tensor) -> bool:
    """Returns whether the cache returns what its memory holds after x [batch, seq, heads, head_dim] is written."""
    if layer.is_initialized and layer.keys.dtype is not x.dtype and layer.keys.numel():
        return False
    if not layer.is_sliding:
        return True
    count, seq = layer.cumulative_length_int, x.shape[1]
    return seq == 1 if count >= layer.max_cache_len else count + seq <= layer.max_cache_len


class _Room:
    """The memory of a layer of a cache, and where its next tokens go.

    transformers holds keys and values as [batch, heads, length, head_dim]. k_cache and v_cache are views of the whole
    memory as the operator takes them, [batch, length, heads, head_dim].
    """

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values = keys, values
        self.k_cache, self.v_cache = keys.transpose(1, 2), values.transpose(1, 2)
        batch, length = self.k_cache.shape[:2]
        self.first_slots = torch.arange(0, batch * length, length, device=keys.device).unsqueeze(1)  # [batch, 1]


class _Static(_Room):
    """The memory of a StaticLayer or StaticSlidingWindowLayer. slots, [batch, 1], is where its next tokens go."""

    version: int | None = None  # of the count, if the count must not change unseen

    def __init__(self, layer: Any):
        super().__init__(layer.keys, layer.values)
        self.count = self.counter = layer.cumulative_length
        self.slots = self.first_slots + self.count

    @staticmethod
    def of(layer: Any, k: Tensor, v: Tensor) -> "_Static":
        """Returns the memory of a layer. It is remembered while the layer has the same tensors and nobody else counts."""
        if _is_compiling():
            return _Static(layer)
        room = layer.__dict__.get(_ROOM)
        if (
            room is None
            or room.count is not layer.cumulative_length
            or room.keys is not layer.keys
            or room.values is not layer.values
            or (room.version is not None and (room.version < 0 or room.version != room.count._version))
        ):
            with torch.inference_mode(layer.cumulative_length.is_inference()):
                room = layer.__dict__[_ROOM] = _Static(layer)
                room._share()
        return room

    def _share(self) -> None:
        """Lets the first slot and the count, which are equal, share their memory, so that one addition changes both."""
        if len(self.slots) == 1:
            self.slots = self.count.view(1, 1)
        else:  # other slots do not follow a change of the count, such as reset()
            self.count.set_(self.slots.untyped_storage(), 0, (), ())
            self.version = -1 if self.count.is_inference() else self.count._version  # inference tensors have none
        self.counter = self.slots

    def next(self, layer: Any, seq: int) -> Tensor:
        """Returns the slots of the next tokens, [batch, seq]."""
        if layer.is_sliding and layer.cumulative_length_int >= layer.max_cache_len:
            for x in (layer.keys, layer.values):  # the oldest token makes room for the new one
                x.copy_(x.roll(-1, 2))
            return self.first_slots + (layer.max_cache_len - 1)
        return self.slots if seq == 1 else self.slots + torch.arange(seq, device=self.slots.device)

    def add(self, layer: Any, seq: int) -> None:
        """Counts tokens that were written. The count of a full window stays as it is."""
        if layer.is_sliding:
            full = layer.cumulative_length_int >= layer.max_cache_len
            layer.cumulative_length_int += seq
            if full:
                return
        self.counter.add_(seq)


class _Growing(_Room):
    """The memory of a DynamicLayer, which has room for more tokens than there are. Its size doubles when it is full.

    The memory is written only after its last token, by the layer that holds this token as keys and values. A layer that
    was cut, reordered or copied gets memory of its own.
    """

    shown: tuple = (None, None)  # the keys and values of the layer

    def __init__(self, layer: Any, k: Tensor, v: Tensor):
        self.used, seq = layer.get_seq_length(), k.shape[-2]
        self.length = 2 * (self.used + seq) if self.used else seq
        with torch.inference_mode(False):  # so that the memory can be written in any mode
            super().__init__(*(x.new_empty((*x.shape[:2], self.length, x.shape[-1])) for x in (k, v)))
            self.slots = self.first_slots + torch.arange(self.length, device=k.device)  # [batch, length]
        if self.used:
            for x, old in ((self.keys, layer.keys), (self.values, layer.values)):
                x[:, :, : self.used] = old

    @staticmethod
    def of(layer: Any, k: Tensor, v: Tensor) -> "_Growing":
        """Returns memory of a layer that has room for k and v, [batch, heads, seq, head_dim]."""
        room = layer.__dict__.get(_ROOM)
        if (
            room is None
            or room.shown[0] is not layer.keys
            or room.shown[1] is not layer.values
            or room.used + k.shape[-2] > room.length
        ):
            room = layer.__dict__[_ROOM] = _Growing(layer, k, v)
        return room

    def next(self, layer: Any, seq: int) -> Tensor:
        """Returns the slots of the next tokens, [batch, seq]."""
        return self.slots.narrow(1, self.used, seq)

    def add(self, layer: Any, seq: int) -> None:
        """Lets the layer show tokens that were written."""
        self.used += seq
        self.shown = self.keys.narrow(2, 0, self.used), self.values.narrow(2, 0, self.used)
        layer.keys, layer.values = self.shown


_ROOMS = {DynamicLayer: _Growing.of, StaticLayer: _Static.of, StaticSlidingWindowLayer: _Static.of}


# ---- one call of a rebuilt method ----


@dataclass(frozen=True)
class Plan:
    """The calls that a rebuilt method fuses. The names are attributes of its module."""

    norms: tuple[tuple[str, Norm], ...] = ()  # of the rotated tensors, in their order
    v_norm: str = ""
    cache: bool = False
    in_place: bool = False
    overwritten: tuple[str, ...] = ()  # the modules whose results are overwritten

    @property
    def fuses(self) -> bool:
        """True if there is anything to fuse."""
        return bool(self.norms or self.cache or self.in_place)

    @functools.cached_property
    def put_off(self) -> tuple[str, ...]:
        """The names of the norms, which are not called."""
        return tuple(dict.fromkeys([*(name for name, _ in self.norms), *([self.v_norm] if self.v_norm else [])]))

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The modules that are called, and whose results are overwritten."""
        return tuple(name for name in self.overwritten if name not in self.put_off)

    def __str__(self):
        fused = []
        if self.norms:
            fused.append(f"{' and '.join(name for name, _ in self.norms)} in norm_rotate_qk")
        if self.cache:
            inside = f", with {', '.join(self.put_off)}" if self.put_off else ""
            fused.append(f"the write into a StaticCache or DynamicCache in rotate_into_cache_{inside}")
        if self.in_place:
            fused.append("in place without gradients")
        return "fused: " + "; ".join(fused)


class Step:
    """One call of a rebuilt method: it stands for the norms, the rotary function and the cache that the method calls.

    In a decode step the weights of the model pass through the processor's caches between two calls, so each function
    and each object that a call needs comes from memory. The way to rotate_into_cache_ needs few of them.
    """

    turn = 0  # how many tensors were rotated, or put off
    put_off = 0  # how many norms were put off and not done yet
    waiting: tuple[Tensor, ...] = ()  # the tensors whose rotation is put off
    v_waits = False
    layer: Any = None  # the layer of the cache to write

    def __init__(self, plan: Plan, module: nn.Module, cache: Any, index: int):
        self.plan, self.module = plan, module
        self.fused = not _is_watched(module, plan)
        if cache is not None and plan.cache and self.fused and not _is_grad_enabled():
            self.layer = _layer_to_write(cache, index)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Returns the normalised x, or x itself if the norm is put off."""
        if self.fused:
            if name != self.plan.v_norm:
                self.put_off += 1
                return x
            if self.waiting:
                self.v_waits = True
                return x
        return getattr(self.module, name)(x)

    @staticmethod
    def rotate(function: RotaryFunction, x: tuple[Tensor, ...], tables: tuple, unsqueeze_dim: int, step: "Step") -> Any:
        """Returns what the rotary function returns, or the tensors themselves if they are rotated later or in place."""
        layer = step.layer
        if layer is None and not step.put_off and not step.is_in_place():
            return function.rotator.rotate(x, tables, unsqueeze_dim, step.module)
        cos, sin, in_order, _, flags, *_ = function.fused.angles(x[0], tables, unsqueeze_dim, step.module)
        views = x if in_order else tuple([t.transpose(1, 2) for t in x])
        turn, step.turn = step.turn, step.turn + len(x)
        if layer is not None and (step.waiting or _fits(layer, views[0])):
            step.waiting += views
            step.operands = cos, sin, flags
        elif step.put_off:
            step.put_off -= len(x)
            q, k = views if len(x) == 2 else (views[0], views[0][..., :0, :])
            norms = (step.plan.norms[turn : turn + 2] * 2)[:2]
            eps, weights = norms[0][1].eps, _weights(step.module, norms, q)
            views = _norm_rotate_qk(q, k, *weights, cos, sin, norm_eps=eps, **flags)[: len(x)]
            x = views if in_order else tuple(y.transpose(1, 2) for y in views)
        elif not step.is_in_place():
            return function.rotator.rotate(x, tables, unsqueeze_dim, step.module)
        elif len(x) == 2:
            _rotate_qk_(*views, cos, sin, **flags)
        else:
            _rotate_(*views, cos, sin, **flags)
        return x if len(x) == 2 else x[0]

    def is_in_place(self) -> bool:
        """Returns whether tensors are rotated in place."""
        return self.fused and self.plan.in_place and not _is_grad_enabled()

    def update(self, cache: Any, k: Tensor, v: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the cache after k and v were added."""
        if not self.waiting:
            return cache.update(k, v, *args, **kwargs)
        layer, norms, seq = self.layer, self.plan.norms, k.shape[2]
        if not layer.is_initialized:
            layer.lazy_initialization(k, v)
        room = _ROOMS[type(layer)](layer, k, v)
        q, k = self.waiting
        cos, sin, flags = self.operands
        weights = (None, None)
        if norms:
            weights = _weights(self.module, norms, q)
            flags = {"norm_eps": norms[0][1].eps, "norm_v": self.v_waits, **flags}
        _rotate_into_cache_(
            q, k, v.transpose(1, 2), room.k_cache, room.v_cache, cos, sin, None, None, 0, room.next(layer, seq), *weights,
            **flags,
        )  # fmt: skip
        room.add(layer, seq)
        self.waiting, self.put_off = (), 0
        return layer.keys, layer.values

    def end(self, result: Any) -> Any:
        """Returns the result of the method. Raises RuntimeError if something was put off and never done."""
        if self.waiting or self.put_off:
            raise RuntimeError(
                f"torch_rope: {type(self.module).__name__} took another way than when it was patched, on which a norm "
                "or rotation that torch_rope fuses is not used; patch the model with fuse=False"
            )
        return result


def _weights(module: nn.Module, norms: tuple[tuple[str, Norm], ...], x: Tensor) -> list[Tensor]:
    """Returns the weights of the norms for x [.., heads, head_dim]."""
    modules = module._modules
    return [norm.weight_of(modules[name], x) for name, norm in norms]


def _is_watched(module: nn.Module, plan: Plan) -> bool:
    """Returns whether a hook would see a tensor that is overwritten, or the call of a norm that is put off."""
    modules = module._modules
    for name in plan.called:
        if modules[name]._forward_hooks:
            return True
    for name in plan.put_off:
        m = modules[name]
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return True
    return _has_any_global_hook() and not _is_compiling()


# ---- rebuilding a method ----


class _Fused(Calls):
    """Passes the calls of rotary functions, norms and the cache to an object that is made when the method begins."""

    def __init__(self, source: Source, rotary: set[str], norms: set[str]):
        super().__init__(rotary, ast.Name(_STEP, ast.Load()))
        self.norms = norms
        self.parameters = [
            a.arg for a in (*source.node.args.posonlyargs, *source.node.args.args, *source.node.args.kwonlyargs)
        ]
        self.cache, self.index = ast.Constant(None), ast.Constant(0)
        self.other_caches = False
        begin = ast.Assign([ast.Name(_STEP, ast.Store())], ast.Call(ast.Name(_STEP + "_of", ast.Load()), [], []))
        body = [self.visit(statement) for statement in source.node.body]
        begin.value.args = [ast.Name(self.parameters[0], ast.Load()), self.cache, self.index]
        source.node.body = [begin, *body]

    def _is_self(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.parameters[0]

    def visit_Call(self, node: ast.Call) -> ast.Call:  # noqa: N802
        node = super().visit_Call(node)
        if not isinstance(node.func, ast.Attribute):
            return node
        of, name = node.func.value, node.func.attr
        if self._is_self(of) and name in self.norms and len(node.args) == 1 and not node.keywords:
            node.args.insert(0, ast.Constant(name))
            node.func = ast.Attribute(ast.Name(_STEP, ast.Load()), "norm", ast.Load())
        elif name == "update" and isinstance(of, ast.Name) and len(node.args) >= 3:
            index = node.args[2]
            if of.id in self.parameters and isinstance(index, ast.Attribute) and self._is_self(index.value):
                self.cache, self.index = of, index
                node.args.insert(0, of)
                node.func = ast.Attribute(ast.Name(_STEP, ast.Load()), "update", ast.Load())
        return node

    def visit_Return(self, node: ast.Return) -> ast.Return:  # noqa: N802
        self.generic_visit(node)
        end = ast.Attribute(ast.Name(_STEP, ast.Load()), "end", ast.Load())
        node.value = ast.Call(end, [node.value or ast.Constant(None)], [])
        return node

    def visit_FunctionDef(self, node: ast.AST) -> ast.AST:  # noqa: N802  a nested function is called at another time
        return node

    visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = visit_FunctionDef  # noqa: N815


class _Recorder:
    """Stands for a Step in a trial. It calls what the method would call, and keeps the arguments and results."""

    def __init__(self, module: nn.Module, cache: Any, index: int):
        self.module = module
        self.normalised: list[tuple[str, Tensor, Tensor]] = []
        self.rotated: list[tuple[RotaryFunction, Tensor, Tensor]] = []
        self.updated: list[tuple[Tensor, Tensor]] = []

    def norm(self, name: str, x: Tensor) -> Tensor:
        self.normalised.append((name, x, result := getattr(self.module, name)(x)))
        return result

    @staticmethod
    def rotate(function: RotaryFunction, x: tuple[Tensor, ...], tables: tuple, unsqueeze_dim: int, step: Any) -> Any:
        result = function.rotator.rotate(x, tables, unsqueeze_dim)
        results = result if isinstance(result, tuple) else (result,)
        step.rotated += [(function, *pair) for pair in zip(x, results, strict=True)]
        return result

    def update(self, cache: Any, k: Tensor, v: Tensor, *args, **kwargs) -> Any:
        self.updated.append((k, v))
        return cache.update(k, v, *args, **kwargs)

    def end(self, result: Any) -> Any:
        return result


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    """Returns whether one tensor is a view of the other with the same elements."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()


class Fuser:
    """Fuses the methods of one model."""

    def __init__(self, model: nn.Module, rebuilder: Rebuilder):
        self.rebuilder = rebuilder
        self._plans: dict[Any, tuple[Plan, str]] = {}
        self._functions: dict[tuple[Callable, Plan], Callable] = {}
        self._norms: dict[nn.Module, Norm | None] = {}
        self.tables = list(_tables_of(model))

    def fuse(self, module: nn.Module, function: Callable, rebuilt: Callable) -> tuple[Callable, str]:
        """Returns the function that stands for this method of a module, and what it fuses, in words.

        rebuilt is the method that calls torch_rope and fuses nothing, which is returned if nothing can be fused.
        """
        inner = function
        while wrapped(inner) is not None:
            inner = wrapped(inner)
        sites, variables = self.rebuilder.called(inner)
        if not sites or any(isinstance(call, Registered) for call in rebuilt._torch_rope):
            return rebuilt, "nothing fused: another function calls the rotary function"
        norms = {name: norm for name, child in module.named_children() if (norm := self._norm(child)) is not None}
        key = (function, tuple(norms.items()), _kind(module))
        if key not in self._plans:
            self._plans[key] = _Trial(self, module, function, inner, sites, variables, norms).plan()
        plan, why_not = self._plans[key]
        if not plan.fuses:
            return rebuilt, f"nothing fused: {why_not}"
        if (function, plan) not in self._functions:
            new, _ = self.build(function, inner, sites, variables, plan.put_off, functools.partial(Step, plan))
            new._torch_rope = rebuilt._torch_rope
            self._functions[function, plan] = new
        return self._functions[function, plan], f"{plan}{why_not and '; not fused: '}{why_not}"

    def build(
        self,
        function: Callable,
        inner: types.FunctionType,
        sites: list[Site],
        variables: dict[str, Callable],
        norms: Iterable[str],
        step: Callable,
        rotate: Callable = Step.rotate,
    ) -> tuple[Callable, _Fused]:
        """Returns the method that passes its calls to what step(module, cache, index) returns, and how it was made.

        rotate is called with the rotary function, its arguments, and what step returned.
        """
        source = Source(inner)
        fused = _Fused(source, {site.name for site in sites}, norms)
        calls = {
            with_caller(s.name): s.function.with_signature(functools.partial(rotate, s.function), "step") for s in sites
        }
        new = source.rebuild(variables | calls | {_STEP + "_of": step})
        return decorated(function, new), fused

    def _norm(self, module: nn.Module) -> Norm | None:
        if module not in self._norms:
            self._norms[module] = find_norm(module)
        return self._norms[module]


# ---- finding out what can be fused ----

_TRIAL = "torch_rope_trial"


def _kind(module: nn.Module) -> tuple:
    """Returns what the layers that need only one trial have in common."""
    plain = {n: v for n, v in vars(module).items() if isinstance(v, bool | int | float | str) and "idx" not in n}
    config = getattr(module, "config", None)
    return (id(config), tuple(plain.items()), tuple((name, repr(child)) for name, child in module.named_children()))


def _tables_of(model: nn.Module) -> Iterator[tuple]:
    """Yields the tables that the rotary modules of a model make for a batch of 2 sequences of 7 tokens."""
    parameter = next(model.parameters(), torch.empty(0))
    for module in model.modules():
        arguments = inspect.signature(type(module).forward).parameters
        if list(arguments)[1:3] != ["x", "position_ids"]:
            continue
        layer_types = getattr(module, "layer_types", None) if "layer_type" in arguments else None
        x, one_axis = parameter.new_zeros(2, 7, 1), torch.randint(50, (2, 7), device=parameter.device)
        for positions, layer_type in product((one_axis, one_axis.expand(3, 2, 7)), layer_types or [None]):
            with contextlib.suppress(Exception):  # the module does not take positions of this shape
                tables = copy.deepcopy(module)(x, positions, *([layer_type] if layer_type else []))
                yield tables if isinstance(tables, tuple) else (tables,)


class _Trial:
    """Runs a method of a module on random numbers, as it is and rebuilt."""

    def __init__(self, fuser, module, function, inner, sites, variables, norms):
        self.fuser, self.module, self.function, self.norms = fuser, module, function, norms
        self.parts = function, inner, sites, variables
        self.parameters = inspect.signature(inner).parameters
        self.seen: list[Tensor] = []
        self.dtype = next(module.parameters(), torch.empty(0)).dtype

    def plan(self) -> tuple[Plan, str]:
        """Returns the calls that can be fused, and the reasons for what cannot."""
        with quietly(), self._on_its_own():
            try:
                plan, reasons = self._proposal()
            except NotImplementedError as error:
                return Plan(), str(error)
            except Exception as error:
                return Plan(), f"the method could not be tried: {type(error).__name__}: {error}"
            without = {"cache": False, "v_norm": ""}
            proposals = [
                (plan, ""),
                (replace(plan, v_norm=""), plan.v_norm),
                (replace(plan, **without), "the cache"),
                (replace(plan, norms=()), "the norms"),
                (replace(plan, norms=(), **without), "the norms and the cache"),
                (replace(plan, in_place=False, **without), "the cache and in place"),
            ]
            for proposal, less in proposals:
                if proposal.fuses and self._agrees(proposal):
                    return proposal, "; ".join(reasons + [f"{less}: the results would differ"] * bool(less))
        return Plan(), "the results would differ"

    # -- running the method --

    @contextlib.contextmanager
    def _on_its_own(self) -> Iterator[None]:
        """Makes the module deterministic, and keeps what its attention is called with."""
        config, modules = getattr(self.module, "config", None), list(self.module.modules())
        training = [m.training for m in modules]
        attention = getattr(config, "_attn_implementation", None)
        ALL_ATTENTION_FUNCTIONS[_TRIAL] = self._attention
        try:
            self.module.eval()
            if attention is not None:
                config._attn_implementation_internal = _TRIAL
            yield
        finally:
            del ALL_ATTENTION_FUNCTIONS[_TRIAL]
            if attention is not None:
                config._attn_implementation_internal = attention
            for m, t in zip(modules, training, strict=True):
                m.training = t

    def _attention(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args, **kwargs) -> tuple:
        self.seen += [x.clone() for x in (q, k, v)]
        return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]), None

    def _inputs(self, tables: tuple, first: int, last: int, **given: Any) -> dict[str, Any]:
        """Returns the arguments of the method for the tokens from first to last."""
        features = next(m.in_features for m in self.module.children() if hasattr(m, "in_features"))
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2, 7, features, generator=generator).to(next(self.module.parameters()))[:, first:last].clone()
        cut = tuple(t[:, first:last].clone() for t in tables)
        known = {
            "position_embeddings": cut if len(cut) == 2 else cut[0],
            "position_ids": torch.arange(first, last).expand(2, -1),
            "shared_kv_states": {},
            **dict(zip(("cos", "sin"), cut, strict=False)),
        }
        names = [n for n, p in self.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][1:]
        arguments = {names[0]: x} | {n: known[n] for n in names[1:] if n in known}
        missing = [n for n in names if n not in arguments and self.parameters[n].default is inspect.Parameter.empty]
        return arguments | dict.fromkeys(missing) | {n: v for n, v in given.items() if n in names}

    def _run(self, function: Callable, mode: str) -> list[Tensor]:
        """Returns the tensors that attention saw, the results, and the tensors of the cache or the gradients."""
        self.seen = []
        results = []

        def call(first: int, last: int, **given) -> dict:
            inputs = self._inputs(self.tables, first, last, **given)
            before = copy.deepcopy({n: v for n, v in inputs.items() if n not in given})
            out = function(self.module, **inputs)
            results.append(out[0] if isinstance(out, tuple) else out)
            for name, old in before.items():
                new = inputs[name]
                for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (new, old)), strict=True):
                    if isinstance(a, Tensor) and not torch.equal(a, b):
                        results.append(a)  # the method overwrote its argument
            return inputs

        if mode == "gradients":
            with torch.enable_grad():
                names = [n for n, p in self.parameters.items()][1:2]
                inputs = self._inputs(self.tables, 0, 7)
                inputs[names[0]].requires_grad_()
                out = function(self.module, **inputs)
                out = [*self.seen, out[0] if isinstance(out, tuple) else out]
                leaves = [inputs[names[0]], *(p for p in self.module.parameters() if p.requires_grad)]
                loss = sum(
                    (o.float() * torch.linspace(-1, 1, o.numel(), device=o.device).view_as(o)).sum() for o in out
                )
                results = [g for g in torch.autograd.grad(loss, leaves, allow_unused=True) if g is not None]
        elif mode == "no cache":
            call(0, 7)
        else:
            make = {"static": lambda: StaticLayer(9), "sliding": lambda: StaticSlidingWindowLayer(9, 6)}.get(
                mode, DynamicLayer
            )
            index = int(getattr(self.module, self.index))
            cache = Cache(layers=[make() for _ in range(index + 1)])
            for first, last in ((0, 5), (5, 6), (6, 7)):
                call(first, last, **{self.cache: cache})
            results += [cache.layers[index].keys, cache.layers[index].values]
        return [*self.seen, *results]

    def _agrees(self, plan: Plan) -> bool:
        """Returns whether the method, fused by this plan, has the results of the method as it is."""
        fused, _ = self.fuser.build(*self.parts, plan.put_off, functools.partial(Step, plan))
        for mode in ["no cache", "gradients", *(["static", "sliding", "dynamic"] if self.cache else [])]:
            try:
                expected = self._run(self.function, mode)
            except Exception:  # the method itself does not run so
                continue
            try:
                actual = self._run(fused, mode)
            except Exception:
                return False
            if len(actual) != len(expected) or not all(
                close(a, e, self.dtype) for a, e in zip(actual, expected, strict=True)
            ):
                return False
        return True

    # -- proposing a plan --

    def _proposal(self) -> tuple[Plan, list[str]]:
        """Returns what the method seems to call, and reasons why it may not be fused."""
        recorder = None

        def record(module, cache, index):
            nonlocal recorder
            recorder = _Recorder(module, cache, index)
            return recorder

        function, made = self.fuser.build(*self.parts, self.norms, record, _Recorder.rotate)
        self.cache = made.cache.id if isinstance(made.cache, ast.Name) else None
        self.index = made.index.attr if self.cache else None
        error: Exception = NotImplementedError("no module of the model makes tables from x and position_ids")
        outputs: dict[str, Tensor] = {}
        hooks = [
            m.register_forward_hook(lambda m, args, out, name=name: outputs.update({name: out}))
            for name, m in self.module.named_children()
        ]
        try:
            for tables in self.fuser.tables:
                self.tables = tables
                try:
                    self._run(function, "dynamic" if self.cache else "no cache")
                    break
                except Exception as e:  # these tables are for another layer
                    error = e
            else:
                raise error
        finally:
            for hook in hooks:
                hook.remove()
        return self._plan_of(recorder, outputs)

    def _plan_of(self, recorder: _Recorder, outputs: dict[str, Tensor]) -> tuple[Plan, list[str]]:
        rotated, reasons = recorder.rotated, []
        rotation = rotated[0][0].rotation
        if not rotation.simple or len(rotated) > 2:
            raise NotImplementedError("the rotation is more than one operator on q and k as they are")
        norm_of = [
            next((name for name, _, out in recorder.normalised if _same_numbers(out, x)), None) for _, x, _ in rotated
        ]
        norms = ()
        if recorder.normalised and all(norm_of) and not rotation.inverse:
            norms = tuple((name, self.norms[name]) for name in norm_of)
            if len({norm.eps for _, norm in norms}) > 1 or any(not norm.weight for _, norm in norms):
                norms = ()
        if self.norms and not norms:
            reasons.append(f"{', '.join(self.norms)}: not the norm of what is rotated")
        cache, v_norm = False, ""
        if recorder.updated and len(rotated) == 2:
            k, v = recorder.updated[0]
            cache = _same_numbers(rotated[1][2], k) and k.dim() == v.dim() == 4 and not rotation.inverse
            v_norm = next((name for name, _, out in recorder.normalised if _same_numbers(out, v)), "")
            if v_norm and (self.norms[v_norm].weight or {norm.eps for _, norm in norms} != {self.norms[v_norm].eps}):
                v_norm = ""
        if recorder.updated and not cache:
            reasons.append("the cache: what is stored is not the rotated k alone")
        inputs = [x for name, x, _ in recorder.normalised if name in (*norm_of, v_norm)] + [x for _, x, _ in rotated]
        producers = [
            n for n, out in outputs.items() if isinstance(out, Tensor) and any(_shares(out, x) for x in inputs)
        ]
        return Plan(norms, v_norm, cache, True, tuple(producers)), reasons


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
