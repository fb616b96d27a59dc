"""Tests torch_rope.RotaryEmbedding: its angles, its buffers, and frequencies that depend on the length of the
sequence."""

import copy
import pickle

import numpy as np
import pytest
import torch
from cases import EMULATED, EXHAUSTIVE, checks_ranges, covering
from oracle import assert_close, numpy_of, rotate
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from torch_rope import RotaryEmbedding, frequencies

pytestmark = pytest.mark.heart

HEAD_DIM, LONG = 32, 50  # LONG: the length above which the frequencies of longrope and dynamic change
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position": LONG},
    "llama3": {"factor": 8.0, "original_max_position": LONG},
    "longrope": {
        "short_factor": [1 + i / 40 for i in range(16)],
        "long_factor": [1 + i / 4 for i in range(16)],
        "original_max_position": LONG,
        "factor": 4.0,
    },
    "dynamic": {"factor": 2.0, "original_max_position": LONG},
    "proportional": {"partial_rotary_factor": 0.5},
}
# (kind, max_position). Without max_position the kernel computes the angles; with it there are tables, except for
# dynamic.
WITH_TABLES = [(kind, t) for kind in KINDS for t in (None, 200) if (kind, t) != ("dynamic", 200)]
CHANGING = [of for of in WITH_TABLES if of[0] in ("longrope", "dynamic")]  # their frequencies change with the length
FIXED = [of for of in WITH_TABLES if of not in CHANGING]
FEW = WITH_TABLES if EXHAUSTIVE else [*FIXED[:2], *CHANGING]


def module(kind="default", max_position=None, **more):
    return RotaryEmbedding(HEAD_DIM, 5000.0, kind=kind, max_position=max_position, **KINDS[kind], **more)


def some(device, batch=2, seq=7, head_dim=HEAD_DIM):
    return (torch.randn(batch, seq, heads, head_dim, device="cpu").to(device) for heads in (3, 1))


def exact_frequencies(kind, length):
    more = {"seq_len": length} if kind in ("dynamic", "longrope") else {}
    return frequencies.KINDS[kind](HEAD_DIM, 5000.0, **KINDS[kind], **more)


CALLS = {
    "start": [0, LONG - 7, LONG - 6, 130],  # the highest position is start + seq - 1 = start + 6
    "positions": ["none", "[S]", "[B,S]", "int32 [1,S]"],
}


@pytest.mark.parametrize(
    "of, start, positions",
    [
        tuple(case.values())
        for kinds, strength in ((FIXED, 2), (CHANGING, 3))
        for case in covering({"of": kinds} | CALLS, strength=strength)
    ],
    ids=str,
)
def test_rotates_by_the_frequencies_of_its_kind(of, start, positions, device):
    kind, max_position = of
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
    inv_freq, factor = exact_frequencies(kind, start + 7)
    for x, out in zip((q, k), rope(q, k, **given), strict=True):
        # An angle is right to 5e-7, a table to one float32 rounding. If mps has the positions, dynamic's power is float32.
        part = 3e-5 if kind == "dynamic" and device == "mps" and positions != "none" else 5e-7
        assert_close(out, rotate(x, inv_freq=inv_freq, attention_factor=factor, **given), 3, part)


@pytest.mark.parametrize("kind", ["default", "longrope"])
def test_tables_are_float64_angles_rounded_once(kind, device):
    length = 140000
    rope = RotaryEmbedding(HEAD_DIM, 5000.0, kind=kind, max_position=length, **KINDS[kind]).to(device)
    kinds = [exact_frequencies(kind, n).inv_freq for n in ((1, length) if kind == "longrope" else (1,))]
    angle = np.stack([np.arange(length)[:, None] * numpy_of(f) for f in kinds]).reshape(rope.cos.shape)
    for table, exact in ((rope.cos, np.cos(angle)), (rope.sin, np.sin(angle))):
        assert table.dtype == torch.float32
        # The cos of numpy and of torch may differ in the last bit of float64. Very rarely this changes the float32
        # value.
        different = table.cpu().numpy() != exact.astype(np.float32)
        assert different.mean() < 1e-6 and abs(table.cpu().numpy() - exact).max() < 6e-8


