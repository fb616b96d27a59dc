"""Tests the back end of comfy-kitchen: calls its rope functions as ComfyUI does.

The results are compared with the formula of the functions in float64, and so are those of comfy-kitchen's eager back end,
with a wider limit.
"""

import copy
import importlib.util
import sys

import oracle
import pytest
import torch
from cases import ROOT, Calls, covering, moved, name_of, needed, spread

import torch_rope

ck = needed("comfy_kitchen")
from comfy_kitchen.exceptions import NoCapableBackendError  # noqa: E402
from comfy_kitchen.registry import registry  # noqa: E402

from torch_rope.integrations.comfy_kitchen import FUNCTIONS, NAME, register, unregister  # noqa: E402

SIZES = {"b": 2, "h": 6, "kv": 3, "s": 5, "s+3": 8, "1": 1}
DIM = 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
XS = ("x", "xq", "xk", "q", "k")  # the names of the arguments that are rotated
SCALES = ("scale", "q_scale", "k_scale")
# The dimensions of x before head_dim, and those of the table before its matrices. One table has a row of matrices for
# each token, one for each token and head, and so on.
NORM_FORMS = {
    "heads first": ("b h s", "1 1 s"),
    "heads first, batch": ("b h s", "b 1 s"),
    "heads first, one row": ("b h s", "1 1 1"),
    "heads first, one row for a sequence": ("b h s", "b 1 1"),
    "heads first, longer": ("b h s", "1 1 s+3"),
    "heads first, batch, longer": ("b h s", "b 1 s+3"),
    "seq first": ("b s h", "1 s 1"),
    "seq first, batch": ("b s h", "b s 1"),
    "seq first, one row for a head": ("b s h", "1 1 h"),
}
FORMS = NORM_FORMS | {
    "heads first, by head": ("b h s", "1 h s"),
    "heads first, by head, longer": ("b h s", "1 h s+3"),
    "seq first, by head": ("b s h", "b s h"),
    "few dimensions": ("b h s", "s"),
    "no batch, seq first": ("s h", "s 1"),
    "no batch, heads first": ("h s", "1 1 s"),
    "no heads": ("s", "1 s"),
    "one token": ("", ""),
}
# Memory layouts of x: the steps and the gaps of spread() for its last two dimensions, and whether the two dimensions
# before head_dim are transposed in memory.
LAYOUTS = {
    "dense": ((1, 1), (0, 0), False),
    "transposed": ((1, 1), (0, 0), True),
    "part of a larger one": ((3, 1), (1, 7), False),
    "every second channel": ((1, 2), (0, 0), True),
}


@pytest.fixture(autouse=True)
def _registered():
    register()
    yield
    unregister()


def sizes(words, **changes):
    return [(SIZES | changes)[word] for word in words.split()]


def rotations(*shape, dtype=torch.float32, factor=1.25):
    """Returns a table of rotations by random angles, times a factor: [*shape, 2, 2], with gaps between its elements."""
    angle = torch.randn(shape, dtype=torch.float64) * 100
    cos, sin = factor * angle.cos(), factor * angle.sin()
    table = torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2)).to(dtype)
    return spread(table, (1,) * len(shape) + (2, 3), (0,) * (len(shape) + 2))


def laid_out(shape, dtype, layout="dense"):
    """Returns a random tensor of this shape, with NaN between its elements."""
    steps, gaps, transposed = LAYOUTS[layout]
    x = torch.randn(shape).to(dtype)
    x = x.transpose(-2, -3) if transposed and x.dim() > 2 else x
    more = x.dim() - 2
    x = spread(x, (1,) * more + steps, (0,) * more + gaps) if x.dim() > 1 else x
    return x.transpose(-2, -3) if transposed and x.dim() > 2 else x


def arguments(name, xs, table, scales=(), **more):
    """Returns the arguments of a function by name."""
    keys = ["x"] if "1" in name else ["xq", "xk"] if name.startswith("apply") else ["q", "k"]
    scale_keys = ["scale"] if "1" in name else ["q_scale", "k_scale"]
    return dict(zip(keys, xs, strict=False)) | {"freqs_cis": table} | dict(zip(scale_keys, scales, strict=False)) | more


def on(device, given):
    """Returns a copy of the arguments on a device, with the same strides."""
    return {key: moved(copy.deepcopy(t), device) if torch.is_tensor(t) else t for key, t in given.items()}


