"""How the operators run on DTensors: every rank calls them on what it holds, and nothing is sent.

A token is turned by its own position, whatever other tokens, heads and sequences do. So a dimension of the mesh may split
the batch or the sequence, if it splits them alike for all that have them (q, k, positions, tables by token); or heads,
those of q and those of k each for themselves. And q may be a sum of what the ranks hold (Partial): a rotation is linear.
An argument that is only read, and whole on every rank, is cut where the others are split. All else would have to be sent,
and raises NotImplementedError. DTensor would redistribute it, also where the operator writes: what was written is lost.
"""

import functools
from collections.abc import Callable

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo

from torch_rope._signatures import Signature, operators


def _of_dim(placement: Placement, dim: int) -> Placement:
    """The placement that splits another dimension in the same way."""
    return Shard(dim) if placement.is_shard() else type(placement)(dim, split_factor=placement.split_factor)


class _Argument:
    """A tensor of a call. axes: what its dimensions are."""

    def __init__(self, op: str, name: str, spec: DTensorSpec, axes: tuple[str, ...], written: bool):
        self.op, self.name, self.spec, self.axes, self.written = op, name, spec, axes, written
        self.placements = list(spec.placements)  # as the operator takes it, in the end

    def axis(self, m: int) -> str | None:
        """What mesh dimension m splits: one of axes, "sum" for Partial, or nothing."""
        placement = self.placements[m]
        if placement.is_replicate():
            return None
        return "sum" if placement.is_partial() else self.axes[placement.dim]

    def follow(self, first: "_Argument", m: int) -> None:
        """Splits the same axis as first does, and in the same way."""
        axis, placement = first.axis(m), first.placements[m]
        dim = self.axes.index(axis)
        needs = _of_dim(placement, dim)
        if self.placements[m] == needs:
            return
        # A rank can cut its part out of what it holds, unless a later mesh dimension has cut that up already.
        cut_up = any(getattr(p, "dim", None) == dim for p in self.placements[m + 1 :])
        if self.axis(m) is not None or self.written or cut_up:
            why = ", because it is written" if self.written else ""
            self.refuse(m, f"where {first.name} is {placement!r}, its {axis}; needs {needs!r}{why}")
        self.placements[m] = needs

    def refuse(self, m: int, why: str) -> None:
        names = self.spec.mesh.mesh_dim_names
        where = repr(names[m]) if names else m
        raise NotImplementedError(
            f"{self.op}: {self.name} is {self.spec.placements[m]!r} on mesh dimension {where}, {why}"
        )


class _Call(dict):
    """The tensors of a call, by name and in order."""

    def __init__(self, signature: Signature, schema: OpSchema):
        self.signature, given = signature, signature.by_name(schema.args_schema)
        specs = {name: a.strategies[0].output_spec for name, a in given.items() if isinstance(a, OpStrategy)}
        x = specs[signature.rotated[0]].shape if signature.rotated else ()
        for name, spec in specs.items():
            axes = signature.axes(name, len(spec.shape))
            if axes[:1] == ("batch or 1",):
                axes = ("batch" if len(x) == 4 and spec.shape[0] == x[0] else "batch of 1", *axes[1:])
            if axes[:1] == ("blocks",) and "slots" not in specs and len(x) == 4 and spec.shape[0] == x[0]:
                axes = ("batch", *axes[1:])  # row b of the batch writes block b
            self[name] = _Argument(f"rope.{signature.name}", name, spec, axes, name in signature.written)

    def check(self, m: int, *may_sum: str, may_split: tuple[str, ...] = ("batch", "seq", "heads")) -> None:
        """may_sum: arguments in which the operator is linear. may_split: what mesh dimension m may split."""
        for a in self.values():
            if a.axis(m) == "sum":
                if a.name not in may_sum or a.placements[m] not in (Partial("sum"), Partial("avg")):
                    a.refuse(m, "which has to be reduced before")
            elif a.axis(m) not in (None, *may_split):
                a.refuse(m, f"its {a.axis(m)}, which cannot be split")

    def split_tokens(self, m: int) -> bool:
        """Where mesh dimension m splits batch or seq of one argument, it does so for all. Whether it does."""
        first = next((a for a in self.values() if a.axis(m) in ("batch", "seq")), None)
        if first is None:
            return False
        axis, placement = first.axis(m), first.placements[m]
        angles = [self[name] for name in ("cos", "sin", "positions") if name in self and axis in self[name].axes]
        if axis == "seq":
            if not angles:
                first.refuse(m, "its seq, without positions: pass those of the tokens, split alike")
            for a in angles:  # not cut: the tokens of a rank need not be in order, and positions go with them
                if a.axis(m) is None:
                    a.refuse(m, f"where {first.name} is {placement!r}, its seq; needs Shard(dim={a.axes.index(axis)})")
        for a in self.values():
            if axis in a.axes:
                a.follow(first, m)
            elif a.written:
                a.refuse(m, f"where {first.name} is {placement!r}, its {axis}: each rank would write what it has")
            elif a.axis(m) is not None:
                a.refuse(m, f"its {a.axis(m)}, where {first.name} is {placement!r}, its {axis}")
        return True

    def split_heads(self, m: int, *names: str) -> bool:
        """Where mesh dimension m splits the heads of one of these, it does so for all. Whether it does."""
        those = [self[name] for name in names]
        first = next((a for a in those if a.axis(m) == "heads"), None)
        if first is not None:
            for a in those:
                a.follow(first, m)
        return first is not None


