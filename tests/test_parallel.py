"""The operators on DTensors and in modules under PyTorch's parallelisms: on 2 and 4 processes, with gloo on a CPU and with
nccl where there are as many GPUs. What comes out is compared with the same call in one process, bit for bit where nothing
is summed over ranks."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

import torch_rope

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch was built without distributed")
ops = torch.ops.rope

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 4, 6, 4, 2, 8


@pytest.fixture(scope="module")
def processes():
    started = {}
    yield started
    for ranks in started.values():
        ranks.close()


@pytest.fixture(params=[2, 4])
def ranks(request, device, processes):
    """Runs a function on so many processes."""
    world = request.param
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"nccl needs {world} GPUs")
    if (world, device) not in processes:
        processes[world, device] = Ranks(world, device)
    return processes[world, device]


def mesh_of(device, *shape, names=("dp", "tp")):
    from torch.distributed.device_mesh import init_device_mesh

    shape = shape or (dist.get_world_size(),)
    return init_device_mesh(device, shape, mesh_dim_names=names[-len(shape) :])


# ---- every placement of every argument: taken as the specification says, or refused by name ----
#
# A letter for each argument: R whole on every rank, B split over batch, S over seq, H over heads, D over what is in a
# head (head_dim, rotary_dim / 2) or the rows of a table, P a sum of what the ranks hold.

X = ("batch", "seq", "heads", "head_dim")
DIMS = {
    **dict.fromkeys(("x", "q", "k", "v"), {"B": 0, "S": 1, "H": 2, "D": 3}),
    **dict.fromkeys(("k_cache", "v_cache"), {"B": 0, "S": 1, "H": 2, "D": 3}),
    **dict.fromkeys(("positions", "slots", "cos by token", "sin by token"), {"B": 0, "S": 1, "D": 2}),
    **dict.fromkeys(("inv_freq", "cos", "sin", "q_norm_weight", "k_norm_weight"), {"D": 0}),
}


def tensors(device):
    """One of each argument, the same on every rank."""
    inv_freq = torch_rope.inv_freq(HEAD_DIM, device=device)
    positions = torch.randint(0, 16, (BATCH, SEQ), device=device)
    cos, sin = torch_rope.cos_sin(torch.arange(16, device=device), inv_freq)
    made = {"inv_freq": inv_freq, "positions": positions, "cos": cos, "sin": sin}
    made |= {"cos by token": cos[positions], "sin by token": sin[positions]}
    for name, heads in (("x", HEADS), ("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        made[name] = torch.randn(BATCH, SEQ, heads, HEAD_DIM, device=device)
    for name in ("k_cache", "v_cache"):
        made[name] = torch.randn(BATCH, 16, KV_HEADS, HEAD_DIM, device=device)
    for name in ("q_norm_weight", "k_norm_weight"):
        made[name] = torch.rand(HEAD_DIM, device=device)
    slots = torch.randperm(BATCH * 16, device=device)[: BATCH * SEQ]
    return made | {"slots": slots.view(BATCH, SEQ)}


def distributed(t, mesh, *placements):
    """t as a DTensor; a sum of random parts where it is Partial."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    sums = [m for m, p in enumerate(placements) if p.is_partial()]
    result = distribute_tensor(t, mesh, [Replicate() if m in sums else p for m, p in enumerate(placements)])
    for m in sums:
        share = 2 * (1 + mesh.get_local_rank(m)) / (mesh.size(m) * (mesh.size(m) + 1))  # 1 in all
        result = DTensor.from_local((result.to_local() * share).to(t.dtype), mesh, placements, run_check=False)
    return result


def placement(name, letter):
    from torch.distributed.tensor import Partial, Replicate, Shard

    return {"R": Replicate(), "P": Partial()}.get(letter) or Shard(DIMS[name][letter])


# What says the angles, as letters of their tensors.
ANGLES = [
    *({"inv_freq": "R", "positions": p} for p in "RBSP"),
    *({"cos by token": c, "sin by token": s} for c, s in ("RR", "BB", "SS", "DD", "BR", "SR", "BS")),
    *({"cos": c, "sin": c, "positions": p} for c, p in ("RR", "DR", "RS")),
    {"inv_freq": "R"},
    {"inv_freq": "D", "positions": "R"},
]


