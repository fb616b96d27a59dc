"""Compares the tables of rotary modules with exact angles, and the logits of a model, with a float64 computation."""

import concurrent.futures
import contextlib
import copy
import importlib
import pickle
import types

import pytest
import torch
from cases import default_dtype, needed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

transformers = needed("transformers")

from models import add_hook, make, remove_hook, tokens  # noqa: E402

from torch_rope import frequencies  # noqa: E402
from torch_rope.integrations._angles import of_transformers as exact_rotary  # noqa: E402
from torch_rope.integrations.transformers import patch  # noqa: E402

pytestmark = pytest.mark.cpu

FAR = 131072
TEXT = dict(hidden_size=256, num_attention_heads=4, head_dim=64, num_hidden_layers=2, max_position_embeddings=4096)
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=1024)
LLAMA3 = YARN | dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
LONGROPE = dict(
    rope_type="longrope", factor=4.0, original_max_position_embeddings=1024, short_factor=[1 + i / 64 for i in range(32)],
    long_factor=[2 + i / 4 for i in range(32)],
)  # fmt: skip
DYNAMIC = dict(rope_type="dynamic", factor=4.0)
MROPE = dict(rope_type="default")
PLAIN, THREE, TWO, BATCH_OF_TWO = (2, 6), (3, 2, 6), (6, 2), (2, 6, 2)
# The model_type of a config, the name of the rotary module, the shape of position_ids, and rope_parameters.
CASES = {
    # kinds
    "default": ("llama", "Llama", PLAIN, dict(rope_type="default")),
    "dynamic": ("llama", "Llama", PLAIN, DYNAMIC),
    "yarn": ("llama", "Llama", PLAIN, YARN),
    "longrope": ("llama", "Llama", PLAIN, LONGROPE),
    "proportional": ("gemma4_text", "Gemma4Text", PLAIN, None),
    "phimoe": ("phimoe", "Phimoe", PLAIN, LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.2}),
    "mrope": ("qwen2_vl_text", "Qwen2VL", THREE, MROPE | {"mrope_section": [8, 12, 12]}),
    # layouts
    "deepseek_v2": ("deepseek_v2", "DeepseekV2", PLAIN, YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}),
    "deepseek_v4": ("deepseek_v4", "DeepseekV4", PLAIN, None),
    "ernie4_5_vl": ("ernie4_5_vl_moe_text", "Ernie4_5_VLMoeText", THREE, MROPE | {"mrope_section": [11, 11, 10]}),
    "gemma3": ("gemma3_text", "Gemma3", PLAIN, None),
    "llama4": ("llama4_text", "Llama4Text", PLAIN, LLAMA3),
    "qwen3_vl": ("qwen3_vl_text", "Qwen3VLText", THREE, MROPE | {"mrope_section": [12, 10, 10]}),
    # two axes
    "gemma4_vision": ("gemma4_vision", "Gemma4Vision", BATCH_OF_TWO, None),
    "kimi": ("kimi_k25_vision", "Kimi_K25Vision", TWO, None),
    "pixtral": ("pixtral", "PixtralVision", TWO, None),
    "qwen2_vl_vision": ("qwen2_vl_vision", "Qwen2VLVision", TWO, None),
    "sam3": ("sam3_vit_model", "Sam3ViT", TWO, None),
}


def rotary_of(case):
    """Returns a rotary module of transformers."""
    model_type, name, _, rope = case
    changes = TEXT | {"rope_parameters": {"rope_theta": 10000.0, **copy.deepcopy(rope)}} if rope else {}
    config = transformers.CONFIG_MAPPING[model_type](**changes)
    package = type(config).__module__.rpartition(".")[0]
    modeling = importlib.import_module(f"{package}.modeling_{package.rpartition('.')[2]}")
    return getattr(modeling, f"{name}RotaryEmbedding")(config)


def positions(case):
    """Returns random position_ids for a rotary module."""
    return torch.randint(FAR, 2 * FAR, case[2], generator=torch.Generator().manual_seed(0))