CASTS = {
    "to(bfloat16)": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.float16),
    "to(channels_last)": lambda m: m.to(memory_format=torch.channels_last),
    "to(its device)": lambda m: m.to(next(iter(tables_of(m).values())).device),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "in a model": lambda m: torch.nn.ModuleDict({"rope": m, "linear": torch.nn.Linear(2, 2)}).to(torch.bfloat16)[
        "rope"
    ],
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("kind,max_position", [("default", None), ("default", 64), ("longrope", 64), ("dynamic", None)])
def test_buffers_are_never_cast(kind, max_position, cast, device):
    rope = module(kind, max_position).to(device)
    before = {name: (t.data_ptr(), t.dtype, t.clone()) for name, t in rope.named_buffers()}
    CASTS[cast](rope)
    assert [*before] == [name for name, _ in rope.named_buffers()]
    for name, t in rope.named_buffers():
        pointer, dtype, values = before[name]
        assert t.data_ptr() == pointer and t.dtype == dtype and torch.equal(t, values)


def test_moving_to_a_device_and_back_keeps_all_bits_of_the_frequencies(device):
    assert module().to(device).inv_freq.dtype == (torch.float32 if device == "mps" else torch.float64)
    there_and_back = module().to(device).to("cpu")
    assert torch.equal(there_and_back.inv_freq, exact_frequencies("default", 0).inv_freq)


@pytest.mark.cpu
def test_autocast_changes_nothing():
    q, k = some("cpu")
    for kind in KINDS:
        rope = module(kind)
        positions = torch.arange(7) + LONG
        expected = rope(q, k, positions)
        with torch.autocast("cpu", torch.bfloat16):
            found = rope(q, k, positions)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind,max_position", FEW)
