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
from cases import ROOT, covering, name_of, needed
from comfy import DIM, DTYPES, arguments, formula, moved, rotations

import torch_rope

ck = needed("comfy_kitchen")
from comfy_kitchen.exceptions import NoCapableBackendError  # noqa: E402
from comfy_kitchen.registry import registry  # noqa: E402

from torch_rope.integrations.comfy_kitchen import FUNCTIONS, NAME, register, unregister  # noqa: E402
from torch_rope.selfcheck.calls import spread  # noqa: E402

SIZES = {"b": 2, "h": 6, "kv": 3, "s": 5, "s+3": 8, "1": 1}
XS = ("x", "xq", "xk", "q", "k")  # the names of the arguments that are rotated
# The dimensions of x before head_dim, and those of the table before its matrices. One table has a row of matrices for
# each token, one for each token and head, and so on. The norms take the first forms only.
NORM_FORMS = {
    "heads first": ("b h s", "1 1 s"),
    "heads first, one row for a sequence": ("b h s", "b 1 1"),
    "heads first, batch, longer": ("b h s", "b 1 s+3"),
    "seq first": ("b s h", "1 s 1"),
    "seq first, one row for a head": ("b s h", "1 1 h"),
}
FORMS = NORM_FORMS | {
    "heads first, by head, longer": ("b h s", "1 h s+3"),
    "seq first, by head": ("b s h", "b s h"),
    "no batch, seq first": ("s h", "s 1"),
    "no heads": ("s", "1 s"),
    "one token": ("", ""),
}
# How k differs from q: a dimension that has another size, or float16.
OTHER_K = {"as q": {}, "fewer heads": {"h": "kv"}, "one sequence": {"b": "1"}, "longer": {"s": "s+3"}, "float16": {}}
NORMS = [name for name in FUNCTIONS if name.startswith("rms")]


@pytest.fixture(autouse=True)
def _registered():
    register()
    yield
    unregister()