# Each rule settles a call on one dimension of the mesh, and returns the placements of the results there.
_Rule = Callable[[_Call, int], list[Placement]]


def _rotate(call: _Call, m: int) -> list[Placement]:
    rotated = call.signature.rotated
    call.check(m, *(rotated if "q_norm_weight" not in call else ()))  # a norm is not linear
    call.split_tokens(m)
    return [call[name].placements[m] for name in rotated]


def _rotate_into_cache(call: _Call, m: int) -> list[Placement]:
    call.check(m)
    if not call.split_tokens(m):
        call.split_heads(m, "k_cache", "v_cache", "k", "v")
    return []


def _norm_backward(call: _Call, m: int) -> list[Placement]:
    call.check(m, "q_out_grad", "k_out_grad")
    call.split_tokens(m)
    grads, of_weights = [], []
    for name in ("q", "k"):
        call.split_heads(m, f"{name}_out_grad", name)
        grad = call[f"{name}_out_grad"]
        grads.append(grad.placements[m])
        of_weights.append(grad.placements[m] if grad.axis(m) in (None, "sum") else Partial())
    return grads + of_weights


def _table_backward(call: _Call, m: int) -> list[Placement]:
    call.check(m, "q_out_grad", "k_out_grad")
    if call.split_tokens(m):
        return [a.placements[m] if a.axis(m) else Partial() for a in (call["cos"], call["sin"])]
    names = [name for name in ("q", "k") if name in call]
    for name in names:
        call.split_heads(m, f"{name}_out_grad", name)
    grads = [call[f"{name}_out_grad"] for name in names]
    if all(grad.axis(m) is None for grad in grads):
        return [Replicate()] * 2
    for grad in grads:  # a sum over ranks counts what is whole once
        if grad.axis(m) is None:
            grad.placements[m] = Partial()
        elif grad.placements[m] == Partial("avg"):
            grad.refuse(m, "which has to be reduced before")
    return [Partial()] * 2


def _cos_sin(call: _Call, m: int) -> list[Placement]:
    call.check(m, may_split=("places",))
    positions = call["positions"]
    placement = positions.placements[m]
    if positions.axis(m) and positions.axes[0] == "axes":
        placement = _of_dim(placement, placement.dim - 1)
    return [placement] * 2


def _strategy(signature: Signature, rule: _Rule, schema: OpSchema) -> OpStrategy:
    """The one way to run a call."""
    mesh = schema.get_mesh_from_args()
    call = _Call(signature, schema)
    results = zip(*(rule(call, m) for m in range(mesh.ndim)), strict=True)
    outs = [DTensorSpec(mesh, placements) for placements in results][: len(schema.op._schema.returns)]
    ins = [
        a.spec
        if a.placements == list(a.spec.placements)
        else DTensorSpec(mesh, tuple(a.placements), a.spec.tensor_meta)
        for a in call.values()
    ]
    results = None if not outs else outs[0] if len(outs) == 1 else tuple(outs)
    return OpStrategy([OpSpec(results, ins, redistribute_cost=[[0.0]] * len(ins))])


_RULES = {
    "_rotate_table_backward": _table_backward,
    "_norm_rotate_qk_backward": _norm_backward,
    "rotate_into_cache_": _rotate_into_cache,
}

# Not by the public register_sharding: it keeps a decision for every value of offset, one more at each step of decoding,
# and it enumerates placements, of which DTensor takes the nearest where the given ones are missing.
for _signature in operators():
    _rule = _RULES.get(_signature.name, _rotate if _signature.rotated else _cos_sin)
    _names = _signature.arguments
    # What a decision is remembered by: the tensors in order; from here on also which of them are None; and dtype.
    _remembered = _names.index("slots") if "slots" in _names else len(_names)
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(
        _signature.op, functools.partial(_strategy, _signature, _rule), RuntimeSchemaInfo(_remembered, ["dtype"])
    )