def test_buffers_are_not_saved_and_are_filled_again_after_to_empty(kind, max_position, device):
    if EMULATED:
        pytest.skip("the emulator does not know the memory of storages that are copied or unpickled")
    rope = module(kind, max_position).to(device)
    assert not rope.state_dict()
    rope.load_state_dict({})
    with torch.device("meta"):
        on_meta = module(kind, max_position)
    assert all(t.is_meta for t in on_meta.buffers())
    copies = {
        "meta": on_meta.to_empty(device=device),
        "inside": torch.nn.Sequential(module(kind, max_position, device="meta")).to_empty(device=device)[0],
        "emptied": copy.deepcopy(rope).to_empty(device=device),
        "deepcopy": copy.deepcopy(rope),
        "pickle": pickle.loads(pickle.dumps(rope.cpu())).to(device),
    }
    rope.to(device)
    q, k = some(device)
    for name, other in copies.items():
        assert str(other) == str(rope), name
        for a, b in zip(other.buffers(), rope.buffers(), strict=True):
            assert torch.equal(a, b) and a.data_ptr() != b.data_ptr() and a.device == b.device, name
        for a, b in zip(other(q, k, offset=LONG), rope(q, k, offset=LONG), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("max_position", [None, 50])
def test_reset_parameters_fills_the_buffers_again(max_position, device):
    """FSDP calls it on a module that was on the meta device."""
    rope, lost = (module("longrope", max_position).to(device) for _ in range(2))
    addresses = [t.fill_(99.0).data_ptr() for t in lost.buffers()]
    lost.reset_parameters()
    assert addresses == [t.data_ptr() for t in lost.buffers()]
    for a, b in zip(lost.buffers(), rope.buffers(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def tables_of(rope):
    """Returns the tensors that the module rotates by."""
    return {name: t for name, t in rope.angles(1).items() if isinstance(t, torch.Tensor)}


@pytest.mark.parametrize("kind,max_position", FEW)
def test_buffers_that_are_cast_through_their_data_keep_their_values_for_rotations(kind, max_position, device):
    """FSDP1 casts buffers so, and casts them back to evaluate in full precision. It also moves them so."""
    rope = module(kind, max_position).to(device)
    q, k = some(device)
    before, addresses = tables_of(rope), [t.data_ptr() for t in tables_of(rope).values()]
    expected = rope(q, k, offset=LONG)
    original = {name: t.dtype for name, t in rope.named_buffers()}
    for dtypes in (dict.fromkeys(original, torch.bfloat16), original):
        for name, t in rope.named_buffers():
            t.data = t.to(dtypes[name])
        assert [t.data_ptr() for t in tables_of(rope).values()] == addresses
        copies = [rope, copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))] if not EMULATED else [rope]
        for each in copies:
            assert tables_of(each).keys() == before.keys()
            assert all(torch.equal(t, before[name]) for name, t in tables_of(each).items())
            assert all(map(torch.equal, each(q, k, offset=LONG), expected))
        for each in copies[1:]:
            assert {name: t.dtype for name, t in each.named_buffers()} == original
    torch._dynamo.reset()
    rope.requires_grad_(False)
    compiled = torch.compile(rope, backend="aot_eager", fullgraph=True)
    for t in rope.buffers():
        t.data = t.to(torch.bfloat16)
    assert all(map(torch.equal, compiled(q, k, offset=LONG), expected))
    rope.reset_parameters()
    assert all(torch.equal(t, before[name]) for name, t in tables_of(rope).items())


def test_buffers_that_are_moved_through_their_data_are_filled_there(device):
    rope, moved = module("longrope", 64).to(device), module("longrope", 64)
    for t in moved.buffers():
        t.data = t.to(device)
    with torch.inference_mode():
        found = tables_of(moved)
    assert all(torch.equal(t, found[name]) and not found[name].is_inference() for name, t in tables_of(rope).items())


def test_a_module_that_is_made_in_inference_mode_can_train(device):
    with torch.inference_mode():
        rope = module().to(device)
    q, k = (x.requires_grad_() for x in some(device))
    rope(q, k)[0].sum().backward()
    assert q.grad.any()


def test_values_that_the_user_assigns_are_used_and_not_cast(device):
    rope = module().to(device)
    mine, qk = rope.inv_freq.float() / 3, tuple(some(device))
    called = torch.func.functional_call(rope, {"inv_freq": mine}, qk)
    assert all(map(torch.equal, called, torch.ops.rope.rotate_qk(*qk, inv_freq=mine)))
    rope.inv_freq = mine
    rope = copy.deepcopy(rope.half()).to(device)
    assert torch.equal(tables_of(rope)["inv_freq"], mine)
    del rope.inv_freq
    rope.register_buffer("inv_freq", mine)
    assert tables_of(rope)["inv_freq"] is mine
    on_meta, learned = module(device="meta"), torch.nn.Parameter(mine)
    on_meta.inv_freq = learned
    assert tables_of(on_meta)["inv_freq"] is learned


class Third(torch.nn.Module):
    def forward(self, inv_freq):
        return inv_freq / 3


@pytest.mark.parametrize("learned", [False, True])
def test_a_parametrization_of_the_frequencies_is_not_cast(learned, device):
    rope = module().to(device)
    if learned:
        rope.inv_freq = torch.nn.Parameter(rope.inv_freq)
    expected = rope.inv_freq.detach() / 3
    parametrize.register_parametrization(rope, "inv_freq", Third())
    for cast in CASTS.values():
        cast(rope)
        assert torch.equal(tables_of(rope)["inv_freq"], expected)
    if device != "mps":
        assert torch.equal(tables_of(rope.to("cpu"))["inv_freq"], expected.cpu())
        rope.to(device)
    parametrize.remove_parametrizations(rope, "inv_freq")
    assert torch.equal(tables_of(rope)["inv_freq"], expected)


def test_a_parametrization_that_is_removed_leaves_its_values(device):
    """They are in the buffer that was there before, but in other memory."""
    rope = module().to(device)
    expected = rope.inv_freq / 3
    parametrize.register_parametrization(rope, "inv_freq", Third())
    parametrize.remove_parametrizations(rope, "inv_freq")
    assert torch.equal(tables_of(rope)["inv_freq"], expected)


def test_share_memory_shares_the_buffers():
    for rope in (module(), module("longrope", 64), module()):
        torch.nn.Sequential(rope).share_memory()
        assert all(t.is_shared() for t in rope.buffers()) and all(t.is_shared() for t in tables_of(rope).values())


def test_a_parameter_may_replace_the_frequencies(device):
    rope = module().to(device)
    learned = torch.nn.Parameter(rope.inv_freq.float())
    del rope.inv_freq
    rope.inv_freq = learned
    q, k = some(device)
    rope.to(device).bfloat16()(q, k)[0].square()[..., 0].sum().backward()
    assert rope.inv_freq is learned and learned.grad.any() and learned.dtype == learned.grad.dtype == torch.float32
    rope.half().double()
    assert learned.dtype == learned.grad.dtype == torch.float32


def test_results_on_the_meta_device_have_the_right_shapes():
    q, k = some("meta")
    for kind, max_position in WITH_TABLES:
        outs = module(kind, max_position, device="meta")(q, k, torch.zeros(7, dtype=torch.long, device="meta"))
        assert [out.shape for out in outs] == [q.shape, k.shape]


class Seen(TorchDispatchMode):
    """Collects the operators that run, in `ops`."""

    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops.add(op)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind,max_position", FEW)
def test_the_host_does_not_wait_for_positions(kind, max_position, device):
    """No operator reads a number on the host, or sends a tensor to the device that was made on the host."""
    rope = module(kind, max_position).to(device)
    q, k = some(device)
    positions = (torch.arange(7) + LONG).to(device)
    with Seen() as seen:
        rope(q, k, positions, 3)
        rope(q, k, offset=99)
    assert not seen.ops & {torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default} - (
        {torch.ops.aten._to_copy.default} if kind == "dynamic" else set()  # integers to floats, on the device
    )
    assert torch.ops.rope.rotate_qk.default in seen.ops


@pytest.mark.parametrize("kind,max_position", FEW)
def test_compiles_without_breaks_and_does_not_compile_again_for_a_step(kind, max_position, device):
    torch._dynamo.reset()
    rope = module(kind, max_position).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rope, backend=counter, fullgraph=True)
    q, k = (x[:, :1] for x in some(device))
    for offset in [*range(20, 26), *range(LONG + 20, LONG + 26)]:
        for given in ({"offset": offset}, {"positions": torch.tensor([offset]).to(device)}):
            for found, expected in zip(compiled(q, k, **given), rope(q, k, **given), strict=True):
                assert torch.equal(found, expected)
    # Graphs with an offset: one with a constant, one with a symbol, and one more if the frequencies change, for the
    # other side of LONG. With positions there is one graph.
    assert counter.frame_count <= (3 if kind not in ("longrope", "dynamic") else 4)


