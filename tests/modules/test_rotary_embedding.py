"""Tests torch_rope.RotaryEmbedding: its angles, what others do to a module, and what is assigned to it."""

import concurrent.futures
import contextlib
import copy
import functools
import io
import itertools
import pickle
import re
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from cases import EXHAUSTIVE, Calls, covering, default_dtype, name_of, needed, python
from oracle import assert_close, numpy_of, rotate
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_rope
from torch_rope import RotaryEmbedding, frequencies

pytestmark = pytest.mark.core

HEAD_DIM, LONG = 32, 50  # LONG: the length above which the frequencies of longrope and dynamic change
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position": LONG},
    "llama3": {"factor": 8.0, "original_max_position": LONG},
    "longrope": {"factor": 4.0, "original_max_position": LONG}
    | {"short_factor": [1 + i / 40 for i in range(16)], "long_factor": [1 + i / 4 for i in range(16)]},
    "dynamic": {"factor": 2.0, "original_max_position": LONG},
    "proportional": {"partial_rotary_factor": 0.5},
}
# (kind, max_position). Without max_position the kernel computes the angles; with it there are tables, except for
# dynamic.
WITH_TABLES = [(kind, t) for kind in KINDS for t in (None, 200) if (kind, t) != ("dynamic", 200)]
FEW = [("default", None), ("default", 200), ("longrope", None), ("longrope", 200), ("dynamic", None)]
each_of_few = pytest.mark.parametrize("kind, max_position", FEW)


def module(kind="default", max_position=None, **more):
    return RotaryEmbedding(HEAD_DIM, 5000.0, kind=kind, max_position=max_position, **KINDS[kind], **more)


def some(device, batch=2, seq=7, head_dim=HEAD_DIM):
    return (torch.randn(batch, seq, heads, head_dim, device="cpu").to(device) for heads in (3, 1))


def exact_frequencies(kind, length):
    more = {"seq_len": length} if kind in ("dynamic", "longrope") else {}
    return frequencies.KINDS[kind](HEAD_DIM, 5000.0, **KINDS[kind], **more)


def tables_of(rope, device):
    """Returns the tensors that the module rotates by on a device."""
    return {name: t for name, t in rope.angles(1, device=device).items() if isinstance(t, torch.Tensor)}


# ---- angles ----


FACTORS = {
    "kind, max_position": WITH_TABLES,
    "start": [0, LONG - 7, LONG - 6, 130],  # the highest position is start + seq - 1 = start + 6
    "positions": ["none", "[S]", "[B,S]", "int32 [1,S]"],
}


@pytest.mark.parametrize("case", covering(FACTORS), ids=name_of)
def test_rotates_by_the_frequencies_of_its_kind(case, device):
    """The host does not wait for positions, and sends no tensor to the device that was made on the host."""
    (kind, max_position), start, positions = case.values()
    rope = module(kind, max_position).to(device)
    q, k = some(device)
    p = torch.arange(7, device=device).flip(0)
    given = {
        "none": {"offset": start},
        "[S]": {"positions": p, "offset": start},
        "[B,S]": {"positions": torch.stack([p + start, p])},
        "int32 [1,S]": {"positions": (p + start).int()[None]},
    }[positions]
    with Calls() as calls:
        outs = rope(q, k, **given)
    assert calls.names.count("rope::rotate_qk") == 1 and "aten::_local_scalar_dense" not in calls.names
    # On the device, dynamic makes floats of integers, and a length is int64.
    assert "aten::_to_copy" not in calls.names or kind == "dynamic" or "int32" in positions
    inv_freq, factor = exact_frequencies(kind, start + 7)
    for x, out in zip((q, k), outs, strict=True):
        # An angle is right to 5e-7, a table to one float32 rounding. If mps has the positions, dynamic's power is float32.
        part = 3e-5 if kind == "dynamic" and device == "mps" and positions != "none" else 5e-7
        assert_close(out, rotate(x, inv_freq=inv_freq, attention_factor=factor, **given), 3, part)


