"""Tests the operators on DTensors, and modules under PyTorch's parallelisms, on 4 processes (2 too in make exhaustive):
with gloo on a CPU, and with nccl if there are as many GPUs. Results are compared with those of the same call in one
process, and must be equal bit for bit if nothing is summed over ranks."""

import contextlib
import functools
import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from cases import EXHAUSTIVE, OPERATORS, ROOT, covering, python
from ranks import Ranks

import torch_rope

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch was built without distributed"),
    pytest.mark.xdist_group("parallel"),  # one worker runs all these tests and starts the processes once
    pytest.mark.cpu,  # runs on a CPU, or on real GPUs
]
night = pytest.mark.exhaustive
ops = torch.ops.rope

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 4, 6, 4, 2, 8


@pytest.fixture(scope="module")
def processes():
    started = {}
    yield started
    for ranks in started.values():
        ranks.close()


@pytest.fixture(params=[2, 4] if EXHAUSTIVE else [4])
def ranks(request, device, processes):
    """A callable that runs a function on this many processes. If there are four, some of them have no heads of k."""
    world = request.param
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"nccl needs {world} GPUs")
    if (world, device) not in processes:
        processes[world, device] = Ranks(world, device)
    return processes[world, device]


# The mesh is cached: once a process has made a second mesh that is equal, torch 2.13 cannot compile any backward.
@functools.cache
def mesh_of(device, *shape):
    from torch.distributed.device_mesh import init_device_mesh

    shape = shape or (dist.get_world_size(),)
    return init_device_mesh(device, shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


# ---- every placement of every argument is accepted, or raises an error that names the argument, as specified ----
#
# A placement is written as a letter:
# R: whole on every rank. B: split along batch. S: split along seq. H: split along heads.
# D: split along head_dim, rotary_dim / 2 or the rows of a table. P: a sum of what the ranks hold.

DIMS = {
    **dict.fromkeys(("x", "q", "k", "v", "k_cache", "v_cache"), {"B": 0, "S": 1, "H": 2, "D": 3}),
    **dict.fromkeys(("positions", "slots", "cos by token", "sin by token"), {"B": 0, "S": 1, "D": 2}),
    **dict.fromkeys(("cos by token of one", "sin by token of one"), {"S": 1, "D": 2}),
    **dict.fromkeys(("cos by head", "sin by head"), {"B": 0, "S": 1, "H": 2, "D": 3}),
    **dict.fromkeys(("positions of one",), {"S": 0}),
    **dict.fromkeys(("inv_freq", "cos", "sin", "q_norm_weight", "k_norm_weight"), {"D": 0}),
    **dict.fromkeys(("q_norm_weight over heads", "k_norm_weight over heads"), {"H": 0, "D": 1}),
    **dict.fromkeys(("k_scale", "v_scale"), {"H": 0}),
}


def tensors(device):
    """Returns name -> a plain tensor for each argument, the same on every rank."""
    inv_freq = torch_rope.inv_freq(HEAD_DIM, device=device)
    positions = torch.randint(0, 16, (BATCH, SEQ), device=device)
    cos, sin = torch_rope.cos_sin(torch.arange(16, device=device), inv_freq)
    made = {"inv_freq": inv_freq, "positions": positions, "cos": cos, "sin": sin}
    made |= {"cos by token": cos[positions], "sin by token": sin[positions]}
    by_head = torch.randint(0, 16, (BATCH, SEQ, HEADS), device=device)
    made |= {"cos by head": cos[by_head], "sin by head": sin[by_head]}
    made |= {"positions of one": positions[0]}  # [seq], the same for all sequences
    made |= {"cos by token of one": cos[positions[:1]], "sin by token of one": sin[positions[:1]]}
    for name, heads in (("x", HEADS), ("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        made[name] = torch.randn(BATCH, SEQ, heads, HEAD_DIM, device=device)
    for name in ("k_cache", "v_cache"):
        made[name] = torch.randn(BATCH, 16, KV_HEADS, HEAD_DIM, device=device)
    for name in ("q_norm_weight", "k_norm_weight"):
        made[name] = torch.rand(HEAD_DIM, device=device)
    made["q_norm_weight over heads"] = torch.rand(HEADS, HEAD_DIM, device=device)
    made["k_norm_weight over heads"] = torch.rand(KV_HEADS, HEAD_DIM, device=device)
    for name in ("k", "v"):
        made[f"{name}_cache of int8"] = made[f"{name}_cache"].to(torch.int8)
        made[f"{name}_scale"] = torch.rand(KV_HEADS, device=device) + 0.1
    slots = torch.randperm(BATCH * 16, device=device)[: BATCH * SEQ]
    return made | {"slots": slots.view(BATCH, SEQ)}


def distributed(t, mesh, *placements):
    """Returns t as a DTensor. On a mesh dimension that is Partial, each rank holds a different share of the sum."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    sums = [m for m, p in enumerate(placements) if p.is_partial()]
    result = distribute_tensor(
        t.detach(), mesh, [Replicate() if m in sums else p for m, p in enumerate(placements)], src_data_rank=None
    )
    for m in sums:
        # The shares of all ranks add up to 1.
        share = 2 * (1 + mesh.get_local_rank(m)) / (mesh.size(m) * (mesh.size(m) + 1))
        result = DTensor.from_local((result.to_local() * share).to(t.dtype), mesh, placements, run_check=False)
    return result


def placement(name, letter):
    from torch.distributed.tensor import Partial, Replicate, Shard

    return {"R": Replicate(), "P": Partial()}.get(letter) or Shard(DIMS[name][letter])


def placed_on(mesh, plain, letters):
    """Returns DTensors. letters: the name of each -> a letter for each dimension of the mesh."""
    return {n: distributed(plain[n].clone(), mesh, *(placement(n, letter) for letter in p)) for n, p in letters.items()}


# The angle arguments of a call: name -> letter.
ANGLES = [
    *({"inv_freq": "R", "positions": p} for p in "RBSP"),
    *({"cos by token": c, "sin by token": s} for c, s in ("RR", "BB", "SS", "DD", "BR", "SR", "BS")),
    *({"inv_freq": "R", "positions of one": p} for p in "RS"),
    *({"cos by token of one": c, "sin by token of one": s} for c, s in ("RR", "SS", "DD")),
    *({"cos": c, "sin": c, "positions": p} for c, p in ("RR", "DR", "RS")),
    {"inv_freq": "R"},
    {"inv_freq": "D", "positions": "R"},
]


# For an x with as many heads as the tables.
ANGLES_BY_HEAD = [{"cos by head": c, "sin by head": s} for c, s in ("RR", "HH", "HR", "RH", "BB", "SS", "BH", "DD")]


def is_taken(xs, angles, written, linear):
    """Returns whether the specification accepts these placements. xs: the letters of the rotated arguments."""
    if "cos by head" in angles and "H" in xs + list(angles.values()):  # then the heads of all are split
        return set(xs) <= ({"H"} if written else {"H", "R"}) and set(angles.values()) <= {"H", "R"}
    of_tokens = [a for name, a in angles.items() if name not in ("inv_freq", "cos", "sin")]
    letters = xs + list(angles.values())
    if "D" in letters or "P" in angles.values() or ("P" in xs and not linear):
        return False
    split = [s for s in "BS" if s in letters]
    if not split:
        return True
    whole = "" if written else "R"  # an argument that is whole and only read is cut like the others
    takes = split[0] + ("R" if split == ["B"] else "")
    follow = all(x in split[0] + whole for x in xs) and all(a in takes for a in of_tokens)
    return follow and (split == ["B"] or bool(of_tokens))


def with_those_taken(factors, taken):
    """Returns a list of (case, whether it is accepted). In make exhaustive each pair of values occurs, and in accepted
    cases if there is one. Each value occurs with all other arguments whole."""
    whole = {name: values[0] for name, values in factors.items()}
    given = [whole | {name: value} for name, values in factors.items() for value in values]
    given += covering(factors, lambda **case: taken(case), strength=1 + EXHAUSTIVE, exhaustive=())
    given += covering(factors, strength=1 + EXHAUSTIVE, exhaustive=())
    return [(case, taken(case)) for i, case in enumerate(given) if case not in given[:i]]


def cases(op):
    """Yields (argument -> letter, whether the operator accepts them)."""
    names = {"rotate": ["x"], "rotate_": ["x"]}.get(op, ["q", "k"])
    written, linear = op.endswith("_"), not op.startswith("norm")
    norm = {} if linear else {"q_norm_weight": "R", "k_norm_weight": "R"}
    taken = lambda case: is_taken([case[name] for name in names], case["angles"], written, linear)  # noqa: E731
    angles = ANGLES + (ANGLES_BY_HEAD if names == ["x"] else [])
    for case, is_so in with_those_taken(dict.fromkeys(names, "RBSHDP") | {"angles": angles}, taken):
        yield {name: case[name] for name in names} | norm | case["angles"], is_so
    if norm:
        letters = {"q": "R", "k": "R"} | norm | {"inv_freq": "R"}
        yield letters | {"q_norm_weight": "D"}, False
        yield letters | {"k_norm_weight": "P"}, False
        over_heads = {"q_norm_weight over heads": "R", "k_norm_weight over heads": "R"}
        for q, k in itertools.product("RBSH", repeat=2):
            letters = {"q": q, "k": k} | over_heads | {"inv_freq": "R", "positions": "S" if "S" in (q, k) else "R"}
            yield letters, "H" not in (q, k) and len({q, k} - {"R"}) <= 1
        yield {"q": "R", "k": "R"} | over_heads | {"inv_freq": "R", "q_norm_weight over heads": "H"}, False


def is_taken_with_a_cache(case):
    """Returns whether the specification accepts a call of rotate_into_cache_."""
    letters = {letter for name, letter in case.items() if name != "slots"}
    read, caches = {case["k"], case["v"]}, (case["k_cache"], case["v_cache"])
    pairs = (case["k"], case["k_cache"]), (case["v"], case["v_cache"])
    if letters & {"S", "D", "P"}:
        return False
    if "B" in letters:  # sequence b writes to block b
        return not case["slots"] and case["q"] == "B" and caches == ("B", "B") and read <= {"B", "R"}
    return all(x in {"R", cache} and cache in {"R", "H"} for x, cache in pairs)


def cache_cases():
    """Yields (argument -> letter, whether rotate_into_cache_ accepts them)."""
    factors = {"q": "RBSHDP", "k": "RBSHD", "v": "RBSHD", "k_cache": "RBSHD", "v_cache": "RBSHD", "positions": "RB"}
    for case, is_so in with_those_taken(factors | {"slots": ["R", None]}, is_taken_with_a_cache):
        yield {name: letter for name, letter in case.items() if letter} | {"inv_freq": "R"}, is_so


def call(op, arguments):
    """Calls an operator. The name of an argument ends at the first space of the key."""
    arguments = {name.split()[0]: a for name, a in arguments.items()}
    return getattr(ops, op)(**arguments)


def assert_same(result, expected, exact=True):
    """Compares a DTensor with the result of the same call in one process."""
    if not exact:
        return torch.testing.assert_close(result.full_tensor(), expected)
    assert result.shape == expected.shape and result.stride() == expected.stride()
    local = distributed(expected, result.device_mesh, *result.placements).to_local()
    torch.testing.assert_close(result.to_local(), local, rtol=0, atol=0)


def check_placements(device, op, given):
    from torch.distributed.tensor.debug import CommDebugMode

    mesh, plain = mesh_of(device), tensors(device)
    written = [a.name for a in getattr(ops, op).default._schema.arguments if a.alias_info and a.alias_info.is_write]
    once = functools.cache(lambda name, letter: distributed(plain[name].clone(), mesh, placement(name, letter)))
    for letters, taken in given:
        placed = {name: once(name, letter) for name, letter in letters.items()}
        placed |= {name: once.__wrapped__(name, letters[name]) for name in written}
        before = {name: placed[name].to_local() for name in written}
        copies = {name: t.clone() for name, t in before.items()}
        refusal = None
        with CommDebugMode() as communication:
            try:
                results = call(op, placed)
            except NotImplementedError as error:
                refusal = str(error)
        assert (refusal is None) == taken, (letters, refusal)
        assert communication.get_total_counts() == 0, letters
        if refusal is not None:
            form = rf"rope\.{op}: (\w+) is (.*?\)) on mesh dimension 'tp' but must .*"
            name, where = re.fullmatch(form, refusal).groups()
            assert where == repr(next(t for n, t in placed.items() if n.split()[0] == name).placements[0]), refusal
            for name in written:
                assert torch.equal(before[name], copies[name]), (letters, name)
            continue
        expected = {name: plain[name].clone() for name in letters}
        wanted = call(op, expected)
        if written:
            assert results is None
            assert all(placed[name].to_local().data_ptr() == t.data_ptr() for name, t in before.items())
            results, wanted = [placed[name] for name in written], [expected[name] for name in written]
        elif op == "rotate":
            results, wanted = [results], [wanted]
        try:
            for result, value in zip(results, wanted, strict=True):
                assert_same(result, value, exact="P" not in letters.values())
        except AssertionError as error:
            raise AssertionError(letters) from error
        if not written:  # a result is split like its argument
            for name, result in zip([n for n in ("x", "q", "k") if n in letters], results, strict=True):
                assert letters[name] == "R" or result.placements == placed[name].placements


@pytest.mark.parametrize("op", ["rotate", "rotate_", "rotate_qk", "rotate_qk_", "norm_rotate_qk", "rotate_into_cache_"])
def test_every_placement_is_accepted_or_raises_an_error_that_names_it(ranks, op):
    given = list(cache_cases() if op == "rotate_into_cache_" else cases(op))
    assert {taken for _, taken in given} == {True, False}
    ranks(check_placements, op, given)


def test_every_operator_has_a_rule():
    """The rules of the backward operators, of cos_sin and of axial_cos_sin are tested below."""
    from torch.distributed.tensor import DTensor

    rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    assert [op for op in OPERATORS if getattr(ops, op).default not in rules] == []


# ---- gradients ----

FREQUENCIES = {"inv_freq": "R", "positions": "R"}
BY_ROW = {"cos": "R", "sin": "R", "positions": "R"}
WEIGHTS = {"q_norm_weight": "R", "k_norm_weight": "R"}
OVER_HEADS = {f"{name} over heads": letter for name, letter in WEIGHTS.items()}
GRADIENTS = [
    *(("rotate", {"x": x} | FREQUENCIES) for x in "RBHP"),
    *(("rotate", {"x": x} | BY_ROW) for x in "RBH"),
    *(("rotate_qk", dict(zip("qk", qk, strict=True)) | FREQUENCIES) for qk in ("RR", "BB", "HH", "HR", "RH", "HP")),
    *(("rotate_qk", dict(zip("qk", qk, strict=True)) | BY_ROW) for qk in ("RR", "BB", "HH", "HR", "RH")),
    *(("norm_rotate_qk", dict(zip("qk", qk, strict=True)) | WEIGHTS | FREQUENCIES) for qk in ("RR", "BB", "HH", "HR")),
    *(
        ("norm_rotate_qk", {"q": x, "k": x} | OVER_HEADS | FREQUENCIES | {"positions": p})
        for x, p in ("RR", "BR", "SS")
    ),
    ("rotate_qk", {"q": "S", "k": "S"} | FREQUENCIES | {"positions": "S"}),
    ("rotate_qk", {"q": "S", "k": "S"} | BY_ROW | {"positions": "S"}),
    ("rotate_qk", {"q": "S", "k": "S", "cos by token": "S", "sin by token": "S"}),
    ("rotate_qk", {"q": "B", "k": "B", "cos by token": "B", "sin by token": "B"}),
    ("rotate_qk", {"q": "H", "k": "R", "cos by token": "R", "sin by token": "R"}),
    ("norm_rotate_qk", {"q": "S", "k": "S"} | WEIGHTS | FREQUENCIES | {"positions": "S"}),
]


def check_gradients(device, op, letters, incoming):
    """Compares the gradients with those in one process. incoming: the letters of the gradients of the results, or None
    for the placement of the result."""
    mesh, plain = mesh_of(device), tensors(device)
    plain = {name: plain[name] for name in letters}
    learned = [name for name in letters if name not in ("inv_freq", "positions")]
    if op == "norm_rotate_qk":
        learned = [name for name in learned if name in ("q", "k", *WEIGHTS, *OVER_HEADS)]
    placed = {name: distributed(t, mesh, placement(name, letters[name])) for name, t in plain.items()}
    for arguments in (plain, placed):
        for name in learned:
            arguments[name].requires_grad_()
    outs, wanted = call(op, placed), call(op, plain)
    outs, wanted = [(t,) if op == "rotate" else t for t in (outs, wanted)]
    grads = [torch.randn_like(t) for t in wanted]
    placements = [
        out.placements[0] if to is None else placement("q", to) for out, to in zip(outs, incoming, strict=False)
    ]
    placed_grads = [distributed(g, mesh, p) for g, p in zip(grads, placements, strict=True)]
    results = torch.autograd.grad(outs, [placed[name] for name in learned], placed_grads)
    for name, result, value in zip(
        learned, results, torch.autograd.grad(wanted, [plain[name] for name in learned], grads), strict=True
    ):
        torch.testing.assert_close(result.full_tensor(), value, msg=lambda m, at=name: f"{at}: {m}")


def all_gradients(device):
    for op, letters in GRADIENTS:
        for incoming in [(None, None), ("R", "R"), ("P", "P"), ("R", None)][: 4 if EXHAUSTIVE else 3]:
            # The backward of a norm, or of tables, also takes x. A gradient that is a sum must not meet a split
            # argument.
            takes_x = op == "norm_rotate_qk" or "cos" in "".join(letters)
            others = {letter for name, letter in letters.items() if takes_x or name not in ("x", "q", "k")}
            refused = "P" in incoming and others & set("BSH")
            try:
                with pytest.raises(NotImplementedError, match="is Partial") if refused else contextlib.nullcontext():
                    check_gradients(device, op, letters, incoming)
            except BaseException as error:
                raise AssertionError(op, letters, incoming) from error


def test_gradients_are_those_of_one_process(ranks):
    """The gradients of the results are placed like the results, whole, or sums. A sum is an error if another argument
    of the backward operator is split."""
    ranks(all_gradients)


# ---- meshes of two dimensions: one letter for each dimension ----

MESHES = [  # q, k, positions, and whether they are accepted
    ("BH", "BH", "BR", True),
    ("BH", "BR", "RR", True),
    ("SH", "SR", "SR", True),
    ("SH", "SH", "SS", False),
    ("SS", "SS", "SS", True),
    ("SS", "SS", "SR", False),
    ("BS", "BS", "BS", True),
    ("BS", "RS", "RS", True),
    ("BB", "BB", "BR", True),
    ("BB", "BB", "RB", False),  # the second dimension splits positions, so a rank cannot cut them for the first
    ("HH", "HR", "RR", True),
    ("PH", "RP", "RR", True),
]


def check_meshes(device):
    mesh, plain = mesh_of(device, dist.get_world_size() // 2, 2), tensors(device)
    for q, k, positions, taken in MESHES:
        letters = {"q": q, "k": k, "positions": positions, "inv_freq": "RR"}
        placed = placed_on(mesh, plain, letters)
        if not taken:
            message = "on mesh dimension '(dp|tp)' but must be .*, because (q|positions) is "
            with pytest.raises(NotImplementedError, match=message):
                ops.rotate_qk(**placed)
            continue
        wanted = ops.rotate_qk(**{name: plain[name] for name in letters})
        for result, value in zip(ops.rotate_qk(**placed), wanted, strict=True):
            assert_same(result, value, exact="P" not in q + k)
        if "R" in k and "S" in q or "P" in q + k:
            continue
        ops.rotate_qk_(**placed)
        for name, value in zip("qk", wanted, strict=True):
            assert_same(placed[name], value)


def test_placements_on_a_mesh_of_two_dimensions(ranks):
    if ranks.world == 4:
        ranks(check_meshes)


# ---- cos_sin ----


def check_tables(device):
    from torch.distributed.tensor import Replicate, Shard

    mesh, inv_freq = mesh_of(device), torch_rope.inv_freq(HEAD_DIM, device=device)
    by_axis = torch.stack([inv_freq, inv_freq / 3])
    positions = torch.randint(0, 100, (2, BATCH, SEQ), device=device)
    whole = [distributed(t, mesh, Replicate()) for t in (inv_freq, by_axis)]
    for op, frequencies, placed_frequencies, given, first in (
        ("cos_sin", inv_freq, whole[0], positions[0], 0),
        ("axial_cos_sin", by_axis, whole[1], positions, 1),
    ):
        wanted = getattr(ops, op)(given, frequencies)
        for dim in (None, first, first + 1):
            to = Replicate() if dim is None else Shard(dim)
            results = getattr(ops, op)(distributed(given, mesh, to), placed_frequencies)
            for result, value in zip(results, wanted, strict=True):
                assert result.placements == (to if dim is None else Shard(dim - first),)
                assert_same(result, value)
        with pytest.raises(NotImplementedError, match=rf"rope\.{op}: inv_freq is Shard\(dim=0\) .* its (pairs|axes)"):
            getattr(ops, op)(distributed(given, mesh, Replicate()), distributed(frequencies, mesh, Shard(0)))
    with pytest.raises(NotImplementedError, match=r"rope\.axial_cos_sin: positions is Shard\(dim=0\) .* its axes"):
        ops.axial_cos_sin(distributed(positions, mesh, Shard(0)), whole[1])
    # Learned frequencies go through tables by token. The tokens are split along batch or seq, or whole.
    q = torch.randn(BATCH, SEQ, HEADS, HEAD_DIM, device=device)
    learned = [inv_freq.clone().requires_grad_(), distributed(inv_freq, mesh, Replicate()).requires_grad_()]
    for split in (Shard(0), Shard(1), Replicate(), None):
        placed_q, placed_positions = (distributed(t, mesh, split or Replicate()) for t in (q, positions[0]))
        of_one, of_many = {"offset": 3}, {"offset": 3}
        if split is not None:
            of_one, of_many = {"positions": positions[0]}, {"positions": placed_positions}
        one = ops.rotate(q, inv_freq=learned[0], **of_one)
        many = ops.rotate(placed_q, inv_freq=learned[1], **of_many)
        assert_same(many, one)
        one, many = (
            torch.autograd.grad(t.square()[..., 0].sum(), f)[0] for t, f in zip((one, many), learned, strict=True)
        )
        torch.testing.assert_close(many.full_tensor(), one)


def test_cos_sin_is_split_like_its_positions(ranks):
    ranks(check_tables)


# ---- quantised caches ----


def check_scales(device):
    """A scale for each head is split as its cache is. A scale of one element is whole."""
    mesh, plain = mesh_of(device), tensors(device)
    names = ["q", "k", "v", "k_cache of int8", "v_cache of int8", "inv_freq"]
    for letter, k_scale, v_scale, refused in [
        ("H", "H", "H", None),
        ("B", "R", "R", None),
        ("R", "R", "R", None),
        ("H", "R", "H", "k_scale is Replicate"),
        ("H", "H", "R", "v_scale is Replicate"),
        ("R", "H", "R", "k_scale is Shard|k_cache is Replicate"),
        ("B", "R", "H", "v_scale is Shard"),
        ("H", "one", "one", None),
        ("B", "one", "one", None),
    ]:
        one = {name: plain[name].clone() for name in (*names, "k_scale", "v_scale")}
        if k_scale == "one":
            one |= {name: one[name][:1].clone() for name in ("k_scale", "v_scale")}
        letters = dict.fromkeys(names, letter) | {"k_scale": k_scale, "v_scale": v_scale, "inv_freq": "R"}
        placements = {name: placement(name.split()[0], letters[name].replace("one", "R")) for name in one}
        many = {name: distributed(t, mesh, placements[name]) for name, t in one.items()}
        with pytest.raises(NotImplementedError, match=refused) if refused else contextlib.nullcontext():
            call("rotate_into_cache_", many)
            call("rotate_into_cache_", one)
            for name in ("q", "k_cache of int8", "v_cache of int8"):
                assert_same(many[name], one[name])
    letters = dict.fromkeys(["q", "k", "v", "inv_freq", *OVER_HEADS], "R") | {"k_cache": "H", "v_cache": "H"}
    with pytest.raises(NotImplementedError, match="k_cache is .* because k_norm_weight normalises all heads"):
        call("rotate_into_cache_", placed_on(mesh, plain, letters))


def test_scales_are_split_like_their_caches(ranks):
    ranks(check_scales)


# ---- messages ----


def refusals(device):
    mesh, plain = mesh_of(device), tensors(device)
    calls = [
        ("rotate_qk", {"q": "R", "k": "D", "inv_freq": "R"}),
        ("rotate_qk", {"q": "S", "k": "S", "inv_freq": "R", "positions": "R"}),
        ("rotate_qk", {"q": "S", "k": "S", "inv_freq": "R"}),
        ("rotate_into_cache_", {"q": "H", "k": "H", "v": "H", "k_cache": "H", "v_cache": "R", "inv_freq": "R"}),
        ("norm_rotate_qk", {"q": "H", "k": "H"} | OVER_HEADS | {"inv_freq": "R"}),
    ]
    messages = []
    for op, letters in calls:
        with pytest.raises(NotImplementedError) as error:
            call(op, placed_on(mesh, plain, letters))
        messages.append(str(error.value))
    return messages


def test_the_errors_that_the_docs_quote_are_raised(ranks):
    text = (ROOT / "docs" / "parallel.md").read_text().replace("'cp'", "'tp'")
    for message in ranks(refusals)[0]:
        assert f"\n{message}\n" in text


# ---- the cache of sharding decisions ----


def check_decisions(device):
    """A decode step with a new offset makes no new decision. But slots are not taken for positions, nor one dtype for
    another."""
    from torch.distributed.tensor import DTensor

    mesh, plain = mesh_of(device), tensors(device)
    rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    op, asked = ops.rotate_into_cache_.default, []
    rule = rules[op]
    rules[op] = lambda schema: asked.append(schema) or rule(schema)
    split = placed_on(mesh, plain, dict.fromkeys(("q", "k", "v", "k_cache", "v_cache"), "B"))
    whole = placed_on(mesh, plain, dict.fromkeys(("inv_freq", "q_norm_weight", "k_norm_weight"), "R"))
    positions = placed_on(mesh, plain, {"positions": "R"})["positions"]
    try:
        for offset in range(5):
            ops.rotate_into_cache_(**split, inv_freq=whole["inv_freq"], offset=offset)
        assert len(asked) <= 2  # an offset of 0 is not passed on
        ops.rotate_into_cache_(**split, **whole, positions=positions)
        with pytest.raises(NotImplementedError, match="must not be split along its blocks"):
            ops.rotate_into_cache_(**split, **whole, slots=positions)
        for dtype in (torch.float64, None, torch.bfloat16):
            cos, _ = ops.cos_sin(positions, whole["inv_freq"], dtype=dtype)
            assert cos.dtype == cos.to_local().dtype == (dtype or torch.float32)
            assert (cos * 2).dtype == cos.dtype
    finally:
        rules[op] = rule


def test_a_decision_is_cached(ranks):
    ranks(check_decisions)


@pytest.mark.parametrize("first", ["torch_rope", pytest.param("torch.distributed.tensor", marks=night)])
def test_the_rules_are_registered_when_dtensor_is_imported(first):
    """The order of the imports does not matter. torch_rope itself does not import torch.distributed.tensor, which is
    slow."""
    second = {"torch_rope": "torch.distributed.tensor", "torch.distributed.tensor": "torch_rope"}[first]
    program = f"""
import sys, torch, {first}
assert ("torch.distributed.tensor" in sys.modules) == ({first!r} != "torch_rope")
import {second}
from torch.distributed.tensor import DTensor
assert torch.ops.rope.rotate.default in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
assert not any("torch_rope" in type(finder).__module__ for finder in sys.meta_path)
"""
    done = python(program, PYTHONWARNINGS="error")
    assert done.returncode == 0, done.stderr


@night
def test_if_the_rules_cannot_be_registered_the_import_only_warns():
    program = """
import sys, torch_rope
sys.modules["torch_rope._sharding"] = None  # its import fails
import torch.distributed.tensor
"""
    done = python(program, PYTHONWARNINGS="always")
    assert done.returncode == 0 and "torch_rope's operators do not take DTensors" in done.stderr


# ---- torch.compile ----


def compiled(device):
    mesh, plain = mesh_of(device), tensors(device)
    once = {"fullgraph": True, "backend": "aot_eager"}

    def close(results, values):
        for result, value in zip(results, values, strict=True):
            torch.testing.assert_close(result.full_tensor(), value)

    def train(q, k, q_norm_weight, k_norm_weight, cos, sin, positions):
        q, k = ops.rotate_qk(q * 2, k, cos, sin, positions=positions)
        q, k = ops.norm_rotate_qk(q, k, q_norm_weight, k_norm_weight, cos.detach(), sin.detach(), positions=positions)
        return q.square(), k.square()

    names = ["q", "k", "q_norm_weight", "k_norm_weight", "cos", "sin", "positions"]
    for q, k, positions in ("HRR", "BBR", "SSS"):
        torch._dynamo.reset()
        letters = dict.fromkeys(names, "R") | {"q": q, "k": k, "positions": positions}
        placed = list(placed_on(mesh, plain, letters).values())
        given = [plain[name].clone() for name in names]
        for t in (*placed[:-1], *given[:-1]):
            t.requires_grad_()
        outs, wanted = torch.compile(train, **once)(*placed), train(*given)
        for results in (outs, wanted):
            sum(out.sum() for out in results).backward()
        close((*outs, *(t.grad for t in placed[:-1])), (*wanted, *(t.grad for t in given[:-1])))

    def decode(q, k, v, k_cache, v_cache, inv_freq, offset):
        ops.rotate_qk_(q, k, inv_freq=inv_freq, offset=offset)
        ops.rotate_into_cache_(q, k, v, k_cache, v_cache, inv_freq=inv_freq, offset=offset)

    torch._dynamo.reset()
    letters = dict.fromkeys(["q", "k", "v", "k_cache", "v_cache"], "H") | {"inv_freq": "R"}
    placed, given = list(placed_on(mesh, plain, letters).values()), [plain[name].clone() for name in letters]
    memory = [t.to_local().data_ptr() for t in placed]
    step = torch.compile(decode, **once)
    for offset in (0, 3, 5, 7, 9):
        with torch.compiler.set_stance("fail_on_recompile" if offset > 3 else "default"):
            step(*placed, offset)
        decode(*given, offset)
        close(placed, given)
    assert memory == [t.to_local().data_ptr() for t in placed]

    torch._dynamo.reset()
    rope = torch_rope.RotaryEmbedding(HEAD_DIM, device=device)
    placed = placed_on(mesh, plain, {"q": "H", "k": "H", "x": "D"})
    results = torch.compile(rope, **once)(placed["q"], placed["k"], plain["positions"])
    close(results, rope(plain["q"], plain["k"], plain["positions"]))
    with pytest.raises(Exception, match=r"rope\.rotate: x is Shard\(dim=3\) .* must not be split along its head_dim"):
        torch.compile(lambda x: ops.rotate(x, inv_freq=given[-1]), **once)(placed["x"])


@night
def test_compiled_programs_of_dtensors(ranks):
    ranks(compiled)


# ---- modules ----


def check_modules(device):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

    mesh, plain = mesh_of(device), tensors(device)
    q, k, positions = plain["q"], plain["k"], plain["positions"]
    longer = {"factor": 4.0, "original_max_position": 8}
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    kinds = [{}, {"max_position": 16}, {"kind": "yarn"} | longer, {"kind": "dynamic"} | longer]
    kinds += [{"kind": "longrope", "max_position": n} | longer | lists for n in (None, 16)]
    for arguments in kinds:
        rope = torch_rope.RotaryEmbedding(HEAD_DIM, device=device, **arguments)
        wanted = rope(q, k, positions)
        # Heads are split, with plain positions. Tokens and their positions are split, so that no rank knows the
        # highest. In the end the buffers are replicated DTensors.
        for to, given in (
            (Shard(2), positions),
            (Shard(1), distributed(positions, mesh, Shard(1))),
            (Shard(0), distributed(positions, mesh, Shard(0))),
        ):
            placed = [distributed(t, mesh, to) for t in (q, k)]
            for result, value in zip(rope(*placed, given), wanted, strict=True):
                assert_same(result, value)
        for wrong, error, message in (
            (positions, NotImplementedError, "positions is Replicate"),
            (positions[:, :3], ValueError, "must have the positions of all 6 tokens of the DTensor q"),
        ):
            with pytest.raises(error, match=message):
                rope(*(distributed(t, mesh, Shard(1)) for t in (q, k)), wrong)
        rope = torch_rope.RotaryEmbedding(HEAD_DIM, device="meta", **arguments)
        distribute_module(rope, mesh)
        rope.to_empty(device=device).bfloat16()
        placed = [distributed(t, mesh, Shard(2)) for t in (q, k)]
        angles = rope.angles(SEQ, distributed(positions, mesh, Replicate()))
        assert all(isinstance(a, DTensor) for a in angles.values() if isinstance(a, torch.Tensor))
        for result, value in zip(ops.rotate_qk(*placed, **angles), wanted, strict=True):
            assert_same(result, value)

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wq = torch.nn.Linear(16, HEADS * HEAD_DIM)
            self.rope = torch_rope.RotaryEmbedding(HEAD_DIM, base=500.0)

        def forward(self, x, positions):
            q = self.wq(x).unflatten(-1, (HEADS, HEAD_DIM))
            return torch.cat(self.rope(q, q[..., :1, :], positions), dim=-2)

    # FSDP shards a model that has been on the meta device.
    torch.manual_seed(0)
    x = torch.randn(BATCH, SEQ, 16, device=device)
    model = Attention().to(device)
    with torch.device("meta"):
        sharded = fully_shard(Attention(), mesh=mesh)
    sharded.to_empty(device=device)
    for module in sharded.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        mine.detach().copy_(distributed(theirs, mesh, *mine.placements))
    mine, theirs = (distributed(t, mesh, Shard(0)).to_local() for t in (x, positions))
    out = sharded(mine, theirs)
    wanted = model(x, positions)
    torch.testing.assert_close(out, distributed(wanted, mesh, Shard(0)).to_local())
    out.square().sum().backward()
    wanted.square().sum().backward()
    for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):  # FSDP takes the mean over ranks
        torch.testing.assert_close(mine.grad.full_tensor() * dist.get_world_size(), theirs.grad)


def test_rotary_embedding_with_dtensors_and_fsdp(ranks):
    ranks(check_modules)


def check_buffers_under_mixed_precision(device, full_precision):
    """The model is evaluated first, so FSDP casts a buffer to bfloat16, and with full_precision back, before its first
    use."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "01"[full_precision]
    half = torch.bfloat16
    policy = MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)
    for arguments in ({}, {"max_position": 16}):

        class Attention(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.wq = torch.nn.Linear(16, HEADS * HEAD_DIM)
                self.rope = torch_rope.RotaryEmbedding(HEAD_DIM, **arguments)  # noqa: B023

            def forward(self, x):
                q = self.wq(x).unflatten(-1, (HEADS, HEAD_DIM))
                return q, *self.rope(q, q[..., :1, :], offset=3)

        here = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        model = FullyShardedDataParallel(Attention(), mixed_precision=policy, device_id=here)
        exact = torch_rope.RotaryEmbedding(HEAD_DIM, device=here, **arguments)
        for training in (False, True, False):
            q, *found = model.train(training)(torch.randn(BATCH, SEQ, 16, device=here))
            dtype = torch.float32 if full_precision and not training else half
            assert q.dtype == dtype and (dtype == half) == all(t.dtype == half for t in model.buffers())
            for out, wanted in zip(found, exact(q, q[..., :1, :], offset=3), strict=True):
                assert torch.equal(out, wanted)
        assert not [name for name in model.state_dict() if "rope" in name]


@pytest.mark.parametrize("full_precision", [False, pytest.param(True, marks=night)])
def test_fsdp1_casts_the_buffers_and_the_module_rotates_by_their_values(full_precision, ranks):
    ranks(check_buffers_under_mixed_precision, full_precision)


@night
@pytest.mark.parametrize("world", [2, 4])
def test_the_example_has_the_losses_of_one_process(world):
    """The example trains with tensor parallel, FSDP and context parallel, and uses nccl if there are as many GPUs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += [str(ROOT / "examples" / "parallel.py"), "--steps", "2"]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line[:12].strip() for line in result.stdout.splitlines()[1:-1]] == [
        "one process",
        *(f"dp {world // tp} x tp {tp}" for tp in (1, 2, 4) if tp <= world),
        f"cp {world}",
    ]
    assert "The losses are equal" in result.stdout and ": True. The losses fall: True." in result.stdout
