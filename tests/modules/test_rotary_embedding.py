"""Tests torch_rope.RotaryEmbedding: its angles, its buffers, and frequencies that depend on the sequence's length."""

import copy
import pickle

import numpy as np
import pytest
import torch
from cases import Calls, covering, name_of
from oracle import assert_close, numpy_of, rotate
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize

from torch_rope import RotaryEmbedding, frequencies

pytestmark = pytest.mark.heart

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


def tables_of(rope):
    """Returns the tensors that the module rotates by."""
    return {name: t for name, t in rope.angles(1).items() if isinstance(t, torch.Tensor)}


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
    p = torch.arange(7).flip(0)
    given = {
        "none": {"offset": start},
        "[S]": {"positions": p, "offset": start},
        "[B,S]": {"positions": torch.stack([p + start, p])},
        "int32 [1,S]": {"positions": (p + start).int()[None]},
    }[positions]
    given = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    with Calls() as calls:
        outs = rope(q, k, **given)
    assert calls.names.count("rope::rotate_qk") == 1 and "aten::_local_scalar_dense" not in calls.names
    assert "aten::_to_copy" not in calls.names or kind == "dynamic"  # it makes floats of integers, on the device
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
    with torch.inference_mode():
        rope = module().to(device)
    rope(q, k)[0].sum().backward()  # a module that is made in inference mode can train
    assert q.grad.any()


@pytest.mark.shared
@pytest.mark.parametrize("kind, max_position", [FEW[1], FEW[2], FEW[4]])
def test_compiles_without_breaks_and_does_not_compile_again_for_a_step(kind, max_position, device):
    torch._dynamo.reset()
    rope = module(kind, max_position).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rope, backend=counter, fullgraph=True)
    q, k = (x[:, :1] for x in some(device))
    for offset in [*range(20, 23), *range(LONG + 20, LONG + 23)]:
        for given in ({"offset": offset}, {"positions": torch.tensor([offset]).to(device)}):
            assert all(map(torch.equal, compiled(q, k, **given), rope(q, k, **given)))
    # Graphs with an offset: one with a constant, one with a symbol, and one more if the frequencies change, for the
    # other side of LONG. With positions there is one graph.
    assert counter.frame_count <= (3 if kind not in ("longrope", "dynamic") else 4)


# ---- buffers ----

CASTS = {
    "to(bfloat16)": lambda m: m.to(torch.bfloat16),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.float16),
    "to(channels_last)": lambda m: m.to(memory_format=torch.channels_last),
    "in a model": lambda m: torch.nn.ModuleList([m, torch.nn.Linear(2, 2)]).to(torch.bfloat16),
}


@each_of_few
def test_buffers_are_never_cast(kind, max_position, device):
    rope = module(kind, max_position).to(device)
    before = {name: (t.data_ptr(), t.dtype, t.clone()) for name, t in rope.named_buffers()}
    for name_of_cast, cast in CASTS.items():
        cast(rope)
        assert before.keys() == dict(rope.named_buffers()).keys()
        for name, t in rope.named_buffers():
            pointer, dtype, values = before[name]
            assert t.data_ptr() == pointer and t.dtype == dtype and torch.equal(t, values), name_of_cast


@pytest.mark.usefixtures("_memory_of_others")
@each_of_few
def test_buffers_are_not_saved_and_are_filled_again_after_to_empty(kind, max_position, device):
    """reset_parameters, which FSDP calls on a module that was on the meta device, fills them in place."""
    rope, lost = (module(kind, max_position).to(device) for _ in range(2))
    assert not rope.state_dict()
    on_meta = module(kind, max_position, device="meta")
    q, k = some("meta")
    assert [out.shape for out in on_meta(q, k, torch.zeros(7, device="meta").long())] == [q.shape, k.shape]
    addresses = [t.fill_(99.0).data_ptr() for t in lost.buffers()]
    lost.reset_parameters()
    assert addresses == [t.data_ptr() for t in lost.buffers()]
    copies = {
        "reset": lost,
        "meta": torch.nn.Sequential(on_meta).to_empty(device=device)[0],
        "emptied": copy.deepcopy(rope).to_empty(device=device),
        "pickle": pickle.loads(pickle.dumps(rope.cpu())).to(device),
    }
    rope.to(device)
    q, k = some(device)
    for name, other in copies.items():
        assert str(other) == str(rope), name
        for a, b in zip(other.buffers(), rope.buffers(), strict=True):
            assert torch.equal(a, b) and a.data_ptr() != b.data_ptr() and a.device == b.device, name
        assert all(map(torch.equal, other(q, k, offset=LONG), rope(q, k, offset=LONG))), name