@pytest.mark.shared
def test_tables_are_float64_angles_rounded_once(device):
    length = (1 << 16) + 99  # the module fills 2 ** 16 rows at a time
    rope = module("longrope", length).to(device)
    angle = np.stack([np.arange(length)[:, None] * numpy_of(exact_frequencies("longrope", n)[0]) for n in (1, length)])
    for table, exact in ((rope.cos, np.cos(angle)), (rope.sin, np.sin(angle))):
        assert table.dtype == torch.float32
        # The cos of numpy and of torch may differ in the last bit of float64. Rarely this changes the float32 value.
        different = table.cpu().numpy() != exact.astype(np.float32)
        assert different.mean() < 1e-6 and abs(table.cpu().numpy() - exact).max() < 6e-8


@pytest.mark.cpu
def test_an_odd_rotary_dim_rotates_one_channel_more():
    """The powers are those of the odd number, as in transformers."""
    q, k = some("cpu")
    for kind, exact in (("yarn", {}), ("dynamic", {"seq_len": 2 * LONG})):
        rope = RotaryEmbedding(HEAD_DIM, rotary_dim=9, kind=kind, **KINDS[kind])
        inv_freq, factor = frequencies.KINDS[kind](9, 10000.0, **KINDS[kind], **exact)
        expected = torch.ops.rope.rotate(q, inv_freq=inv_freq, offset=2 * LONG - 7, attention_factor=factor)
        assert rope.rotary_dim == 10 and (rope(q, k, offset=2 * LONG - 7)[0] - expected).abs().max() < 1e-6


@pytest.mark.shared
def test_the_arguments_of_the_operator_are_passed_on_and_gradients_rotated_back(device):
    q, k = (x.requires_grad_() for x in some(device))
    for rope in (RotaryEmbedding(HEAD_DIM, rotary_dim=8, interleaved=True).to(device), module("yarn").to(device)):
        given = {"inv_freq": rope.inv_freq, "interleaved": rope.interleaved, "offset": 3}
        given["attention_factor"] = rope.attention_factor
        outs = rope(q, k, offset=3)
        assert all(map(torch.equal, outs, torch.ops.rope.rotate_qk(q, k, **given)))
        seeds = [torch.randn_like(out) for out in outs]
        expected = torch.ops.rope.rotate_qk(*seeds, **given, inverse=True)
        assert all(map(torch.equal, torch.autograd.grad(outs, (q, k), seeds), expected))


BORN = list(itertools.product(FEW, ["here", "meta"]))  # where the module is made


@pytest.mark.shared
@pytest.mark.parametrize("given, born", BORN if EXHAUSTIVE else BORN[::3])
def test_compiles_without_breaks_and_once_for_all_steps(given, born, device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    rope, other = (module(*given, device=where) for where in (device, device if born == "here" else born))
    compiled = torch.compile(other, fullgraph=True, backend=counter)
    q, k = (x[:, :1] for x in some(device))
    for offset in range(LONG - 20, LONG + 20, 4):
        for where in ({"offset": offset}, {"positions": torch.tensor([offset]).to(device)}):
            assert all(map(torch.equal, compiled(q, k, **where), rope(q, k, **where)))
    # Graphs with an offset: one with a constant, one with a symbol, and one more if the frequencies change, for the
    # other side of LONG. With positions there is one graph.
    assert counter.frame_count <= (3 if given[0] not in ("longrope", "dynamic") else 4)


@pytest.mark.shared
@each_of_few
@pytest.mark.parametrize("positions", ["none", "[S]", "[B,S]"])
def test_exports_with_a_dynamic_batch_and_sequence(kind, max_position, positions, device):
    """One program serves short and long sequences. The module keeps no tensor of the export."""
    rope, free = module(kind, max_position).to(device), torch.export.Dim.DYNAMIC

    def inputs(batch, seq):
        p = torch.arange(seq) + torch.arange(batch).unsqueeze(-1)
        given = {"none": (), "[S]": (p[0],), "[B,S]": (p,)}[positions]
        return *some(device, batch, seq), *(t.to(device) for t in given)

    axes = [{0: free, 1: free}] * 2 + {"none": [], "[S]": [{0: free}], "[B,S]": [{0: free, 1: free}]}[positions]
    program = torch.export.export(rope, inputs(2, 7), dynamic_shapes=tuple(axes)).module()
    # Without float64, dynamic's power is float32 in a program, and made on the host in a call with an offset.
    exact = (kind, device) != ("dynamic", "mps")
    same = torch.equal if exact else functools.partial(torch.allclose, atol=1e-4)
    for given in (inputs(3, 5), inputs(2, LONG + 9)):
        assert all(map(same, program(*given), rope(*given)))


# ---- frequencies are no state ----


def of_a_checkpoint(make, device):
    """Loads a checkpoint into a model on the meta device, whose parameters become those of the checkpoint."""
    full = torch.nn.Sequential(torch.nn.Linear(2, 2), make()).to(device)
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), make())
    model.load_state_dict(full.state_dict(), assign=True)
    return model[1]


