"""Compares the tables of rotary modules with exact angles, and the logits of a model, with a float64 computation."""

import copy
import importlib
import pickle
import types

import pytest
import torch
from cases import Calls, needed
from test_transformers import add_hook, difference, make, remove_hook, tokens
from torch.overrides import TorchFunctionMode

transformers = needed("transformers")

from torch_rope import frequencies  # noqa: E402
from torch_rope.integrations.transformers import patch  # noqa: E402
from torch_rope.integrations.transformers.angles import exact_rotary  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("examine_once")]

FAR = 131072
TEXT = dict(hidden_size=256, num_attention_heads=4, head_dim=64, num_hidden_layers=2, max_position_embeddings=4096)
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=1024)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024
)
LONGROPE = dict(
    rope_type="longrope", factor=4.0, original_max_position_embeddings=1024, short_factor=[1 + i / 64 for i in range(32)],
    long_factor=[2 + i / 4 for i in range(32)],
)  # fmt: skip
DYNAMIC = dict(rope_type="dynamic", factor=4.0)
DEFAULT = dict(rope_type="default")


def module(package, name, config, rope=None, **changes):
    """Returns a function that makes the rotary module {name}RotaryEmbedding of a package of transformers."""

    def make():
        models = f"transformers.models.{package}"
        modeling = importlib.import_module(f"{models}.modeling_{package}")
        configuration = importlib.import_module(f"{models}.configuration_{package}")
        given = {"rope_parameters": {"rope_theta": 10000.0, **rope}} if rope else {}
        made = getattr(configuration, f"{config}Config")(**given, **copy.deepcopy(changes))
        return getattr(modeling, f"{name}RotaryEmbedding")(made)

    return make


PLAIN, THREE, TWO, BATCH_OF_TWO = (2, 6), (3, 2, 6), (6, 2), (2, 6, 2)  # shapes of position_ids


def text(package, name, rope, shape=PLAIN, config="", **changes):
    """Returns a case of a model of text: a function that makes the module, and the shape of position_ids."""
    return module(package, name, config or name, rope, **TEXT | changes), shape


def mrope(*section):
    return DEFAULT | {"mrope_section": section}


def llama(**rope):
    return text("llama", "Llama", rope)


CASES = {
    # kinds
    "default": llama(rope_type="default"),
    "dynamic": llama(**DYNAMIC),
    "yarn": llama(**YARN),
    "longrope": llama(**LONGROPE),
    "proportional": (module("gemma4", "Gemma4Text", "Gemma4Text", num_hidden_layers=6), PLAIN),
    "mrope": text("qwen2_vl", "Qwen2VL", mrope(8, 12, 12), THREE, "Qwen2VLText"),
    # layouts
    "deepseek_v2": (module("deepseek_v2", "DeepseekV2", "DeepseekV2", YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}), PLAIN),
    "deepseek_v4": (module("deepseek_v4", "DeepseekV4", "DeepseekV4"), PLAIN),
    "ernie4_5_vl": text("ernie4_5_vl_moe", "Ernie4_5_VLMoeText", mrope(11, 11, 10), THREE),
    "gemma3": (module("gemma3", "Gemma3", "Gemma3Text", num_hidden_layers=6), PLAIN),
    "llama4": text("llama4", "Llama4Text", LLAMA3),
    "qwen3_vl": text("qwen3_vl", "Qwen3VLText", mrope(12, 10, 10), THREE),
    # two axes
    "gemma4_vision": (module("gemma4", "Gemma4Vision", "Gemma4Vision"), BATCH_OF_TWO),
    "pixtral": (module("pixtral", "PixtralVision", "PixtralVision"), TWO),
    "qwen2_vl_vision": (module("qwen2_vl", "Qwen2VLVision", "Qwen2VLVision"), TWO),
    "sam3": (module("sam3", "Sam3ViT", "Sam3ViT"), TWO),
}  # fmt: skip


