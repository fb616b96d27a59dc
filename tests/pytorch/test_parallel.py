"""Tests the operators on DTensors, and modules under PyTorch's parallelisms, on 2 processes (4 too in make exhaustive):
with gloo on a CPU, and with nccl if there are as many GPUs. Results are compared with those of the same call in one
process, and must be equal bit for bit if nothing is summed over ranks."""

import contextlib
import functools
import random
import re

import pytest
import torch
import torch.distributed as dist
from cases import EXHAUSTIVE, OPERATORS, python, written_by
from ranks import Ranks

import torch_rope

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch was built without distributed"),
    pytest.mark.xdist_group("parallel"),  # one worker runs all these tests and starts the processes once
    pytest.mark.cpu,  # runs on a CPU, or on real GPUs
]
night = pytest.mark.exhaustive
ops = torch.ops.rope

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 4, 5, 4, 2, 8


@pytest.fixture(scope="module")
def processes():
    started = {}
    yield started
    for ranks in started.values():
        ranks.close()


@pytest.fixture(params=[2, 4] if EXHAUSTIVE else [2])
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
def mesh_of(device, dimensions):
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    shape = (world,) if dimensions == 1 else (world // 2, 2)
    return init_device_mesh(device, shape, mesh_dim_names=("dp", "tp")[-dimensions:])


# ---- placements of the arguments ----


def tensors(device):
    """Returns name -> a plain tensor for each argument, the same on every rank."""
    inv_freq = torch_rope.inv_freq(HEAD_DIM, device=device).float()
    positions = torch.rand(BATCH, 16, device=device).argsort(-1)[:, :SEQ]  # each token has a cell of its own
    cos, sin = torch_rope.cos_sin(torch.arange(16, device=device), inv_freq)
    made = {"inv_freq": inv_freq, "positions": positions, "cos": cos, "sin": sin}
    made |= {"cos.token": cos[positions], "sin.token": sin[positions]}
    by_head = torch.randint(0, 16, (BATCH, SEQ, HEADS), device=device)
    made |= {"cos.head": cos[by_head], "sin.head": sin[by_head]}
    made |= {"positions.one": positions[0]}  # [seq], the same for all sequences
    made |= {"cos.one": cos[positions[:1]], "sin.one": sin[positions[:1]]}
    for name, heads in (("x", HEADS), ("q", HEADS), ("q_out", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        made[name] = torch.randn(BATCH, SEQ, heads, HEAD_DIM, device=device)
    for name in ("k_cache", "v_cache"):
        made[name] = torch.randn(BATCH, 16, KV_HEADS, HEAD_DIM, device=device)
    for name in ("q_norm_weight", "k_norm_weight"):
        made[name] = torch.rand(HEAD_DIM, device=device)
    made["q_norm_weight.heads"] = torch.rand(HEADS, HEAD_DIM, device=device)
    made["k_norm_weight.heads"] = torch.rand(KV_HEADS, HEAD_DIM, device=device)
    for name in ("k", "v"):
        made[f"{name}_cache.int8"] = made[f"{name}_cache"].to(torch.int8)
        made[f"{name}_scale"] = torch.rand(KV_HEADS, device=device) + 0.1
        made[f"{name}_scale.one"] = torch.rand(1, device=device) + 0.1
    made |= {"q_out.int8": made["q_out"].to(torch.int8), "q_scale": torch.rand(HEADS, device=device) + 0.1}
    made |= {"q_factor": torch.rand(SEQ, device=device) + 0.5, "v_norm_weight": torch.rand(HEAD_DIM, device=device)}
    made["q_factor.heads"] = torch.rand(BATCH, SEQ, HEADS, device=device) + 0.5
    made["positions.axes"] = torch.randint(0, 16, (2, BATCH, SEQ), device=device)
    made["inv_freq.axes"] = torch.stack([inv_freq, inv_freq / 3])
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


def placement(letter):
    from torch.distributed.tensor import Partial, Replicate, Shard

    return {"R": Replicate(), "P": Partial()}.get(letter) or Shard(int(letter))


def placed_on(mesh, plain, letters):
    """Returns DTensors. letters: the name of each -> a letter for each dimension of the mesh."""
    return {name: distributed(plain[name].clone(), mesh, *map(placement, p)) for name, p in letters.items()}


def calls(table):
    """Returns a list of (operator, argument -> letters). A line has alternatives, the first for all arguments, and so
    on; an argument with one alternative has it in all of them.

    R: whole on every rank. P: a sum of what the ranks hold. A digit: split along this dimension. Two letters are those
    of a mesh of two dimensions. A dot and what follows distinguish arguments of other shapes.
    """
    listed = []
    for op, *arguments in map(str.split, table.strip().splitlines()):
        columns = {name: letters.split("|") for name, letters in (a.split("=") for a in arguments)}
        for i in range(max(map(len, columns.values()))):
            listed.append((op, {name: c[i if len(c) > 1 else 0] for name, c in columns.items()}))
    return listed


TAKEN = calls("""
rotate x=R|0|2|P|R|0|1|R inv_freq=R positions=R|R|R|R|0|0|1|1
rotate x=R|0|2|P inv_freq=R
rotate x=R|0|2 cos=R sin=R positions=R
rotate x=1|1 inv_freq=R positions.one=0|0
rotate x=0|1|R cos.one=R|1|R sin.one=R|1|R
rotate x=R|2|2|2|R|0|1 cos.head=R|2|2|R|2|0|1 sin.head=R|2|R|2|2|0|1
rotate_ x=R|0|2|P|1 inv_freq=R positions=R|0|R|R|1
rotate_ x=2|0|1 cos.head=2|R|1 sin.head=R|0|1
rotate_qk q=R|0|2|2|R|2|1 k=R|0|2|R|2|P|1 inv_freq=R positions=R|R|R|R|R|R|1
rotate_qk q=R|0|2|2|R|1|0 k=R|0|2|R|2|1|R cos=R sin=R positions=R|R|R|R|R|1|0
rotate_qk q=1|0|2|R|1 k=1|0|R|0|R cos.token=1|0|R|R|1 sin.token=1|0|R|R|1
rotate_qk q=02|02|12|11|01|01|00|22|P2 k=02|0R|1R|11|01|R1|00|2R|RP positions=0R|RR|1R|11|01|R1|0R|RR|RR inv_freq=RR
rotate_qk q=R|0|2|1|P k=R|0|R|1|R inv_freq=R positions=R|R|R|1|R q_factor=R|R|R|0|R
rotate_qk_ q=R|0|2|2|1 k=R|0|2|R|1 inv_freq=R positions=R|R|R|R|1 q_factor.heads=R|0|2|2|1
rotate_qk_ q=02|11|22 k=02|11|2R positions=0R|11|RR inv_freq=RR
norm_rotate_qk q=R|0|2|2|1 k=R|0|2|R|1 q_norm_weight=R k_norm_weight=R inv_freq=R positions=R|R|R|R|1
norm_rotate_qk q=R|0|1|R k=R|R|1|0 q_norm_weight.heads=R k_norm_weight.heads=R inv_freq=R positions=R|R|1|R
norm_rotate_qk q=R|0|2|1 k=R|0|R|1 q_norm_weight=R k_norm_weight=R inv_freq=R positions=R|R|R|1 q_factor.heads=R|0|2|1
norm_rotate_qk_ q=R|0|2|1 k=R|0|R|1 q_norm_weight=R k_norm_weight=R inv_freq=R positions=R|R|R|1 q_factor=R|R|R|0
rotate_into_cache_ q=R|2|0 k=R|R|0 v=R|2|0 k_cache=R|R|0 v_cache=R|2|0 inv_freq=R v_norm_weight=R q_factor.heads=R|2|0
rotate_into_cache_ q=R|0|2|2 k=R|0|2|R v=R|R|2|R k_cache=R|0|2|R v_cache=R|0|2|2 inv_freq=R positions=R|R|R|R
rotate_into_cache_ q=R|0|0 k=R|0|R v=R|R|0 k_cache=R|0|0 v_cache=R|0|0 cos.token=R|R|0 sin.token=R|0|R positions=R|0|R
rotate_into_cache_ q=0|2 k=0|2 v=0|2 k_cache=0|2 v_cache=0|2 cos.one=R sin.one=R positions.one=R
rotate_into_cache_ q=R|2 k=R|R v=2|R k_cache=R|2 v_cache=2|2 inv_freq=R slots=R
rotate_into_cache_ q=2|0|R k=2|0|R v=2|0|R k_cache.int8=2|0|R v_cache.int8=2|0|R inv_freq=R k_scale=0|R|R v_scale=0|R|R
rotate_into_cache_ q=2|0 k=2|0 v=2|0 k_cache.int8=2|0 v_cache.int8=2|0 inv_freq=R k_scale.one=R v_scale.one=R
rotate_into_cache_ q=2|0|R|R k=2|0|R|R v=2|0|R|R k_cache=2|0|R|0 v_cache=2|0|R|0 inv_freq=R q_out=2|0|2|0
rotate_into_cache_ q=2|0|R k=R v=R k_cache=R|0|R v_cache=R|0|R inv_freq=R q_out.int8=2|0|2 q_scale=0|R|0
cos_sin positions=R|0|1 inv_freq=R
axial_cos_sin positions.axes=R|1|2 inv_freq.axes=R
""")
REFUSED = calls("""
rotate x=1|1|3|0|R inv_freq=R|R|R|R|0 positions=R|0|R|1|R
rotate x=1 inv_freq=R positions.one=R
rotate x=0|R|2 cos.head=2|0|3 sin.head=2|1|3
rotate_ x=R inv_freq=R positions=0
rotate_ x=R cos.head=2 sin.head=2
rotate_qk q=0|1|0 k=1|R|P inv_freq=R positions=R|R|R
rotate_qk q=1 k=1 inv_freq=R
rotate_qk q=12|11|00 k=12|11|00 positions=11|1R|R0 inv_freq=RR
rotate_qk_ q=0|R k=R|0 inv_freq=R
rotate_qk q=1|2|0|R k=1|R|0|R inv_freq=R positions=1|R|R|R q_factor.heads=R|R|R|P
norm_rotate_qk_ q=P|1 k=R|1 q_norm_weight=R k_norm_weight=R inv_freq=R positions=R|1 q_factor=R|R
norm_rotate_qk q=P|R|R k=R q_norm_weight=R|0|R k_norm_weight=R|R|P inv_freq=R
norm_rotate_qk q=2|R|R k=R|2|R q_norm_weight.heads=R|R|0 k_norm_weight.heads=R inv_freq=R
rotate_into_cache_ q=R k=R v=R k_cache=R v_cache=R inv_freq=R v_norm_weight=0
rotate_into_cache_ q=0|0|0|R|R|P k=0|0|R|R|2|R v=0|0|R|R|R|R k_cache=R|0|0|2|R|R v_cache=R|R|R|1|R|R inv_freq=R
rotate_into_cache_ q=0 k=0 v=0 k_cache=0|R v_cache=0|R inv_freq=R slots=R|0
rotate_into_cache_ q=1 k=1 v=1 k_cache=R v_cache=R inv_freq=R positions=1
rotate_into_cache_ q=0|1 k=0|1 v=0|1 k_cache=0|R v_cache=0|R cos.token=R|1 sin.token=R|1 positions=1
rotate_into_cache_ q=2 k=2 v=2 k_cache.int8=2 v_cache.int8=2 inv_freq=R k_scale=R|0 v_scale=0|R
rotate_into_cache_ q=R|0 k=R|0 v=R|0 k_cache.int8=R|0 v_cache.int8=R|0 inv_freq=R k_scale=0|R v_scale=R|0
rotate_into_cache_ q=R k=R v=R k_cache=2 v_cache=2 inv_freq=R q_norm_weight.heads=R k_norm_weight.heads=R
rotate_into_cache_ q=2|0|R|R k=R|0|R|R v=R|0|R|R k_cache=R|0|R|R v_cache=R|0|R|R inv_freq=R q_out=R|R|0|1
rotate_into_cache_ q=2|R k=R v=R k_cache=R v_cache=R inv_freq=R q_out.int8=2|R q_scale=R|0
rotate_into_cache_ q=R k=R v=R k_cache=R v_cache=R inv_freq=R q_out=2 q_norm_weight.heads=R k_norm_weight.heads=R
cos_sin positions=R|P inv_freq=0|R
axial_cos_sin positions.axes=0|R|R inv_freq.axes=R|0|1
""")


PUBLIC = [op for op in OPERATORS if not op.startswith("_")]  # gradients call the others


def call(op, arguments):
    """Calls an operator. Returns a tuple of results."""
    flags = {"norm_v": True} if "v_norm_weight" in arguments else {}
    results = getattr(ops, op)(**{name.split(".")[0]: a for name, a in arguments.items()}, **flags)
    return results if isinstance(results, tuple) else () if results is None else (results,)


def assert_same(result, expected, exact=True):
    """Compares a DTensor with the result of the same call in one process."""
    if not exact:
        return torch.testing.assert_close(result.full_tensor(), expected)
    assert result.shape == expected.shape and result.stride() == expected.stride()
    local = distributed(expected, result.device_mesh, *result.placements).to_local()
    torch.testing.assert_close(result.to_local(), local, rtol=0, atol=0)


def check_call(device, op, letters, taken=None):
    """Checks that the call is right, or raises an error that names an argument. taken: which of them it must be."""
    from torch.distributed.tensor.debug import CommDebugMode

    mesh, plain = mesh_of(device, len(next(iter(letters.values())))), tensors(device)
    written = [name for name in letters if name.split(".")[0] in written_by(op)]
    placed = placed_on(mesh, plain, letters)
    before = {name: (placed[name].to_local(), placed[name].to_local().clone()) for name in written}
    with CommDebugMode() as communication:
        try:
            results, refusal = call(op, placed), None
        except NotImplementedError as error:
            refusal = str(error)
    assert taken is None or (refusal is None) == taken, refusal
    assert communication.get_total_counts() == 0
    if refusal is not None:
        form = rf"rope\.{op}: (\w+) is (.*?\)) on mesh dimension '(dp|tp)' but must .*"
        name, where, m = re.fullmatch(form, refusal).groups()
        placements = next(t for n, t in placed.items() if n.split(".")[0] == name).placements
        assert where == repr(placements[mesh.mesh_dim_names.index(m)])
        assert all(torch.equal(now, then) for now, then in before.values())
        return
    one = {name: plain[name].clone() for name in letters}
    wanted = call(op, one)
    assert all(placed[name].to_local().data_ptr() == now.data_ptr() for name, (now, _) in before.items())
    if written:
        results, wanted = [placed[name] for name in written], [one[name] for name in written]
    for result, value in zip(results, wanted, strict=True):
        assert_same(result, value, exact="P" not in "".join(letters.values()))
    for name, result in zip([n for n in ("x", "q", "k") if n in letters], results, strict=False):
        if not written and "R" not in letters[name]:  # a result is split like its argument
            assert result.placements == placed[name].placements
    if taken and not written and mesh.ndim == 1 and "cos_sin" not in op:
        for incoming in ("", "R", "P"):
            check_gradients(op, letters, mesh, plain, incoming)


def check_gradients(op, letters, mesh, plain, incoming):
    """Compares the gradients with those of one process. incoming: the letter of the gradients of the results, or "" for
    the placement of the result. A sum is an error if another argument of the backward operator is split: that of a norm
    takes q and k too."""
    learned = [name for name in letters if not name.startswith("positions")]
    others = "".join(letter for name, letter in letters.items() if op.startswith("norm") or name not in ("x", "q", "k"))
    one, placed = {name: plain[name].clone() for name in letters}, placed_on(mesh, plain, letters)
    for name in learned:
        one[name].requires_grad_()
        placed[name].requires_grad_()
    outs, wanted = call(op, placed), call(op, one)
    grads = [torch.randn_like(t) for t in wanted]
    to = [[placement(incoming)] if incoming else out.placements for out in outs]
    placed_grads = [distributed(g, mesh, *p) for g, p in zip(grads, to, strict=True)]
    split = incoming == "P" and re.search(r"\d", others)
    with pytest.raises(NotImplementedError, match="is Partial") if split else contextlib.nullcontext():
        results = torch.autograd.grad(outs, [placed[name] for name in learned], placed_grads)
        values = torch.autograd.grad(wanted, [one[name] for name in learned], grads)
        for name, result, value in zip(learned, results, values, strict=True):
            near = {"rtol": 1e-5, "atol": 1e-4 if name == "inv_freq" else 1e-5}  # inv_freq: a sum of large terms
            torch.testing.assert_close(result.full_tensor(), value, **near, msg=lambda m, at=name: f"{at}: {m}")


def check_calls(device, listed, taken=None):
    for op, letters in listed:
        try:
            check_call(device, op, letters, taken)
        except BaseException as error:
            raise AssertionError(op, letters) from error


@pytest.mark.parametrize("op", PUBLIC)
def test_placements_are_accepted_or_raise_an_error_that_names_them(op, ranks):
    """Accepted calls communicate nothing, and have the results and the gradients of one process."""
    for table, taken in ((TAKEN, True), (REFUSED, False)):
        assert (listed := [(name, letters) for name, letters in table if name == op])
        ranks(check_calls, listed, taken)


@night
@pytest.mark.parametrize("op", PUBLIC)
def test_any_placement_gives_the_right_result_or_an_error(op, ranks):
    plain, draw = tensors("cpu"), random.Random(0)
    for names in dict.fromkeys(tuple(letters) for name, letters in TAKEN if name == op):
        possible = {name: ["R", "P", *map(str, range(plain[name].dim()))] for name in names}
        ranks(check_calls, [(op, {n: draw.choice(p) for n, p in possible.items()}) for _ in range(60)])


# ---- the cache of sharding decisions ----


def check_decisions(device):
    """A decode step with a new offset makes no new decision. But slots are not taken for positions, nor one dtype for
    another."""
    from torch.distributed.tensor import DTensor

    mesh, plain = mesh_of(device, 1), tensors(device)
    rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    op, asked = ops.rotate_into_cache_.default, []
    rule = rules[op]
    rules[op] = lambda schema: asked.append(schema) or rule(schema)
    letters = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache"), "0")
    given = placed_on(mesh, plain, letters | dict.fromkeys(("inv_freq", "q_norm_weight", "k_norm_weight"), "R"))
    positions = placed_on(mesh, plain, {"positions": "R"})["positions"]
    try:
        for offset in range(5):
            op(**given, offset=offset)
    finally:
        rules[op] = rule
    assert len(asked) <= 2  # an offset of 0 is not passed on
    op(**given, positions=positions)
    with pytest.raises(NotImplementedError, match="must not be split along its blocks"):
        op(**given, slots=positions)
    for dtype in (torch.float64, None, torch.bfloat16):
        cos, _ = ops.cos_sin(positions, given["inv_freq"], dtype=dtype)
        assert cos.dtype == cos.to_local().dtype == (dtype or torch.float32)


def test_a_decision_is_cached(ranks):
    ranks(check_decisions)


DTENSORS = """
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))
x, inv_freq = (DTensor.from_local(t, mesh, [Replicate()]) for t in (torch.ones(1, 1, 8), torch.ones(4)))
"""
CALLS = {
    "torch_rope.rotate(x, inv_freq=inv_freq)": "",
    "torch_rope.RotaryEmbedding(8)(x, x)": "",
    "torch.compile(torch_rope.rotate, backend='eager', fullgraph=True)(x, inv_freq=inv_freq)": "",
    "import torch_rope.parallel; torch.ops.rope.rotate(x, inv_freq=inv_freq)": "",
    "torch.ops.rope.rotate(x, inv_freq=inv_freq)": "NotImplementedError: .*rope.rotate.default does not have a sharding",
}


@night
@pytest.mark.parametrize("call", CALLS)
def test_functions_and_the_module_register_the_rules_and_operators_need_the_import(call):
    done = python(f"import torch_rope{DTENSORS}{call}")
    assert re.search(CALLS[call], done.stderr) if CALLS[call] else done.returncode == 0, done.stderr


# ---- torch.compile ----


def compiled(device):
    mesh, plain = mesh_of(device, 1), tensors(device)
    once = {"fullgraph": True, "backend": "aot_eager"}

    def train(q, k, q_norm_weight, k_norm_weight, cos, sin, positions):
        q, k = ops.rotate_qk(q * 2, k, cos, sin, positions=positions)
        q, k = ops.norm_rotate_qk(q, k, q_norm_weight, k_norm_weight, cos.detach(), sin.detach(), positions=positions)
        return q.square(), k.square()

    names = ["q", "k", "q_norm_weight", "k_norm_weight", "cos", "sin", "positions"]
    for q, k, positions in ("2RR", "00R", "111"):
        torch._dynamo.reset()
        letters = dict.fromkeys(names, "R") | {"q": q, "k": k, "positions": positions}
        placed, given = list(placed_on(mesh, plain, letters).values()), [plain[name].clone() for name in names]
        results = []
        for function, inputs in ((torch.compile(train, **once), placed), (train, given)):
            leaves = [t.requires_grad_() for t in inputs[:-1]]
            outs = function(*inputs)
            sum(out.sum() for out in outs).backward()
            results.append([*outs, *(t.grad for t in leaves)])
        for result, value in zip(*results, strict=True):
            assert_same(result, value, exact=False)

    def decode(q, k, v, k_cache, v_cache, inv_freq, offset):
        ops.rotate_qk_(q, k, inv_freq=inv_freq, offset=offset)
        ops.rotate_into_cache_(q, k, v, k_cache, v_cache, inv_freq=inv_freq, offset=offset)

    torch._dynamo.reset()
    letters = dict.fromkeys(["q", "k", "v", "k_cache", "v_cache"], "2") | {"inv_freq": "R"}
    placed, given = list(placed_on(mesh, plain, letters).values()), [plain[name].clone() for name in letters]
    memory = [t.to_local().data_ptr() for t in placed]
    step = torch.compile(decode, **once)
    for offset in (0, 3, 5, 7, 9):
        with torch.compiler.set_stance("fail_on_recompile" if offset > 3 else "default"):
            step(*placed, offset)
        decode(*given, offset)
        for result, value in zip(placed, given, strict=True):
            assert_same(result, value, exact=False)
    assert memory == [t.to_local().data_ptr() for t in placed]


@night
def test_compiled_programs_of_dtensors(ranks):
    ranks(compiled)


# ---- modules ----


class Attention(torch.nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.wq = torch.nn.Linear(16, HEADS * HEAD_DIM)
        self.rope = torch_rope.RotaryEmbedding(HEAD_DIM, **arguments)

    def forward(self, x, positions=None, offset=0):
        q = self.wq(x).unflatten(-1, (HEADS, HEAD_DIM))
        return q, *self.rope(q, q[..., :1, :], positions, offset)


def check_modules(device):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_module

    mesh, plain = mesh_of(device, 1), tensors(device)
    q, k, positions = plain["q"], plain["k"], plain["positions"]
    longer = {"factor": 4.0, "original_max_position": 8}
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    kinds = [{}, {"max_position": 16}, {"kind": "yarn"} | longer, {"kind": "dynamic"} | longer]
    kinds += [{"kind": "longrope", "max_position": n} | longer | lists for n in (None, 16)]
    for arguments in kinds:
        rope = torch_rope.RotaryEmbedding(HEAD_DIM, device=device, **arguments)
        wanted = rope(q, k, positions)
        rope = distribute_module(torch_rope.RotaryEmbedding(HEAD_DIM, device="meta", **arguments), mesh)
        # Heads are split, with plain positions. Tokens and their positions are split, so that no rank knows the
        # highest.
        for dim in (2, 1, 0):
            given = positions if dim == 2 else distributed(positions, mesh, Shard(dim))
            placed = [distributed(t, mesh, Shard(dim)) for t in (q, k)]
            for result, value in zip(rope(*placed, given), wanted, strict=True):
                assert_same(result, value)
        with pytest.raises(NotImplementedError, match="positions is Replicate"):
            rope(*(distributed(t, mesh, Shard(1)) for t in (q, k)), positions)

    # FSDP shards a model that has been on the meta device.
    torch.manual_seed(0)
    x = torch.randn(BATCH, SEQ, 16, device=device)
    model = Attention(base=500.0).to(device)
    with torch.device("meta"):
        sharded = fully_shard(Attention(base=500.0), mesh=mesh)
    sharded.to_empty(device=device)
    for module in sharded.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        mine.detach().copy_(distributed(theirs, mesh, *mine.placements))
    mine, theirs = (distributed(t, mesh, Shard(0)).to_local() for t in (x, positions))
    out = sharded(mine, theirs)[1]
    wanted = model(x, positions)[1]
    torch.testing.assert_close(out, distributed(wanted, mesh, Shard(0)).to_local())
    out.square().sum().backward()
    wanted.square().sum().backward()
    for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):  # FSDP takes the mean over ranks
        torch.testing.assert_close(mine.grad.full_tensor() * dist.get_world_size(), theirs.grad)


@pytest.mark.core
def test_rotary_embedding_with_dtensors_and_fsdp(ranks):
    ranks(check_modules)


def check_mixed_precision_of_fsdp1(device):
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    half = torch.bfloat16
    policy = MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)
    here = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    for arguments in ({}, {"max_position": 16}):
        model = FullyShardedDataParallel(Attention(**arguments), mixed_precision=policy, device_id=here)
        exact = torch_rope.RotaryEmbedding(HEAD_DIM, device=here, **arguments)
        q, *found = model(torch.randn(BATCH, SEQ, 16, device=here), offset=3)
        assert q.dtype == half and all(map(torch.equal, found, exact(q, q[..., :1, :], offset=3)))


def test_fsdp1_does_not_cast_the_frequencies(ranks):
    ranks(check_mixed_precision_of_fsdp1)