class Doubling(TorchFunctionMode):
    """Makes every conversion to float32 a conversion to float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda a: torch.float64 if a is torch.float32 else a, (args, kwargs or {}))
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


@contextlib.contextmanager
def in_double():
    """Lets a model compute in float64 throughout."""
    with default_dtype(torch.float64), Doubling():
        yield


def exact(rotary):
    """Returns a copy of a rotary module, with exact angles."""
    rotary = copy.deepcopy(rotary)
    forward, text = exact_rotary(rotary)
    assert forward is not None, text
    rotary.forward = types.MethodType(forward, rotary)
    return rotary


def tables(rotary, position_ids, dtype=torch.float32):
    """Returns what a rotary module makes for x of a dtype: cos and sin, or one complex table, for each layer type."""
    of_layers, found = getattr(rotary, "layer_types", None), []
    x = torch.zeros((), dtype=dtype).expand(2**20, 2**20)  # a copy would need terabytes, but no number is read
    for layer_type in [{"layer_type": t} for t in of_layers] if of_layers else [{}]:
        made = rotary(x, position_ids, **layer_type)
        found += made if isinstance(made, tuple) else [torch.view_as_real(made)]
    return found


def off(table, expected):
    return (table.double() - expected).abs().max().item()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_far_tables_are_a_hundred_times_nearer_to_those_of_float64(case):
    rotary, position_ids = rotary_of(case), positions(case)
    with in_double():
        expected = tables(rotary_of(case), position_ids, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        before, after = (tables(r, position_ids, dtype) for r in (rotary, exact(rotary)))
        for a, b, e in zip(after, before, expected, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape) == (b.dtype, e.shape)
            if b.dtype == torch.float32:
                assert 100 * off(a, e) < off(b, e)
            else:
                assert off(a, e) < 0.6 * torch.finfo(dtype).eps * e.max()


@pytest.mark.parametrize("case", ["dynamic", "qwen3_vl"])
def test_a_device_without_float64_gets_tables_of_the_cpu(case, monkeypatch):
    rotary, position_ids = rotary_of(CASES[case]), positions(CASES[case])
    expected = tables(exact(rotary), position_ids)
    monkeypatch.setattr(frequencies, "has_float64", lambda device: device.type != "meta")
    found = tables(exact(rotary), position_ids)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("case, limit", [("dynamic", 4096), ("longrope", 1024)])
def test_frequencies_follow_the_length_as_in_transformers(case, limit):
    """After a long sequence, dynamic rotates a shorter one as the long one, unless it is short."""
    rotary = rotary_of(CASES[case])
    patched, used = exact(rotary), []
    with in_double():
        judge = rotary_of(CASES[case])
    for length in (9, limit, limit + 1, 4 * limit, limit + 5, limit - 1, limit + 7):
        position_ids = torch.tensor([[1, 2, length - 1]])
        with in_double():
            expected = tables(judge, position_ids, torch.float64)
        assert max(map(off, tables(patched, position_ids), expected)) < 1e-6
        assert max(map(off, tables(rotary, position_ids), expected)) < 1e-3
        used.append(expected[1][0, 0])
    short, same, longer, longest, remembered, again, _ = used
    assert torch.equal(short, same) and torch.equal(short, again) and not torch.equal(short, longer)
    assert torch.equal(longest, remembered)


def test_a_module_that_has_grown_is_continued_and_copied():
    rotary, near = rotary_of(CASES["dynamic"]), torch.tensor([[1, 5000]])
    tables(rotary, torch.tensor([[9999]]))
    patched = exact(rotary)
    assert patched.state_dict().keys() == rotary.state_dict().keys()
    torch.testing.assert_close(tables(patched, near), tables(rotary, near), rtol=0, atol=2e-3)
    copied, loaded = copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))
    assert all(map(torch.equal, tables(loaded, near), tables(rotary, near)))
    tables(patched, torch.tensor([[1, 50]]))  # resets the length of this module, and not that of the copy
    assert not torch.equal(tables(patched, near)[1], tables(copied, near)[1])


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float64])
def test_a_cast_module_has_the_frequencies_of_its_config(cast):
    for case in (CASES["longrope"], CASES["pixtral"]):
        rotary, position_ids = rotary_of(case), positions(case)
        expected = tables(exact(rotary), position_ids)
        before, back, after = copy.deepcopy(rotary).to(cast), rotary_of(case).to(cast).float(), exact(rotary).to(cast)
        for patched in (exact(before), exact(back), after):
            assert all(map(torch.equal, tables(patched, position_ids), expected))
        with torch.autocast("cpu", torch.bfloat16):
            assert all(map(torch.equal, tables(after, position_ids), expected))


# What somebody changes in a module, and why the module is left as it is, or else what follows it.
LEFT = [
    ("default", lambda r: r.inv_freq.mul_(1.0001), "inv_freq of LlamaRotaryEmbedding was changed"),
    ("default", lambda r: r.to(torch.bfloat16).inv_freq.mul_(1.02), "inv_freq of LlamaRotaryEmbedding was changed"),
    ("default", lambda r: setattr(r.inv_freq, "data", 2 * r.inv_freq), "inv_freq of LlamaRotaryEmbedding was changed"),
    ("dynamic", lambda r: r.inv_freq.mul_(2), "inv_freq of LlamaRotaryEmbedding was changed"),
    ("default", lambda r: r.to("meta"), "inv_freq of LlamaRotaryEmbedding is on the meta device"),
    ("default", lambda r: r.__setattr__("inv_freq", FakeTensorMode().from_tensor(r.inv_freq)), "inv_freq of Llama"),
    ("default", lambda r: setattr(r, "forward", lambda x, position_ids: None), "its forward was replaced"),
    ("default", lambda r: setattr(r, "a", torch.nn.Parameter(torch.zeros(1))), "it has weights"),
    ("default", lambda r: delattr(r, "config"), "no LlamaRotaryEmbedding like it can be made: "),
]
FOLLOWED = [
    ("default", lambda r: setattr(r, "attention_scaling", 1.1)),
    ("dynamic", lambda r: setattr(r, "attention_scaling", 1.1)),
    ("gemma3", lambda r: setattr(r, "full_attention_attention_scaling", 1.1)),
    ("mrope", lambda r: setattr(r, "mrope_section", [12, 10, 10])),
    ("mrope", lambda r: r.mrope_section.reverse()),
]


@pytest.mark.parametrize("case, change, reason", LEFT)
def test_a_module_with_other_tables_is_left_as_it_is_and_raises_later(case, change, reason):
    rotary = rotary_of(CASES[case])
    patched = exact(rotary)
    change(rotary)
    forward, why = exact_rotary(rotary)
    assert forward is None and why.startswith(f"left as it is, because {reason}")
    if "_freq" in reason:
        change(patched)
        with pytest.raises(ValueError, match=reason):
            tables(patched, positions(CASES[case]))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case, change", FOLLOWED)
def test_a_changed_attribute_is_followed(case, change, compiled):
    rotary, position_ids = rotary_of(CASES[case]), torch.randint(99, CASES[case][2])
    patched = exact(rotary)
    torch._dynamo.reset()
    used = torch.compile(patched, backend="eager", fullgraph=case != "dynamic") if compiled else patched
    used.layer_types = getattr(rotary, "layer_types", None)
    before = tables(used, position_ids)
    for each in (rotary, patched):
        change(each)
    after, expected = tables(used, position_ids), tables(rotary, position_ids)
    assert not all(map(torch.equal, after, before))
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-4)


def test_threads_do_not_disturb_each_other():
    rotary = exact(rotary_of(CASES["yarn"]))
    expected = [tables(rotary, torch.tensor([[n]])) for n in range(9)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for n, found in enumerate(pool.map(lambda n: tables(rotary, torch.tensor([[n % 9]])), range(200))):
            assert all(map(torch.equal, found, expected[n % 9]))
    assert torch.get_default_dtype() == torch.float32


def test_the_handle_lists_the_rotary_modules_and_undo_restores_them():
    model, hooked = make(rope_parameters={"rope_theta": 10000.0, **DYNAMIC}), []
    expected, buffers = model(tokens()).logits, set(model.model.rotary_emb._buffers)
    add_hook(model.model.rotary_emb, hooked)
    patched = patch(model, exact_angles=True)
    lists = "model.rotary_emb.forward of 1 LlamaRotaryEmbedding: exact angles, by its own formula in float64"
    assert lists in str(patched)
    assert not torch.equal(model(tokens(), position_ids=tokens() + 2**17).logits, expected) and hooked
    patched.undo()
    remove_hook(model.model.rotary_emb)
    assert torch.equal(model(tokens()).logits, expected)
    assert set(model.model.rotary_emb._buffers) == buffers

    model.model.rotary_emb.inv_freq.mul_(2)
    patched = patch(model, exact_angles=True)
    assert "model.rotary_emb: left as it is, because inv_freq of LlamaRotaryEmbedding was changed" in str(patched)