class InDouble(TorchFunctionMode):
    """Makes every conversion to float32 a conversion to float64, so that a model computes in float64 throughout."""

    def __enter__(self):
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *args):
        torch.set_default_dtype(torch.float32)
        return super().__exit__(*args)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = [self.double(a) for a in args], {n: self.double(a) for n, a in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)

    @staticmethod
    def double(argument):
        return torch.float64 if argument is torch.float32 else argument


def exact(rotary):
    """Returns a copy of a rotary module, with exact angles."""
    rotary = copy.deepcopy(rotary)
    forward, text = exact_rotary(rotary)
    assert forward is not None, text
    rotary.forward = types.MethodType(forward, rotary)
    return rotary


def layer_types(rotary):
    return [{"layer_type": t} for t in getattr(rotary, "layer_types", [])] or [{}]


def parts(tables):
    """Returns cos and sin of tables that a rotary module returned."""
    return tables if isinstance(tables, tuple) else (tables.real, tables.imag)


def errors(tables, judge):
    return [(t.double() - j).abs().max().item() for t, j in zip(parts(tables), parts(judge), strict=True)]


def positions(shape, first=FAR, after=2 * FAR):
    return torch.randint(first, after, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("case", CASES)
def test_far_tables_are_a_hundred_times_nearer_to_those_of_float64(case):
    make, shape = CASES[case]
    rotary = make()
    with InDouble():
        judge = make()
    patched, position_ids = exact(rotary), positions(shape)
    for layer_type in layer_types(rotary):
        with InDouble():
            expected = judge(torch.zeros(1, dtype=torch.float64), position_ids, **layer_type)
        for dtype in (torch.float32, torch.bfloat16):
            before = rotary(torch.zeros(1, dtype=dtype), position_ids, **layer_type)
            after = patched(torch.zeros(1, dtype=dtype), position_ids, **layer_type)
            assert type(after) is type(before)
            for a, b, e in zip(parts(after), parts(before), parts(expected), strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape) == (b.dtype, e.shape)
            if parts(before)[0].dtype == torch.float32:
                assert all(100 * a < b for a, b in zip(errors(after, expected), errors(before, expected), strict=True))
            else:
                assert max(errors(after, expected)) < 0.6 * torch.finfo(dtype).eps * max(
                    map(torch.max, parts(expected))
                )


@pytest.mark.parametrize("case", ["dynamic", "qwen3_vl"])
def test_a_device_without_float64_gets_frequencies_in_two_parts(case, monkeypatch):
    make, shape = CASES[case]
    monkeypatch.setattr(
        frequencies, "on_device", lambda inv_freq, device: frequencies.in_two_parts(inv_freq).to(device)
    )
    in_parts = exact(make())
    monkeypatch.undo()
    position_ids = positions(shape)
    for a, b in zip(in_parts(torch.zeros(1), position_ids), exact(make())(torch.zeros(1), position_ids), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rope, limit", [(DYNAMIC, 4096), (LONGROPE, 1024)], ids=["dynamic", "longrope"])
def test_frequencies_follow_the_length_as_in_transformers(rope, limit):
    """After a long sequence, dynamic rotates a shorter one as the long one, unless it is short."""
    make, _ = llama(**rope)
    rotary, patched = make(), exact(make())
    with InDouble():
        judge = make()
    used = []
    for length in (9, limit, limit + 1, 4 * limit, limit + 5, limit - 1, limit + 7):
        position_ids = torch.tensor([[1, 2, length - 1]])
        with InDouble():
            expected = judge(torch.zeros(1, dtype=torch.float64), position_ids)
        assert max(errors(patched(torch.zeros(1), position_ids), expected)) < 1e-6
        assert max(errors(rotary(torch.zeros(1), position_ids), expected)) < 1e-3
        used.append(expected[1][0, 0])
    short, same, longer, longest, remembered, again, _ = used
    assert torch.equal(short, same) and torch.equal(short, again) and not torch.equal(short, longer)
    assert torch.equal(longest, remembered)


def test_a_module_that_has_grown_is_continued():
    rotary = CASES["dynamic"][0]()
    rotary(torch.zeros(1), torch.tensor([[9999]]))
    patched, near = exact(rotary), torch.tensor([[1, 5000]])
    for a, b in zip(patched(torch.zeros(1), near), rotary(torch.zeros(1), near), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)
    grown, short = copy.deepcopy(patched), torch.tensor([[1, 50]])
    patched(torch.zeros(1), short)  # resets the length of this module, and not that of the copy
    assert not torch.equal(patched(torch.zeros(1), near)[1], grown(torch.zeros(1), near)[1])


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float64])
def test_a_cast_module_has_the_frequencies_of_its_config(cast):
    for case in ("longrope", "gemma3", "pixtral"):
        make, shape = CASES[case]
        rotary, position_ids = make(), positions(shape)
        layer_type = layer_types(rotary)[0]
        expected = exact(rotary)(torch.zeros(1), position_ids, **layer_type)
        before, back, after = copy.deepcopy(rotary).to(cast), make().to(cast).float(), exact(rotary).to(cast)
        for patched in (exact(before), exact(back), after):
            assert all(map(torch.equal, patched(torch.zeros(1), position_ids, **layer_type), expected))
        with torch.autocast("cpu", torch.bfloat16):
            assert all(map(torch.equal, after(torch.zeros(1), position_ids, **layer_type), expected))


