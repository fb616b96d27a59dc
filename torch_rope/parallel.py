"""The rules for DTensors: each rank calls the operator on its local tensors, and nothing is communicated.

The import of this module registers them. The functions of torch_rope and RotaryEmbedding import it when they meet a
DTensor; a program that calls torch.ops.rope itself must import it.

The rotation of a token depends only on its own position, not on other tokens, heads or sequences. A dimension of the
mesh may therefore split

- the batch or the sequence, if it splits them in the same way for every argument that has them (q, k, positions, tables
  by token); or
- the heads, those of q and those of k independently, unless a norm takes all heads of a token together: its sum would
  cross ranks.

q and k may also be Partial, that is, sums of what the ranks hold, because a rotation is linear. An argument that is
only read and is whole on every rank is cut to match the others.

Every other placement would need communication, and raises NotImplementedError. Otherwise DTensor would redistribute the
argument before the call. For a tensor that the operator writes, the operator would then write to a temporary copy, and
the result would be lost.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor.placement_types import _StridedShard

from ._signatures import Signature, operators


def _of_dim(placement: Placement, dim: int) -> Placement:
    """Returns the placement that splits dimension dim as `placement` splits its own."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


class _Argument:
    """A tensor argument of a call. axes: the names of its dimensions. keyword: it is keyword-only, and DTensor passes
    such an argument as it is."""

    def __init__(self, op: str, name: str, spec: DTensorSpec, axes: tuple[str, ...], written: bool, keyword: bool):
        self.op, self.name, self.spec, self.axes, self.written, self.keyword = op, name, spec, axes, written, keyword
        self.placements = list(spec.placements)  # the placements that the operator takes it with; the rules change them

    def axis(self, m: int) -> str | None:
        """Returns what mesh dimension m splits: the name of an axis, "sum" for Partial, or None for Replicate."""
        placement = self.placements[m]
        if isinstance(placement, Shard | _StridedShard):
            return self.axes[placement.dim]
        return None if placement.is_replicate() else "sum"

    def follow(self, first: "_Argument", m: int) -> None:
        """Splits this argument along the same axis and in the same way as mesh dimension m splits `first`."""
        axis, placement = first.axis(m), first.placements[m]
        dim = self.axes.index(axis)
        needs = _of_dim(placement, dim)
        if self.placements[m] == needs:
            return
        # A rank can cut its part out of its local tensor, unless a later mesh dimension already splits the same axis.
        cut_up = any(getattr(p, "dim", None) == dim for p in self.placements[m + 1 :])
        if self.axis(m) is not None or self.written or self.keyword or cut_up:
            why = f", and {self.name} is written in place" if self.written else ""
            self.refuse(m, f"be {needs!r}, because {first.name} is {placement!r}, split along its {axis}{why}")
        self.placements[m] = needs

    def refuse(self, m: int, must: str) -> None:
        """Raises the error that says what this argument must be on mesh dimension m."""
        names = self.spec.mesh.mesh_dim_names
        where = repr(names[m]) if names else m
        raise NotImplementedError(
            f"{self.op}: {self.name} is {self.spec.placements[m]!r} on mesh dimension {where} but must {must}"
        )