def test_the_gradients_are_rotated_by_the_inverse(device):
    q, k = (x.requires_grad_() for x in some(device))
    rope = module("yarn").to(device)
    outs = rope(q, k, offset=3)
    given = [torch.randn_like(out) for out in outs]
    back = torch.autograd.grad(outs, (q, k), given)
    for found, expected in zip(
        back, torch.ops.rope.rotate_qk(*given, **rope.angles(7, offset=3), inverse=True), strict=True
    ):
        assert torch.equal(found, expected)


def test_rotary_dim_and_interleaved_are_passed_on(device):
    rope = RotaryEmbedding(HEAD_DIM, rotary_dim=8, interleaved=True).to(device)
    q, k = some(device)
    expected = torch.ops.rope.rotate_qk(q, k, inv_freq=rope.inv_freq, interleaved=True)
    assert rope.inv_freq.shape[-1] == 4 and all(map(torch.equal, rope(q, k), expected))


@pytest.mark.cpu
def test_an_odd_rotary_dim_rotates_one_channel_more():
    """The powers are those of the odd number, as in transformers."""
    q, k = some("cpu")
    for kind, more in KINDS.items():
        if kind in ("longrope", "proportional"):  # their parameters above are for a whole head
            continue
        rope = RotaryEmbedding(HEAD_DIM, rotary_dim=9, kind=kind, **more)
        exact = {"seq_len": 2 * LONG} if kind == "dynamic" else {}
        inv_freq, factor = frequencies.KINDS[kind](9, 10000.0, **more, **exact)
        out = rope(q, k, offset=2 * LONG - 7)[0]
        expected = torch.ops.rope.rotate(q, inv_freq=inv_freq, offset=2 * LONG - 7, attention_factor=factor)
        assert rope.rotary_dim == 10 and (out - expected).abs().max() < 1e-6