def loaded(make, device):
    torch.save(make().to(device), file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), "meta", weights_only=False)


def cast(constructor, *args, **kwargs):
    t = constructor(*args, **kwargs)
    return t.bfloat16() if isinstance(t, torch.Tensor) and t.is_floating_point() else t


@contextlib.contextmanager
def casting_constructors():
    """Wraps constructors of torch as ``deepspeed.zero.Init(dtype=torch.bfloat16)`` does."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tensor", "empty", "zeros", "ones", "full", "arange"):
            patch.setattr(torch, name, functools.partial(cast, getattr(torch, name)))
        yield


class CastingFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return cast(func, *args, **kwargs or {})


class CastingOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return cast(func, *args, **kwargs or {})


# The modes of a caller, in which a module is made, or called for the first time on its device.
MODES = {
    "default device": lambda: torch.device("meta"),
    "default dtype": lambda: default_dtype(torch.float16),
    "wrapped constructors": casting_constructors,
    "fake tensors": FakeTensorMode,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "functions": CastingFunctions,
    "operators": CastingOperators,
    "no new thread": lambda: mock.patch.object(threading.Thread, "start", side_effect=RuntimeError),  # Python ends
}
# What asks a module for its angles, or records that something does.
CALLS = {
    "angles": lambda rope, q: rope.angles(7, device=q.device),
    "torch.func": lambda rope, q: torch.func.grad(lambda q: rope(q, q)[0].sum())(q),
    "compile": lambda rope, q: torch.compile(rope, fullgraph=True, backend="aot_eager")(q, q),
    "export": lambda rope, q: torch.export.export(rope, (q, q)),
}


def made_in(mode, make, device):
    with MODES[mode]():
        return make()


def first_called_in(mode, make, device, call="angles"):
    rope = make(device="meta")
    torch._dynamo.reset()
    with MODES.get(mode, contextlib.nullcontext)():
        CALLS[call](rope, next(some(device)))
    return rope


def read_and_changed(make, device):
    """What is read is a copy, so to assign None goes back."""
    rope = make().to(device)
    for name in ("cos", "sin", "inv_freq") if rope.max_position else ("inv_freq",):
        getattr(rope, name).mul_(2)
    rope.inv_freq *= 2
    rope.inv_freq = None
    return rope


# What others do to a module, or around it. Each function gets a function that makes a module, and returns a module.
FATES = {
    "half of a model": lambda make, device: torch.nn.Sequential(make(), torch.nn.Linear(2, 2)).to(device).half()[0],
    "to and back": lambda make, device: make().to(device).to("cpu"),
    "to_empty": lambda make, device: make().to_empty(device=device),
    "torch.load": loaded,
    "meta, to": lambda make, device: made_in("default device", make, device).to(device),
    "meta, to_empty": lambda make, device: make(device="meta").bfloat16().to_empty(device=device),
    "checkpoint": of_a_checkpoint,
    "read and changed": read_and_changed,
    **{f"made, {mode}": functools.partial(made_in, mode) for mode in MODES},
    **{f"first call, {mode}": functools.partial(first_called_in, mode) for mode in MODES},
    **{f"first call, {call}": functools.partial(first_called_in, None, call=call) for call in CALLS},
}


@pytest.mark.shared
@pytest.mark.parametrize("fate", FATES)
@each_of_few
def test_whatever_is_done_to_a_module_it_rotates_by_its_frequencies(fate, kind, max_position, device):
    """And it can train, and its tensors keep their address from then on."""
    rope = FATES[fate](lambda **more: module(kind, max_position, **more), device)
    exact, (q, k) = module(kind, max_position, device=device), some(device)
    rope(q.requires_grad_(), k)[0].sum().backward()
    assert not rope.state_dict() and not [*rope.buffers(), *rope.parameters()] and str(rope) == str(exact)
    before = {name: t.data_ptr() for name, t in tables_of(rope, q.device).items()}
    for each in (rope, rope.bfloat16(), copy.deepcopy(rope)):
        assert all(map(torch.equal, each(q, k, offset=LONG), exact(q, k, offset=LONG)))
    assert before == {name: t.data_ptr() for name, t in tables_of(rope, q.device).items()}


@pytest.mark.cpu
@each_of_few
@pytest.mark.parametrize("born", ["outside", "inside"])
def test_in_a_mode_of_fake_tensors_frequencies_are_fake_and_do_not_stay(kind, max_position, born):
    rope, qk = module(kind, max_position), tuple(some("cpu"))
    expected = rope(*qk, offset=LONG)
    with FakeTensorMode():
        rope, (q, k) = module(kind, max_position) if born == "inside" else rope, some("cpu")
        for each in (rope, copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
            outs = *each(q, k), *each(q, k, torch.arange(7)), *torch_rope.rotate_qk(q, k, **each.angles(7))
            assert all(isinstance(t, FakeTensor) for t in (*outs, each.inv_freq))
    assert isinstance(rope(q, k)[0], FakeTensor)
    for each in (rope, copy.deepcopy(rope), rope.to_empty(device="cpu")):
        assert all(map(torch.equal, each(*qk, offset=LONG), expected))


AT_THE_END = """
import atexit, pickle, threading, torch_rope
make = torch_rope.RotaryEmbedding
def use(when):
    print(when, pickle.loads(pickle.dumps(make(8))).to("meta").to("cpu"))