def simple(name, *, dtype=torch.float32, shape=(2, 6, 5, DIM), table=None, **more):
    """Returns arguments of a function, heads first."""
    table = rotations(1, 1, 5, DIM // 2) if table is None else table
    scales = [torch.rand(DIM) + 0.5 for _ in "qk"] * name.startswith("rms")
    return arguments(name, [torch.randn(shape).to(dtype) for _ in "qk"], table, scales, **more)


def on(device, given):
    """Returns a copy of the arguments on a device, with the same strides."""
    return {key: moved(copy.deepcopy(t), device) if torch.is_tensor(t) else t for key, t in given.items()}


def those(keys, given):
    return [given[key] for key in keys if given.get(key) is not None]


def call(name, given):
    """Calls a function of comfy_kitchen. Returns a list of its results."""
    out = getattr(ck, name)(**given)
    return list(out) if isinstance(out, tuple) else [out]


def check(name, given, device):
    """Asserts that a call runs our back end, that its results are right, and that those of eager nearly are."""
    ours, scales = on(device, given), those(("scale", "q_scale", "k_scale"), given)
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
        assert y.shape == theirs.shape == x.shape and y.dtype == theirs.dtype == x.dtype
        oracle.assert_close(y, expected, *oracle.limits(x.dtype, {}, 1.25, norm=bool(scales)))
        coarse = max(x.dtype, given["freqs_cis"].dtype, key=lambda dtype: torch.finfo(dtype).eps)
        oracle.assert_close(theirs.to(coarse), expected, 8 if coarse == torch.float32 else 4)
        if name.endswith("_"):
            assert (y.data_ptr(), y.stride()) == (x.data_ptr(), x.stride()) and not x.cpu().equal(before)
            x.copy_(before)
        else:
            assert y.stride() == torch.empty_like(x).stride()  # as torch.compile expects
        # Neither x nor the elements around it have changed.
        assert all(torch.equal(*pair) for pair in zip(memory(x), memory(before), strict=True))


def memory(t):
    """Returns the elements of the memory that t is a part of, without NaN, and which of them are NaN."""
    elements = moved(t, "cpu").as_strided((t.untyped_storage().size() // t.element_size(),), (1,), 0)
    return elements.nan_to_num(), elements.isnan()


def possible(name, form, strided, other_k, dtype, table_dtype, scale_dtype):
    of_x, of_table = FORMS[form]
    changed = OTHER_K[other_k]
    return (
        (form in NORM_FORMS or name.startswith("apply"))
        and not ("longer" in form and "split_half" in name)
        and not ("1" in name and other_k != "as q")
        and not (strided and other_k == "one sequence")  # the strides of a dimension of size 1 say nothing
        and all(n in of_x.split() and n not in of_table.split() for n in changed)
        and (name.startswith("rms") or scale_dtype == torch.float32)  # there is no scale
    )


FACTORS = {
    "name": FUNCTIONS, "form": list(FORMS), "strided": [False, True], "other_k": list(OTHER_K), "dtype": DTYPES,
    "table_dtype": DTYPES, "scale_dtype": DTYPES,
}  # fmt: skip
CASES = covering(FACTORS, possible, exhaustive=("name", "form"))


@pytest.mark.parametrize("case", CASES, ids=map(name_of, CASES))
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_function_agrees_with_its_formula_and_with_the_eager_back_end(case, device):
    of_x, of_table = (words.split() for words in FORMS[case["form"]])
    other, of_q, xs = case["other_k"], case["dtype"], []
    for change, dtype in (({}, of_q), (OTHER_K[other], torch.float16 if other == "float16" else of_q)):
        x = torch.randn([*(SIZES[change.get(n, n)] for n in of_x), DIM]).to(dtype)
        if case["strided"] and len(of_x) > 1:  # heads and tokens are swapped in memory, and every second channel is NaN
            x = spread(x.transpose(-2, -3), (1,) * len(of_x) + (2,), (0,) * x.dim()).transpose(-2, -3)
        xs.append(x)
    table = rotations(*(SIZES[n] for n in of_table), DIM // 2, dtype=case["table_dtype"])
    scales = [spread(torch.rand(DIM) + 0.5, (2,), (1,)).to(case["scale_dtype"]) for _ in "qk"]
    check(case["name"], arguments(case["name"], xs, table, scales * case["name"].startswith("rms")), device)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_has_an_epsilon_and_perhaps_rot_dim_and_one_scale(name, device):
    partly = name.startswith("rms_rope_split_half") and "1" not in name
    for rot_dim in (0, 6, DIM) if partly else (0,):
        table = rotations(1, 1, 5, (rot_dim or DIM) // 2)
        given = simple(name, table=table, epsilon=0.5, **{"rot_dim": rot_dim} if partly else {})
        check(name, given, device)
        if "k_scale" in given:
            check(name, given | {"k_scale": None}, device)  # then q_scale normalises k too


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_empty_tensor_stays_empty(name, device):
    for shape in ((2, 6, 0, DIM), (2, 0, 5, DIM), (0, 6, 5, DIM)):
        given = on(device, simple(name, shape=shape, table=rotations(1, 1, shape[2], DIM // 2)))
        assert registry.get_capable_backend(name, given) == NAME
        assert {y.shape for y in call(name, given)} == {shape}


def test_what_torch_rope_cannot_compute_is_left_to_eager_and_float64_is_refused():
    """test_comfy_kitchen.py has more tables that are no rotations."""
    shear = rotations(1, 1, 5, 8) + torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    for name in FUNCTIONS:
        for table in (shear, rotations(1, 1, 5, 8).to("meta"), rotations(1, 1, 4, 8), torch.randn(1, 1, 5, 8, 1, 1)):
            assert registry.get_capable_backend(name, simple(name, table=table)) == "eager"
        by_head = simple(name, table=rotations(1, 6, 5, 8))
        assert registry.get_capable_backend(name, by_head) == ("eager" if name in NORMS else NAME)
    for rot_dim in (-2, 5, 18):
        given = simple("rms_rope_split_half", table=rotations(1, 1, 5, max(rot_dim, 2) // 2), rot_dim=rot_dim)
        assert registry.get_capable_backend("rms_rope_split_half", given) == "eager"
    with pytest.raises(NoCapableBackendError, match="torch_rope: x: dtype torch.float64"):
        ck.apply_rope1(torch.randn(2, 6, 5, DIM).double(), rotations(1, 1, 5, 8))


def test_the_matrices_of_a_table_are_compared_once_if_it_has_a_version(monkeypatch):
    compared, equal = [], torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: compared.append(a) or equal(a, b))
    for mode, times in ((torch.no_grad(), 1), (torch.inference_mode(), 3)):  # ComfyUI runs in inference mode
        with mode:
            compared.clear()
            given = simple("apply_rope")
            for _ in range(3):
                ck.apply_rope(**given)
            assert len(compared) == 2 * times
            ck.apply_rope(**given | {"freqs_cis": given["freqs_cis"].clone()})
            assert len(compared) == 2 * times + 2


def test_an_in_place_function_refuses_what_eager_refuses():
    given = simple("apply_rope_")
    in_table = given["freqs_cis"].as_strided((1, 6, 5, DIM), (30 * DIM, 5 * DIM, DIM, 1))
    for message, change in {
        "inference-only": {"xq": given["xq"].clone().requires_grad_()},
        "internal overlap": {"xq": torch.randn(2, 6, 1, DIM).expand(2, 6, 5, DIM)},
        "must not overlap frequencies": {"xq": in_table},
        "non-overlapping": {"xk": given["xq"]},
    }.items():
        with pytest.raises((RuntimeError, ValueError), match=message):
            call("apply_rope_", given | change)


def test_the_functions_have_no_gradient_with_any_back_end():
    x, table = torch.randn(2, 6, 5, DIM, requires_grad=True), rotations(1, 1, 5, 8)
    for backend in (NAME, "eager"):
        with ck.use_backend(backend), pytest.raises(RuntimeError, match="no autograd formula"):
            ck.apply_rope1(x, table).sum().backward()


@pytest.mark.parametrize("name", ["apply_rope", "apply_rope_split_half_", "rms_rope_"])
def test_compiled_functions_give_the_same_bits(name):
    compiled = torch.compile(lambda given: getattr(ck, name)(**given), backend="aot_eager", fullgraph=True)
    given = simple(name)
    assert all(map(torch.equal, compiled(copy.deepcopy(given)), call(name, given)))


# ---- the registry ----


def state():
    parts = ("_backends", "_capabilities", "_constraints", "_priority", "_disabled", "_unavailable")
    return {part: copy.copy(getattr(registry, part)) for part in parts}


def test_register_and_unregister_change_nothing_else(monkeypatch):
    given = simple("apply_rope")
    unregister()
    before = state()
    for _ in range(2):
        register()
        assert registry._priority == ["ascend", "cuda", "triton", NAME, "eager"]
    for change, expected in ((ck.disable_backend, "eager"), (ck.enable_backend, NAME), (ck.disable_backend, "eager")):
        change(NAME)
        assert registry.get_capable_backend("apply_rope", given) == expected
    for _ in range(2):
        unregister()
        assert state() == before
    for order, expected in (
        (["eager", "cuda"], [NAME, "eager", "cuda"]),
        (["cuda"], ["cuda", NAME]),
        ([NAME, "cuda", "eager"], [NAME, "cuda", "eager"]),
    ):
        monkeypatch.setattr(registry, "_priority", order)
        register()
        assert registry._priority == expected


def test_each_function_of_eager_that_rotates_has_one_of_ours():
    theirs = {name for name in registry._capabilities["eager"] if "rope" in name}
    assert set(FUNCTIONS) == theirs == registry._capabilities[NAME]
    for name in FUNCTIONS:
        ours, eager = (registry.get_constraints(backend, name) for backend in (NAME, "eager"))
        assert ours.params == eager.params and ours.default_devices == set(torch_rope._C.devices)


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