def test_positions_outside_the_tables_raise_an_error(device):
    if not checks_ranges(device):
        pytest.skip("positions in tensors are checked on the CPU only")
    q, k = some(device)
    for kind in ("default", "longrope"):
        rope = module(kind, 100)
        for wrong in ({"offset": 94}, {"positions": torch.arange(7) + 94}, {"positions": torch.arange(-1, 98, 15)[:7]}):
            with pytest.raises(IndexError):
                rope(q, k, **wrong)


def test_heads_of_another_size_raise_an_error_unless_rotary_dim_is_given(device):
    wider = list(some(device, head_dim=2 * HEAD_DIM))
    message = "q has head_dim 64 but must have head_dim 32, as the module has; .*make it with rotary_dim=32"
    with pytest.raises(ValueError, match=message):
        module().to(device)(*wider)
    with pytest.raises(ValueError, match="must have at most 8, because q has head_dim 16"):
        RotaryEmbedding(HEAD_DIM, rotary_dim=HEAD_DIM).to(device)(*some(device, head_dim=16))
    config = {"model_type": "llama", "head_dim": HEAD_DIM}
    for rope in (RotaryEmbedding(HEAD_DIM, rotary_dim=HEAD_DIM), RotaryEmbedding.from_config(config)):
        q = rope.to(device)(*wider)[0]
        assert torch.equal(q[..., :HEAD_DIM], rope(*(x[..., :HEAD_DIM] for x in wider))[0])
        assert torch.equal(q[..., HEAD_DIM:], wider[0][..., HEAD_DIM:])
    with pytest.raises(ValueError, match=r"rope.rotate_qk: q has shape \[7, 32\] but must have shape \[seq, heads"):
        module().to(device)(*(x[0, :, 0] for x in some(device)))


@pytest.mark.cpu
def test_wrong_arguments_raise_an_error():
    with pytest.raises(ValueError, match="kind is 'yarns' but must be one of 'default'"):
        RotaryEmbedding(64, kind="yarns")
    with pytest.raises(ValueError, match="rotary_dim is 66 but must be at most head_dim, which is 64"):
        RotaryEmbedding(64, rotary_dim=66)
    for wrong in ({}, {"rotary_dim": 63}):
        with pytest.raises(
            ValueError, match="head_dim is 63 but must be even to rotate all channels; or pass a smaller"
        ):
            RotaryEmbedding(63, **wrong)
    for wrong in (0, 64.0, "64"):
        with pytest.raises(ValueError, match=f"head_dim is {wrong!r} but must be a positive integer"):
            RotaryEmbedding(wrong)
    with pytest.raises(ValueError, match="max_position is 100 but must be None for kind 'dynamic'"):
        module("dynamic", 100)
    with pytest.raises(ValueError, match="max_position is 0 but must be at least 1"):
        module(max_position=0)
    with pytest.raises(ValueError, match="frequencies.yarn: factor is 0.5 but must be a number that is at least 1"):
        RotaryEmbedding(64, kind="yarn", factor=0.5, original_max_position=9)
    message = "factor is missing but must be given, because kind 'yarn' needs factor, original_max_position"
    with pytest.raises(TypeError, match=message):
        RotaryEmbedding(64, kind="yarn")
    with pytest.raises(
        TypeError, match="truncate is given but must not be, because kind 'linear' takes only base, factor"
    ):
        RotaryEmbedding(64, kind="linear", factor=2.0, truncate=True)