def those(keys, given):
    return [given[key] for key in keys if given.get(key) is not None]


def call(name, given):
    """Calls a function of comfy_kitchen. Returns a list of its results."""
    out = getattr(ck, name)(**given)
    return list(out) if isinstance(out, tuple) else [out]


def formula(name, x, table, scale=None, epsilon=1e-6, rot_dim=0):
    """Returns the result of a function, and the magnitude of each element's pair, in float64."""
    x, table = x.double(), table.double()
    if scale is not None:
        x = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * scale.double()
    interleaved, rotary_dim = "split_half" not in name, rot_dim or x.shape[-1]
    if interleaved and x.dim() == 4 and table.dim() == 6:
        table = table[:, :, : x.shape[2]]  # the table may be longer
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    pair = [table[..., row, 0] * a + table[..., row, 1] * b for row in (0, 1)]
    size = [torch.hypot(*pair)] * 2
    parts = (torch.stack(t, -1).flatten(-2) if interleaved else torch.cat(t, -1) for t in (pair, size))
    value, size = (part.view(rotated.shape) for part in parts)
    return torch.cat([value, rest], -1).numpy(), torch.cat([size, rest.abs()], -1).numpy()


def check(name, given, device):
    """Asserts that a call runs our back end, that its results are right, and that those of eager nearly are."""
    ours, scales = on(device, given), those(SCALES, given)
    options = {key: given[key] for key in ("epsilon", "rot_dim") if key in given}
    right = [
        formula(name, x, given["freqs_cis"], scale, **options)
        for x, scale in zip(those(XS, given), 2 * (scales or [None]), strict=False)
    ]
    assert registry.get_capable_backend(name, ours) == NAME
    results = call(name, ours)
    with ck.use_backend("eager"):
        eager = call(name, on("cpu", given))
    for x, before, y, theirs, expected in zip(those(XS, ours), those(XS, given), results, eager, right, strict=True):
        assert y.shape == theirs.shape == x.shape
        assert y.dtype == theirs.dtype == x.dtype
        oracle.assert_close(y, expected, *oracle.limits(x.dtype, {}, 1.25, norm=bool(scales)))
        coarse = max(x.dtype, given["freqs_cis"].dtype, key=lambda dtype: torch.finfo(dtype).eps)
        oracle.assert_close(theirs.to(coarse), expected, 8 if coarse == torch.float32 else 4)
        if name.endswith("_"):
            assert (y.data_ptr(), y.stride()) == (x.data_ptr(), x.stride())
            assert not x.cpu().equal(before)
            x.copy_(before)
        else:
            assert y.stride() == torch.empty_like(x).stride()  # as torch.compile expects
        # Neither x nor the elements around it have changed.
        assert all(torch.equal(*pair) for pair in zip(memory(x), memory(before), strict=True))