class Last:
    def __del__(self, make=make): print("del", make(8))
last = Last()
atexit.register(use, "atexit")
threading.Thread(target=lambda: threading.main_thread().join() or use("thread")).start()
"""


@pytest.mark.cpu
@pytest.mark.exhaustive
def test_modules_are_made_moved_and_loaded_until_python_ends():
    done = python(AT_THE_END, to_the_end=True)
    assert re.findall(r"^\w+", done.stdout, re.M) == ["thread", "atexit", "del"] and not done.stderr, done.stderr


@pytest.mark.cpu
def test_threads_that_call_a_module_first_share_its_tensors():
    rope, barrier = module("longrope", 200, device="meta"), threading.Barrier(4)

    def serve(_):
        barrier.wait()
        return tables_of(rope, torch.device("cpu"))["cos"].data_ptr()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert len({*pool.map(serve, range(4))}) == 1


@pytest.mark.cpu
def test_from_pretrained_of_transformers_keeps_the_frequencies(tmp_path):
    transformers = needed("transformers")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.linear, self.rope = torch.nn.Linear(2, 2), module(device="cpu")
            self.table = module("longrope", 200)
            self.post_init()

    Model(transformers.PretrainedConfig()).save_pretrained(tmp_path)
    loaded, (q, k) = Model.from_pretrained(tmp_path, dtype=torch.bfloat16), some("cpu")
    with pytest.raises(ValueError, match=r"device is None but must be that of q, .* angles\(seq, device=q.device\)"):
        loaded.table.angles(7)  # no call has told that the model is not on meta any more
    for mine, exact in ((loaded.rope, module()), (loaded.table, module("longrope", 200))):
        assert all(map(torch.equal, mine(q, k, offset=LONG), exact(q, k, offset=LONG)))
        assert torch.equal(mine.inv_freq, exact.inv_freq) and mine.angles(7)


@pytest.mark.cpu
@each_of_few
def test_a_checkpoint_may_hold_the_own_frequencies(kind, max_position):
    rope, (q, k) = module(kind, max_position), some("cpu")
    own, expected = exact_frequencies(kind, 1).inv_freq, rope(q, k)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        rope.load_state_dict({"inv_freq": own.to(dtype)})
        assert all(map(torch.equal, rope(q, k), expected))
    for wrong in (own * 1.01, own[:-1], own.int(), own * float("nan")):
        with pytest.raises(RuntimeError, match=r"inv_freq is .* but must be ([\d.e-]+|\[\d+\]), as the"):
            torch.nn.Sequential(rope).load_state_dict({"0.inv_freq": wrong}, strict=False)


# ---- what is assigned ----


@pytest.mark.shared
@each_of_few
@pytest.mark.parametrize("assigned", ["inv_freq", "parameter", "tables"])
def test_what_is_assigned_is_what_rotates(assigned, kind, max_position, device):
    """It moves with the module and is not cast; None takes it away. A parameter learns, and is saved."""
    rope, qk = module(kind, max_position, device=device), tuple(some(device))
    expected, own = rope(*qk, offset=LONG), exact_frequencies(kind, 1).inv_freq.float().to(device)
    mine = {"inv_freq": torch.nn.Parameter(own / 3) if assigned == "parameter" else own / 3}
    if assigned == "tables":
        mine = dict(zip(("cos", "sin"), torch_rope.cos_sin(torch.arange(200, device=device), own / 3), strict=True))
    for name, t in mine.items():
        setattr(rope, name, t)
    rotated = torch.ops.rope.rotate_qk(*qk, **mine, offset=LONG, attention_factor=rope.attention_factor)
    for each in (rope, rope.to(device).half(), copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert all(map(torch.equal, each(*qk, offset=LONG), rotated))
        assert all(map(torch.equal, each(*qk, torch.arange(7, device=device) + LONG), rotated))
    assert rope.state_dict().keys() == (mine.keys() if assigned == "parameter" else set())
    if assigned == "parameter":
        rope(*qk)[0].square()[..., 0].sum().backward()
        assert rope.inv_freq is mine["inv_freq"] and rope.inv_freq.grad.any()
    for name in mine:
        setattr(rope, name, None)
    rope.load_state_dict({"inv_freq": own})  # a checkpoint that holds the module's own
    assert all(map(torch.equal, rope(*qk, offset=LONG), expected))


@pytest.mark.shared
def test_both_lists_of_longrope_may_be_assigned(device):
    rope, qk = module("longrope", device=device), tuple(some(device))
    lists = rope.inv_freq.float() / 3  # [2, pairs], or [2, 2, pairs] on a device without float64
    rope.inv_freq = lists
    for offset, mine in ((0, lists[0]), (LONG, lists[1])):
        rotated = torch.ops.rope.rotate_qk(*qk, inv_freq=mine, offset=offset, attention_factor=rope.attention_factor)
        assert all(map(torch.equal, rope(*qk, offset=offset), rotated))


@pytest.mark.cpu
def test_a_compiled_module_follows_what_is_assigned():
    rope, qk = module(), tuple(some("cpu"))
    compiled = torch.compile(rope, backend="aot_eager", fullgraph=True)
    expected = compiled(*qk)
    for mine in (rope.inv_freq / 3, torch.nn.Parameter(rope.inv_freq / 5)):
        rope.inv_freq = mine
        assert all(map(torch.equal, compiled(*qk), torch.ops.rope.rotate_qk(*qk, inv_freq=mine)))
    rope.inv_freq = None
    assert all(map(torch.equal, compiled(*qk), expected))


@pytest.mark.shared
def test_functional_call_and_parametrizations_reach_the_frequencies(device):
    class Third(torch.nn.Module):
        def forward(self, inv_freq):
            return inv_freq / 3

    rope, qk = module().to(device), tuple(some(device))
    third = rope.inv_freq / 3
    expected = torch.ops.rope.rotate_qk(*qk, inv_freq=third)
    assert all(map(torch.equal, torch.func.functional_call(rope, {"inv_freq": third}, qk), expected))
    parametrize.register_parametrization(rope, "inv_freq", Third())
    assert all(map(torch.equal, rope.bfloat16()(*qk), expected))
    parametrize.remove_parametrizations(rope, "inv_freq")
    assert all(map(torch.equal, rope(*qk), expected))


@pytest.mark.cpu
def test_a_fixed_length_fixes_the_frequencies():
    q, k = some("cpu")
    for kind, fixed in ("longrope", {"long": True}), ("longrope", {"long": False}), ("dynamic", {"seq_len": 3 * LONG}):
        inv_freq, factor = frequencies.KINDS[kind](HEAD_DIM, 5000.0, **KINDS[kind], **fixed)
        for max_position in (None, 200):
            rope = module(kind, max_position, **fixed)
            for offset in (0, LONG):
                x = rotate(q, inv_freq=inv_freq, attention_factor=factor, offset=offset)
                assert_close(rope(q, k, offset=offset)[0], x, 3, 5e-7)


# ---- errors ----


@pytest.mark.cpu
@pytest.mark.parametrize("kind", ["default", "longrope"])
def test_positions_outside_the_tables_raise_an_error(kind):
    for wrong in ({"offset": 94}, {"positions": torch.arange(7) + 94}, {"positions": torch.arange(-1, 98, 15)[:7]}):
        with pytest.raises(IndexError):
            module(kind, 100)(*some("cpu"), **wrong)


@pytest.mark.cpu
def test_heads_have_head_dim_channels_unless_rotary_dim_is_given_and_each_pair_has_a_frequency():
    qk, wider = list(some("cpu")), list(some("cpu", head_dim=2 * HEAD_DIM))
    only_first, config = {"rotary_dim": HEAD_DIM}, {"model_type": "llama", "head_dim": HEAD_DIM}
    for rope in (RotaryEmbedding(HEAD_DIM, **only_first), RotaryEmbedding.from_config(config)):
        q = rope(*wider)[0]
        assert torch.equal(q[..., :HEAD_DIM], rope(*(x[..., :HEAD_DIM] for x in wider))[0])
        assert torch.equal(q[..., HEAD_DIM:], wider[0][..., HEAD_DIM:])
    for more, given, message in (
        ({}, wider, "q has head_dim 64 but must have head_dim 32, as the module .*make it with rotary_dim=32"),
        (only_first, [x[..., :16] for x in qk], "must have at most 8, because q has head_dim 16"),
        ({}, [x[0, :, 0] for x in qk], r"rope.rotate_qk: q has shape \[7, 32\] but must have shape \[seq, heads"),
    ):
        with pytest.raises(ValueError, match=message):
            RotaryEmbedding(HEAD_DIM, **more)(*given)
    for wrong in (torch.ones(15), torch.ones(2, 32), torch.ones(()), torch.nn.Parameter(torch.ones(17))):
        with pytest.raises(ValueError, match=r"the length of inv_freq is \d+ but must be rotary_dim / 2, which is 16"):
            rope.inv_freq = wrong
    with pytest.raises(TypeError, match="inv_freq is of type list but must be a tensor"):
        rope.inv_freq = [1.0] * 16


@pytest.mark.cpu
def test_arguments_of_from_config_replace_those_of_the_config_and_reach_a_subclass():
    class Named(RotaryEmbedding):
        def __init__(self, *args, name="", **arguments):
            super().__init__(*args, **arguments)
            self.name = name

    config = {"model_type": "llama", "head_dim": HEAD_DIM}
    rope = Named.from_config(config, name="given", kind="linear", factor=2.0)
    plain = RotaryEmbedding.from_config(config, kind="linear", factor=2.0)
    assert rope.name == "given" and torch.equal(rope.inv_freq, plain.inv_freq)
    assert torch.equal(2 * plain.inv_freq, RotaryEmbedding(HEAD_DIM).inv_freq)