class _Call(dict):
    """The tensor arguments of a call, by name, in the order of the schema."""

    def __init__(self, signature: Signature, schema: OpSchema):
        self.signature, given = signature, signature.by_name(schema.args_schema) | schema.kwargs_schema
        specs = {name: a.strategies[0].output_spec for name, a in given.items() if isinstance(a, OpStrategy)}
        x = specs[signature.rotated[0]].shape if signature.rotated else ()
        for name, spec in specs.items():
            axes = signature.axes(name, len(spec.shape))
            if axes[:1] == ("batch or 1",):
                axes = ("batch" if len(x) == 4 and spec.shape[0] == x[0] else "batch of 1", *axes[1:])
            if axes[:1] == ("blocks",) and "slots" not in specs and len(x) == 4 and spec.shape[0] == x[0]:
                axes = ("batch", *axes[1:])  # sequence b writes to block b
            if name.endswith("_scale") and spec.shape.numel() == 1:
                axes = ("one element",)
            written = name in signature.written and not (name == "q" and "q_out" in specs)
            keyword = name in schema.kwargs_schema
            self[name] = _Argument(f"rope.{signature.name}", name, spec, axes, written, keyword)

    def check(self, m: int, *may_sum: str, may_split: tuple[str, ...] = ("batch", "seq", "heads")) -> None:
        """Raises an error if mesh dimension m splits an argument along an axis that is not in may_split, or if an
        argument is a sum and its name is not in may_sum, the arguments in which the operator is linear."""
        for a in self.values():
            if a.axis(m) == "sum":
                if a.name not in may_sum or a.placements[m] not in (Partial("sum"), Partial("avg")):
                    a.refuse(m, "be reduced first; call its redistribute method")
            elif a.axis(m) not in (None, *may_split):
                a.refuse(m, f"not be split along its {a.axis(m)}")

    def split_tokens(self, m: int) -> bool:
        """Makes mesh dimension m split batch, or seq, of all arguments if it splits that of one. Returns whether it
        does."""
        first = next((a for a in self.values() if a.axis(m) in ("batch", "seq")), None)
        if first is None:
            return False
        axis, placement = first.axis(m), first.placements[m]
        angles = [self[name] for name in ("cos", "sin", "positions") if name in self and axis in self[name].axes]
        if axis == "seq":
            if not angles:
                why = "because positions is None; pass the positions of the tokens, split in the same way"
                first.refuse(m, f"not be split along its seq, {why}")
            for a in angles:
                # Positions that are whole are not cut: the tokens of a rank need not be contiguous (context parallel
                # permutes them), and nothing here tells which positions are theirs.
                if a.axis(m) is None:
                    needs = f"Shard(dim={a.axes.index(axis)})"
                    a.refuse(m, f"be {needs}, because {first.name} is {placement!r}, split along its seq")
        for a in self.values():
            if axis in a.axes:
                a.follow(first, m)
            elif a.written:
                why = f"because {first.name} is {placement!r}, split along its {axis}"
                a.refuse(m, f"not be written, {why}: each rank would write only its own tokens")
            elif a.axis(m) is not None:
                a.refuse(m, f"be Replicate(), because {first.name} is {placement!r}, split along its {axis}")
        return True

    def split_heads(self, m: int, *groups: tuple[str, ...]) -> None:
        """Makes mesh dimension m split the heads of all arguments of a group if it splits those of one.

        Tables by head have the heads of q and of k, so the groups of q and k become one. Arguments that the call lacks
        or that have no heads are left out.
        """
        by_head = [name for name in ("cos", "sin") if name in self and "heads" in self[name].axes]
        if by_head:
            rotated = [group for group in groups if not group[0].startswith("v_")]
            groups = (sum(rotated, tuple(by_head)), *(group for group in groups if group not in rotated))
        for group in groups:
            arguments = [self[name] for name in group if name in self and "heads" in self[name].axes]
            first = next((a for a in arguments if a.axis(m) == "heads"), None)
            for a in arguments if first is not None else ():
                a.follow(first, m)


# A rule checks a call on one mesh dimension, adjusts the placements of its arguments, and returns those of its results.
_Rule = Callable[[_Call, int], list[Placement]]


def _check_norm(call: _Call, m: int, **normalised: tuple[str, ...]) -> None:
    """Raises an error if mesh dimension m splits heads that are normalised together. normalised: for q and k the names
    of the arguments that have their heads."""
    for x, names in normalised.items():
        weight = call.get(f"{x}_norm_weight")
        if weight is None or "heads" not in weight.axes:
            continue
        for a in (weight, *(call[name] for name in names if name in call)):
            if a.axis(m) == "heads":
                how = f"call redistribute to gather {a.name} or to split its batch, or normalise {x} before the call"
                why = f"because {weight.name} normalises all heads of a token together, and a sum would cross ranks"
                a.refuse(m, f"not be split along its heads, {why}; {how}")


def _rotate(call: _Call, m: int) -> list[Placement]:
    rotated = call.signature.rotated
    _check_norm(call, m, q=("q",), k=("k",))
    call.check(m, *(rotated if "q_norm_weight" not in call else ()))  # a norm is not linear
    call.split_tokens(m)
    call.split_heads(m, *((name, "q_factor") if name == "q" else (name,) for name in rotated))
    return [call[name].placements[m] for name in rotated]