# Modules whose tables are not made of the frequencies of their config, or in more than one way.
PHIMOE = text("phimoe", "Phimoe", LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.2})  # short only
CASES_LEFT = CASES | {"phimoe": PHIMOE, "kimi": (module("kimi_k25", "Kimi_K25Vision", "Kimi_K25Vision"), TWO)}
CHANGED = "its frequencies were changed"
LEFT = [
    ("default", lambda r: r.inv_freq.mul_(1.0001), CHANGED),
    ("default", lambda r: r.inv_freq[-1:].mul_(2), CHANGED),
    ("default", lambda r: r.to(torch.bfloat16).inv_freq.mul_(1.02), CHANGED),
    ("default", lambda r: setattr(r, "attention_scaling", 1.1), CHANGED),
    ("dynamic", lambda r: r.inv_freq.mul_(1.0001), CHANGED),
    ("longrope", lambda r: r.original_inv_freq.mul_(1.0001), CHANGED),
    ("mrope", lambda r: setattr(r, "mrope_section", [12, 10, 10]), CHANGED),
    ("gemma3", lambda r: r.full_attention_inv_freq.mul_(1.0001), CHANGED),
    ("default", lambda r: setattr(r, "forward", lambda x, position_ids: None), "its forward was replaced"),
    ("default", lambda r: r.to("meta"), "it is on the meta device"),
    ("default", lambda r: setattr(r, "a", torch.nn.Parameter(torch.zeros(1))), "it has weights"),
    ("default", lambda r: delattr(r, "config"), "its frequencies are not known: "),
    ("default", lambda r: r.config.rope_parameters.update(rope_type="x"), "its frequencies are not known: "),
    ("phimoe", lambda r: None, "its tables are not cos and sin of positions times the frequencies of its config"),
    ("kimi", lambda r: None, "its positions may have any number of axes"),
]


@pytest.mark.parametrize("case, change, reason", LEFT)
def test_a_module_that_is_not_what_its_config_says_is_left_as_it_is(case, change, reason):
    rotary = CASES_LEFT[case][0]()
    change(rotary)
    forward, why = exact_rotary(rotary)
    assert forward is None and why.startswith(f"left as it is, because {reason}")
    assert exact_rotary(torch.nn.Linear(2, 2)) == (None, "")  # a module that makes no tables is not mentioned