@pytest.mark.shared
@each_of_few
def test_buffers_that_are_cast_through_their_data_keep_their_values_for_rotations(kind, max_position, device):
    """FSDP1 casts buffers so, and casts them back to evaluate in full precision."""
    rope, qk = module(kind, max_position).to(device), tuple(some(device))
    before, expected = tables_of(rope), rope(*qk, offset=LONG)
    original = {name: t.dtype for name, t in rope.named_buffers()}
    for dtypes in (dict.fromkeys(original, torch.bfloat16), original):
        for name, t in rope.named_buffers():
            t.data = t.to(dtypes[name])
        assert all(t.data_ptr() == before[name].data_ptr() for name, t in tables_of(rope).items())
        for each in (rope, copy.deepcopy(rope)):
            assert all(map(torch.equal, each(*qk, offset=LONG), expected))
            assert each is rope or {name: t.dtype for name, t in each.named_buffers()} == original


def test_buffers_that_are_moved_are_filled_there(device):
    """FSDP1 moves them through their data. There and back, frequencies keep all bits."""
    assert module().to(device).inv_freq.dtype == (torch.float32 if device == "mps" else torch.float64)
    assert torch.equal(module().to(device).to("cpu").inv_freq, exact_frequencies("default", 0).inv_freq)
    rope, moved = module("longrope", 64).to(device), module("longrope", 64)
    for t in moved.buffers():
        t.data = t.to(device)
    with torch.inference_mode():
        found = tables_of(moved)
    assert all(torch.equal(t, found[name]) and not found[name].is_inference() for name, t in tables_of(rope).items())


@pytest.mark.shared
def test_values_that_the_user_assigns_are_used_and_not_cast(device):
    rope, qk = module().to(device), tuple(some(device))
    mine = rope.inv_freq.float() / 3
    called = torch.func.functional_call(rope, {"inv_freq": mine}, qk)
    assert all(map(torch.equal, called, torch.ops.rope.rotate_qk(*qk, inv_freq=mine)))
    rope.inv_freq = mine
    rope = copy.deepcopy(rope.half()).to(device)
    assert torch.equal(tables_of(rope)["inv_freq"], mine)
    del rope.inv_freq
    rope.register_buffer("inv_freq", mine)
    assert tables_of(rope)["inv_freq"] is mine
    del rope.inv_freq
    rope.inv_freq = learned = torch.nn.Parameter(mine)
    rope.to(device).bfloat16()(*qk)[0].square()[..., 0].sum().backward()
    assert rope.inv_freq is learned and learned.grad.any()
    assert learned.dtype == learned.grad.dtype == torch.float32


class Third(torch.nn.Module):
    def forward(self, inv_freq):
        return inv_freq / 3


@pytest.mark.shared
def test_a_parametrization_of_the_frequencies_is_not_cast_and_leaves_its_values(device):
    """If it is removed, they are in the buffer that was there before, but in other memory."""
    rope = module().to(device)
    expected = rope.inv_freq / 3
    parametrize.register_parametrization(rope, "inv_freq", Third())
    for cast in CASTS.values():
        cast(rope)
        assert torch.equal(tables_of(rope)["inv_freq"], expected)
    parametrize.remove_parametrizations(rope, "inv_freq")
    assert torch.equal(tables_of(rope)["inv_freq"], expected)


@pytest.mark.cpu
def test_share_memory_shares_the_buffers():
    rope = torch.nn.Sequential(module("longrope", 64)).share_memory()[0]
    assert all(t.is_shared() for t in (*rope.buffers(), *tables_of(rope).values()))


# ---- errors ----


@pytest.mark.cpu
def test_positions_outside_the_tables_raise_an_error():
    q, k = some("cpu")
    for kind in ("default", "longrope"):
        rope = module(kind, 100)
        for wrong in ({"offset": 94}, {"positions": torch.arange(7) + 94}, {"positions": torch.arange(-1, 98, 15)[:7]}):
            with pytest.raises(IndexError):
                rope(q, k, **wrong)


@pytest.mark.cpu
def test_heads_have_head_dim_channels_unless_rotary_dim_is_given():
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


EVEN = "head_dim is 63 but must be even to rotate all channels; or pass a smaller"
NEEDS = "factor is missing but must be given, because kind 'yarn' needs factor, original_max_position"


@pytest.mark.cpu
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"kind": "yarns"}, "kind is 'yarns' but must be one of 'default'"),
        ({"rotary_dim": 66}, "rotary_dim is 66 but must be at most head_dim, which is 64"),
        ({"head_dim": 63}, EVEN),
        ({"head_dim": 63, "rotary_dim": 63}, EVEN),
        *(({"head_dim": wrong}, f"head_dim is {wrong!r} but must be a positive integer") for wrong in (0, 64.0, "64")),
        ({"kind": "dynamic", "max_position": 9} | KINDS["dynamic"], "max_position is 9 but must be None for kind 'dyn"),
        ({"max_position": 0}, "max_position is 0 but must be at least 1"),
        ({"kind": "yarn"} | KINDS["yarn"] | {"factor": 0.5}, "frequencies.yarn: factor is 0.5 but must be a number"),
        ({"kind": "yarn"}, NEEDS),
        ({"kind": "linear", "factor": 2.0, "truncate": True}, "truncate is given but must not be, because kind 'lin"),
    ],
)
def test_wrong_arguments_raise_an_error(arguments, message):
    with pytest.raises(TypeError if "given" in message else ValueError, match=message):
        RotaryEmbedding(**{"head_dim": 64} | arguments)