def memory(t):
    """Returns the elements of the memory that t is a part of, without NaN, and which of them are NaN."""
    elements = moved(t, "cpu").as_strided((t.untyped_storage().size() // t.element_size(),), (1,), 0)
    return elements.nan_to_num(), elements.isnan()


def possible(name, form, layout, kv, dtype, table_dtype, scale_dtype):
    of_x, of_table = FORMS[form]
    fewer_heads = kv == "kv"
    return (
        (form in NORM_FORMS or name.startswith("apply"))
        and not ("longer" in form and "split_half" in name)
        and not (fewer_heads and ("1" in name or "h" in of_table or "h" not in of_x))
        and (name.startswith("rms") or scale_dtype == torch.float32)  # there is no scale
    )


FACTORS = {
    "name": FUNCTIONS,
    "form": list(FORMS),
    "layout": list(LAYOUTS),
    "kv": ["h", "kv"],
    "dtype": DTYPES,
    "table_dtype": DTYPES,
    "scale_dtype": DTYPES,
}
CASES = covering(FACTORS, possible)


@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_function_agrees_with_its_formula_and_with_the_eager_back_end(case, device):
    of_x, of_table = FORMS[case["form"]]
    shapes = [(*sizes(of_x, h=SIZES[heads]), DIM) for heads in ("h", case["kv"])]
    xs = [laid_out(shape, case["dtype"], case["layout"]) for shape in shapes]
    table = rotations(*sizes(of_table), DIM // 2, dtype=case["table_dtype"])
    scales = [spread(torch.rand(DIM) + 0.5, (2,), (1,)).to(case["scale_dtype"]) for _ in "qk"]
    check(case["name"], arguments(case["name"], xs, table, scales * case["name"].startswith("rms")), device)


PAIRED = [name for name in FUNCTIONS if "1" not in name]
NORMS = [name for name in FUNCTIONS if name.startswith("rms")]


def simple(name, *, dtype=torch.float32, shape=(2, 6, 5, DIM), table=None, **more):
    """Returns arguments of a function, heads first."""
    table = rotations(1, 1, 5, DIM // 2) if table is None else table
    scales = [torch.rand(DIM) + 0.5 for _ in "qk"] * name.startswith("rms")
    return arguments(name, [torch.randn(shape).to(dtype) for _ in "qk"], table, scales, **more)


@pytest.mark.parametrize("name", [name for name in PAIRED if "split_half" not in name])
def test_q_and_k_may_have_different_lengths(name, device):
    given = simple(name, table=rotations(1, 1, 9, DIM // 2))
    check(name, given | dict(list(simple(name, shape=(2, 6, 9, DIM)).items())[1:2]), device)


@pytest.mark.parametrize("name", PAIRED)
def test_q_and_k_may_have_different_batches_and_dtypes(name, device):
    given = simple(name)
    k = list(given)[1]
    check(name, given | {k: torch.randn(1, 6, 5, DIM)}, device)
    check(name, given | {k: torch.randn(2, 6, 5, DIM).half()}, device)


@pytest.mark.parametrize("rot_dim", [0, 6, DIM])
@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_has_an_epsilon_and_perhaps_rot_dim(name, epsilon, rot_dim, device):
    partly = {"rot_dim": rot_dim} if name.startswith("rms_rope_split_half") and name in PAIRED else {}
    table = rotations(1, 1, 5, (partly.get("rot_dim") or DIM) // 2)
    given = simple(name, table=table, epsilon=epsilon, **partly)
    check(name, given, device)
    if "k_scale" in given:
        check(name, given | {"k_scale": None}, device)  # then q_scale normalises k too


@pytest.mark.parametrize("shape", [(2, 6, 0, DIM), (2, 0, 5, DIM), (0, 6, 5, DIM)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_empty_tensor_stays_empty(name, shape, device):
    given = on(device, simple(name, shape=shape, table=rotations(1, 1, shape[2], DIM // 2)))
    assert registry.get_capable_backend(name, given) == NAME
    for y in call(name, given):
        assert y.shape == shape


OPERATORS = {
    "apply_rope": "rotate_qk",
    "apply_rope_": "rotate_qk_",
    "apply_rope1": "rotate",
    "apply_rope1_": "rotate_",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_runs_one_of_our_operators_once(name, device):
    given = on(device, simple(name))
    implementation = registry.get_implementation(name, kwargs=given)
    with Calls() as calls:
        implementation(**given)
    operator = OPERATORS.get(name.replace("_split_half", ""), "norm_rotate_qk")
    assert [n for n in calls.names if n.startswith("rope::")] == [f"rope::{operator}"]
    # The tables are views, and an in-place rotation makes no other tensor.
    assert name.startswith("rms") or "aten::copy_" not in calls.names


@pytest.mark.parametrize("name", FUNCTIONS)
def test_packed_projections_are_written_in_place_or_left_alone(name, device):
    qkv = torch.randn(2, 5, 3, 6, DIM).to(device)
    before = qkv.clone()
    q, k, v = qkv.unbind(2)  # [batch, seq, heads, head_dim]
    table = rotations(1, 5, 1, DIM // 2).to(device)
    given = arguments(name, [q, k], table, [torch.rand(DIM).to(device)] * name.startswith("rms"))
    rotated = call(name.removesuffix("_"), given)
    assert qkv.equal(before)
    call(name, given)
    for n, y in enumerate((q, k, v)):
        written = name.endswith("_") and n < len(rotated)
        assert y.equal(rotated[n] if written else before[:, :, n])


REFUSED = {
    "a shear": lambda name: {"freqs_cis": rotations(1, 1, 5, 8) + torch.tensor([[0.0, 1.0], [0.0, 0.0]])},
    "a reflection": lambda name: {"freqs_cis": rotations(1, 1, 5, 8) * torch.tensor([[1.0, 1.0], [-1.0, -1.0]])},
    "other factors": lambda name: {"freqs_cis": rotations(1, 1, 5, 8) * torch.tensor([[1.0, 1.0], [2.0, 2.0]])},
    "a table of NaN": lambda name: {"freqs_cis": rotations(1, 1, 5, 8) * torch.nan},
    "one matrix for all pairs": lambda name: {"freqs_cis": rotations(1, 1, 5, 1)},
    "a device without kernels": lambda name: {k: t.to("meta") for k, t in simple(name).items() if torch.is_tensor(t)},
}
REFUSED_APPLY = {
    "five dimensions": lambda name: simple(name, shape=(1, 2, 6, 5, DIM), table=rotations(1, 1, 1, 5, 8)),
    "one matrix": lambda name: {"freqs_cis": rotations()},
}
REFUSED_NORM = {"a table by head": lambda name: {"freqs_cis": rotations(1, 6, 5, 8)}}


@pytest.mark.parametrize(
    "name, change",
    [(name, change) for name in FUNCTIONS for change in REFUSED]
    + [(name, change) for name in FUNCTIONS if name not in NORMS for change in REFUSED_APPLY]
    + [(name, change) for name in NORMS for change in REFUSED_NORM],
)
def test_what_torch_rope_cannot_compute_is_left_to_eager(name, change):
    given = simple(name) | (REFUSED | REFUSED_APPLY | REFUSED_NORM)[change](name)
    assert registry.get_capable_backend(name, given) == "eager"
    with ck.use_backend("eager"):
        expected = call(name, copy.deepcopy(given))
    for y, right in zip(call(name, given), expected, strict=True):
        assert y.is_meta or torch.equal(y.nan_to_num(), right.nan_to_num())


WRONG = {
    "too few rows": {"freqs_cis": rotations(1, 1, 4, 8)},
    "too many pairs": {"freqs_cis": rotations(1, 1, 5, 9)},
    "too many sequences": {"freqs_cis": rotations(3, 1, 5, 8)},
    "seq first": {"freqs_cis": rotations(1, 5, 1, 8)},
    "no table of matrices": {"freqs_cis": torch.randn(1, 1, 5, 8, 1, 1)},
}


@pytest.mark.parametrize("change", WRONG)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_shapes_raise_the_error_of_eager(name, change, device):
    given = on(device, simple(name) | WRONG[change])
    before = copy.deepcopy(those(XS, given))
    with pytest.raises((RuntimeError, IndexError)) as ours:
        call(name, given)
    with ck.use_backend("eager"), pytest.raises(ours.type) as theirs:
        call(name, given)
    assert str(ours.value) == str(theirs.value)
    assert all(map(torch.equal, those(XS, given), before))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "split_half" in name])
def test_a_split_half_function_refuses_a_longer_table(name):
    with pytest.raises(RuntimeError, match="must match"):
        call(name, simple(name, table=rotations(1, 1, 6, 8)))


@pytest.mark.parametrize("rot_dim", [-2, 5, 18])
def test_a_wrong_rot_dim_is_left_to_eager(rot_dim):
    given = simple("rms_rope_split_half", table=rotations(1, 1, 5, max(rot_dim, 2) // 2), rot_dim=rot_dim)
    assert registry.get_capable_backend("rms_rope_split_half", given) == "eager"


def test_float64_is_refused_as_in_eager():
    with pytest.raises(NoCapableBackendError, match="torch_rope: x: dtype torch.float64"):
        ck.apply_rope1(torch.randn(2, 6, 5, DIM).double(), rotations(1, 1, 5, 8))


def test_a_table_that_is_written_is_compared_again(device):
    given = on(device, simple("apply_rope1"))
    assert registry.get_capable_backend("apply_rope1", given) == NAME
    given["freqs_cis"][0, 0, 0, 0, 0, 0] += 1
    assert registry.get_capable_backend("apply_rope1", given) == "eager"
    given["freqs_cis"][0, 0, 0, 0, 0, 0] = given["freqs_cis"][0, 0, 0, 0, 1, 1]
    assert registry.get_capable_backend("apply_rope1", given) == NAME


def test_the_matrices_of_a_table_are_compared_once(monkeypatch):
    compared = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: compared.append(a) or equal(a, b))
    for mode in (torch.no_grad(), torch.inference_mode()):  # ComfyUI runs in inference mode
        with mode:
            compared.clear()
            given = simple("apply_rope")
            for _ in range(3):
                ck.apply_rope(**given)
            assert len(compared) == 2
            ck.apply_rope(**given | {"freqs_cis": given["freqs_cis"].clone()})
            assert len(compared) == 4


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.endswith("_")])
def test_an_in_place_function_refuses_what_eager_refuses(name):
    given = simple(name)
    x = next(iter(given))
    in_table = given["freqs_cis"].as_strided((1, 6, 5, DIM), (30 * DIM, 5 * DIM, DIM, 1))
    bad = {
        "inference-only": {x: given[x].clone().requires_grad_()},
        "internal overlap": {x: torch.randn(2, 6, 1, DIM).expand(2, 6, 5, DIM)},
        "must not overlap frequencies": {x: in_table},
    }
    if name in PAIRED:
        bad["non-overlapping"] = {list(given)[1]: given[x]}
    for message, change in bad.items():
        with pytest.raises((RuntimeError, ValueError), match=message):
            call(name, given | change)


def test_the_functions_have_no_gradient_with_any_back_end():
    x, table = torch.randn(2, 6, 5, DIM, requires_grad=True), rotations(1, 1, 5, 8)
    for backend in (NAME, "eager"):
        with ck.use_backend(backend), pytest.raises(RuntimeError, match="no autograd formula"):
            ck.apply_rope1(x, table).sum().backward()


@pytest.mark.parametrize("name", ["apply_rope", "apply_rope_split_half_", "rms_rope_"])
def test_compiled_functions_give_the_same_bits(name):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(given):
        return getattr(ck, name)(**given)

    given = simple(name)
    for y, right in zip(compiled(copy.deepcopy(given)), call(name, given), strict=True):
        assert torch.equal(y, right)


# ---- the registry ----


def state():
    parts = ("_backends", "_capabilities", "_constraints", "_priority", "_disabled", "_unavailable")
    return {part: copy.copy(getattr(registry, part)) for part in parts}


def test_unregister_restores_the_registry():
    registered = state()
    unregister()
    before = state()
    assert NAME not in str([list(part) for part in before.values()])  # the keys, as values have paths
    register()
    assert state()["_priority"] == registered["_priority"]
    register()
    assert state()["_priority"] == registered["_priority"]
    ck.disable_backend(NAME)
    unregister()
    assert state() == before
    unregister()
    assert state() == before
    assert registry.get_capable_backend("apply_rope", simple("apply_rope")) == "eager"


def test_only_the_eager_back_end_comes_after_ours():
    assert registry._priority == ["ascend", "cuda", "triton", NAME, "eager"]


@pytest.mark.parametrize(
    "order, expected",
    [
        (["hip", "cuda", "eager"], ["hip", "cuda", NAME, "eager"]),
        (["eager", "cuda"], [NAME, "eager", "cuda"]),
        (["cuda"], ["cuda", NAME]),
        ([NAME, "cuda", "eager"], [NAME, "cuda", "eager"]),
    ],
)
def test_register_keeps_the_order_of_other_back_ends(order, expected, monkeypatch):
    unregister()
    monkeypatch.setattr(registry, "_priority", order)
    register()
    assert registry._priority == expected
    unregister()
    assert registry._priority == [name for name in order if name != NAME]


def test_a_disabled_back_end_does_not_run():
    given = simple("apply_rope")
    ck.disable_backend(NAME)
    assert registry.get_capable_backend("apply_rope", given) == "eager"
    ck.enable_backend(NAME)
    assert registry.get_capable_backend("apply_rope", given) == NAME


def test_each_function_of_eager_that_rotates_has_one_of_ours():
    theirs = {name for name in registry._capabilities["eager"] if "rope" in name}
    assert set(FUNCTIONS) == theirs == registry._capabilities[NAME]
    for name in FUNCTIONS:
        ours, eager = (registry.get_constraints(backend, name) for backend in (NAME, "eager"))
        assert ours.params == eager.params
        assert ours.default_devices == set(torch_rope._C.devices)


def test_the_node_of_comfyui_registers_the_back_end(capsys):
    unregister()
    folder = ROOT / "examples" / "comfyui"
    spec = importlib.util.spec_from_file_location(str(folder), folder / "__init__.py")  # as ComfyUI imports it
    node = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = node
    spec.loader.exec_module(node)
    del sys.modules[spec.name]
    assert node.NODE_CLASS_MAPPINGS == {}
    assert "registered as a back end of comfy-kitchen" in capsys.readouterr().out
    assert registry.get_capable_backend("apply_rope", simple("apply_rope")) == NAME