@pytest.mark.parametrize(
    "case",
    ["dynamic", "qwen3_vl"]
    + [pytest.param(c, marks=pytest.mark.exhaustive) for c in ("default", "longrope", "gemma3", "llama4", "pixtral")],
)
def test_exact_angles_are_compiled_without_a_graph_break(case):
    make, shape = CASES[case]
    patched, position_ids = exact(make()), positions(shape)
    layer_type = layer_types(patched)[0]
    expected = patched(torch.zeros(1), position_ids, **layer_type)
    torch._dynamo.reset()
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            actual = compiled(torch.zeros(1), position_ids, **layer_type)
        assert all(map(torch.equal, parts(actual), parts(expected)))


def test_copies_and_pickles_and_the_state_dict_are_those_of_the_module():
    for case in ("default", "dynamic"):
        rotary = CASES[case][0]()
        patched = exact(rotary)
        assert patched.state_dict().keys() == rotary.state_dict().keys()
        copied = copy.deepcopy(patched)
        assert copied.forward.__self__ is copied and copied.forward.__func__ is patched.forward.__func__
        loaded, position_ids = pickle.loads(pickle.dumps(patched)), positions(PLAIN)
        assert all(map(torch.equal, loaded(torch.zeros(1), position_ids), rotary(torch.zeros(1), position_ids)))


def test_the_tables_are_one_operator():
    patched, x, position_ids = exact(CASES["yarn"][0]()), torch.zeros(1), torch.tensor([[FAR]])
    with Calls() as calls:
        patched(x, position_ids)
    assert calls.names == ["aten::unsqueeze", "rope::axial_cos_sin"]


def test_far_logits_are_a_hundred_times_nearer_to_those_of_a_float64_model():
    """The judge computes everything in float64. The float32 model keeps its other roundings, about 1e-6."""
    model = make(attention="eager", max_position_embeddings=2 * FAR)
    inputs = {"input_ids": tokens(2, 32), "position_ids": torch.arange(FAR, FAR + 32).expand(2, -1)}
    judge = copy.deepcopy(model).double()
    with InDouble():
        judge.model.rotary_emb = type(judge.model.rotary_emb)(model.config)

    def logits(model, **inputs):
        with torch.no_grad():
            return model(**inputs, use_cache=False).logits.double()

    def off(logits):
        return difference(logits, expected)

    with InDouble():
        expected = logits(judge, **inputs)
    before = off(logits(model, **inputs))
    with patch(model, exact_angles=True) as handle:
        assert "exact angles from the default frequencies of the config" in str(handle)
        assert 100 * off(logits(model, **inputs)) < before
    assert off(logits(model, **inputs)) == before
    before = off(logits(model.double(), **inputs))  # the tables are still computed in float32
    patch(model, exact_angles=True)
    with InDouble():  # the norms too: only the tables could differ
        assert 1e6 * off(logits(model, **inputs)) < before


def test_the_handle_lists_the_rotary_modules_and_undo_restores_them():
    model, hooked = make(rope_parameters={"rope_theta": 10000.0, **DYNAMIC}), []
    expected, buffers = model(tokens()).logits, [name for name, _ in model.named_buffers()]
    add_hook(model.model.rotary_emb, hooked)
    handle = patch(model, exact_angles=True)
    lists = "model.rotary_emb.forward of 1 LlamaRotaryEmbedding: exact angles from the dynamic frequencies"
    assert lists in str(handle) and "as before" not in str(handle)
    assert not torch.equal(model(tokens(), position_ids=tokens() + 2**17).logits, expected) and hooked
    handle.undo()
    remove_hook(model.model.rotary_emb)
    assert torch.equal(model(tokens()).logits, expected)
    assert [name for name, _ in model.named_buffers()] == buffers

    model.model.rotary_emb.inv_freq.mul_(2)
    handle = patch(model, exact_angles=True)
    assert "model.rotary_emb: left as it is, because its frequencies were changed" in str(handle)
    assert "model.rotary_emb.inv_freq: 8 frequencies, as before" in str(handle)