def _rotate_into_cache(call: _Call, m: int) -> list[Placement]:
    _check_norm(call, m, q=("q", "q_out"), k=("k", "k_cache"))
    call.check(m)
    if not call.split_tokens(m):
        call.split_heads(
            m, ("q_out", "q", "q_scale", "q_factor"), ("k_cache", "k", "k_scale"), ("v_cache", "v", "v_scale")
        )
    return []


def _norm_backward(call: _Call, m: int) -> list[Placement]:
    _check_norm(call, m, q=("q_out_grad", "q"), k=("k_out_grad", "k"))
    call.check(m, "q_out_grad", "k_out_grad")
    call.split_tokens(m)
    call.split_heads(m, ("q_out_grad", "q", "q_factor"), ("k_out_grad", "k"))
    grads, of_weights = [], []
    for name in ("q", "k"):
        grad = call[f"{name}_out_grad"]
        grads.append(grad.placements[m])
        of_weights.append(grad.placements[m] if grad.axis(m) in (None, "sum") else Partial())
    return grads + of_weights


def _cos_sin(call: _Call, m: int) -> list[Placement]:
    call.check(m, may_split=("positions",))
    positions = call["positions"]
    placement = positions.placements[m]
    if positions.axis(m) and positions.axes[0] == "axes":
        placement = _of_dim(placement, placement.dim - 1)
    return [placement] * 2


def _strategy(signature: Signature, rule: _Rule, schema: OpSchema) -> OpStrategy:
    """Returns the only strategy for a call: the placements of its arguments and results, at no cost."""
    mesh = schema.get_mesh_from_args()
    call = _Call(signature, schema)
    by_result = zip(*(rule(call, m) for m in range(mesh.ndim)), strict=True)
    outs = [DTensorSpec(mesh, placements) for placements in by_result][: len(schema.op._schema.returns)]
    ins = [
        a.spec
        if a.placements == list(a.spec.placements)
        else DTensorSpec(mesh, tuple(a.placements), a.spec.tensor_meta)
        for a in call.values()
        if not a.keyword
    ]
    results = None if not outs else outs[0] if len(outs) == 1 else tuple(outs)
    return OpStrategy([OpSpec(results, ins, redistribute_cost=[[0.0]] * len(ins))])


_RULES = {"_norm_rotate_qk_backward": _norm_backward, "rotate_into_cache_": _rotate_into_cache}

# The public register_sharding is not used, for two reasons. It caches a decision for every value of offset, so one more
# at each step of decoding. And it takes a list of placements: for a call whose placements are not in the list, DTensor
# redistributes to the nearest ones.
for _signature in operators():
    _rule = _RULES.get(_signature.name, _rotate if _signature.rotated else _cos_sin)
    _names = _signature.arguments
    # The key of a cached decision: the tensors in order, those of keywords, dtype, and from the argument with the number
    # _keyed_from on also which arguments are None.
    _keyed_from = _names.index("slots") if "slots" in _names else len(_names)
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(
        _signature.op,
        functools.partial(_strategy, _signature, _rule),
        RuntimeSchemaInfo(
            _keyed_from, ["dtype", "q_out", "q_scale", "k_scale", "v_scale", "v_norm_weight", "q_factor"]
        ),
    )


def distributed_like(mesh: DeviceMesh, seq: int, angles: dict[str, Any]) -> dict[str, Any]:
    """Returns angles in the form that an operator takes together with a DTensor q of this mesh, which has seq tokens.

    An operator takes either plain tensors or DTensors. So each plain tensor in angles, which must be the same on every
    rank, becomes a replicated DTensor.
    """
    positions = angles["positions"]
    if positions is not None and not isinstance(positions, DTensor) and positions.shape[-1] != seq:
        raise ValueError(
            f"torch_rope.RotaryEmbedding: positions is a plain tensor of shape {list(positions.shape)} but must have "
            f"the positions of all {seq} tokens of the DTensor q; or pass a DTensor, made of the positions "
            "that each rank has: DTensor.from_local(positions, mesh, [Shard(-1)])"
        )
    plain = {n: a for n, a in angles.items() if isinstance(a, torch.Tensor) and not isinstance(a, DTensor)}
    return angles | {name: DTensor.from_local(a, mesh, run_check=False) for name, a in plain.items()}