def is_taken(xs, angles, written=False, linear=True, tokens=True):
    """The specification. xs: letters of what is rotated; tokens: whether batch or seq may be split."""
    of_tokens = [a for name, a in angles.items() if name not in ("inv_freq", "cos", "sin")]
    letters = xs + list(angles.values())
    if "D" in letters or "P" in angles.values() or ("P" in xs and not linear):
        return False
    split = [s for s in "BS" if s in letters]
    if not split:
        return True
    whole = "" if written else "R"  # is cut where the others are
    takes = split[0] + ("R" if split == ["B"] else "")
    return tokens and all(x in split[0] + whole for x in xs) and all(a in takes for a in of_tokens) and (
        split == ["B"] or bool(of_tokens)
    )  # fmt: skip


def cases(op):
    """(letters by argument, whether the operator takes them)"""
    names = {"rotate": ["x"], "rotate_": ["x"]}.get(op, ["q", "k"])
    written, linear = op.endswith("_"), not op.startswith("norm")
    norm = {} if linear else {"q_norm_weight": "R", "k_norm_weight": "R"}
    for xs in itertools.product("RBSHDP", repeat=len(names)):
        for angles in ANGLES:
            yield dict(zip(names, xs, strict=True)) | norm | angles, is_taken(list(xs), angles, written, linear)
    if norm:
        letters = {"q": "R", "k": "R"} | norm | {"inv_freq": "R"}
        yield letters | {"q_norm_weight": "D"}, False
        yield letters | {"k_norm_weight": "P"}, False


def cache_cases():
    for q, k, kc, slots in itertools.product("RBSHDP", "RBSHD", "RBSHD", (False, True)):
        for v, vc, p in ((k, kc, "R"), ("R", kc, "R"), (k, "R", "R"), (k, kc, "B")):
            letters = {"q": q, "k": k, "v": v, "k_cache": kc, "v_cache": vc, "inv_freq": "R", "positions": p}
            everything = set(letters.values())
            if everything & {"S", "D", "P"}:
                taken = False
            elif "B" in everything:  # row b writes block b
                taken = not slots and q == kc == vc == "B" and {k, v} <= {"B", "R"}
            elif "H" in (kc, vc):
                taken = kc == vc and {k, v} <= {"H", "R"}
            else:
                taken = k == v == "R"
            yield letters | ({"slots": "R"} if slots else {}), taken


def call(op, arguments):
    arguments = {name.removesuffix(" by token"): a for name, a in arguments.items()}
    return getattr(ops, op)(**arguments)


def check_placements(device, op, given):
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = mesh_of(device)
    all_tensors = tensors(device)
    schema = getattr(ops, op).default._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    count = 0
    for letters, taken in given:
        plain = {name: all_tensors[name].clone() for name in letters}
        before = dict(plain)
        placed = {name: distributed(t, mesh, placement(name, letters[name])) for name, t in plain.items()}
        memory = {name: placed[name].to_local().data_ptr() for name in written}
        with CommDebugMode() as communication:
            try:
                results = call(op, placed)
            except NotImplementedError as error:
                refusal = str(error)
            else:
                refusal = None
        assert (refusal is None) == taken, (letters, refusal)
        assert communication.get_total_counts() == 0, letters
        if refusal is not None:
            name, where = re.fullmatch(rf"rope\.{op}: (\w+) is (.*?\)) on mesh dimension 'tp', .*", refusal).groups()
            name = name if name in placed else name + " by token"
            assert where == repr(placed[name].placements[0]), refusal
            for name in written:
                torch.testing.assert_close(placed[name].full_tensor(), before[name])
            continue
        count += 1
        expected = call(op, plain)
        if written:
            assert results is None
            assert memory == {name: placed[name].to_local().data_ptr() for name in written}
            results, expected = [placed[name] for name in written], [plain[name] for name in written]
        elif op == "rotate":
            results, expected = [results], [expected]
        for result, wanted in zip(results, expected, strict=True):
            assert result.shape == wanted.shape and result.stride() == wanted.stride()
            exact = {} if "P" in letters.values() else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(result.full_tensor(), wanted, **exact, msg=lambda m, at=letters: f"{at}: {m}")
        if not written:  # what was split stays so
            for name, result in zip([n for n in ("x", "q", "k") if n in letters], results, strict=True):
                assert letters[name] == "R" or result.placements == placed[name].placements
    return count


@pytest.mark.parametrize("op", ["rotate", "rotate_", "rotate_qk", "rotate_qk_", "norm_rotate_qk", "rotate_into_cache_"])
def test_every_placement_is_taken_or_refused_by_name(ranks, op):
    given = list(cache_cases() if op == "rotate_into_cache_" else cases(op))
    counts = ranks(check_placements, op, given)
    assert counts == [sum(taken for _, taken in given)] * ranks.world
