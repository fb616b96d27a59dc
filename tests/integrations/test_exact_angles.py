"""Compares the tables of rotary modules with exact angles, and the logits of a model, with a float64 computation."""

import copy
import importlib
import pickle
import types

import pytest
import torch
from cases import needed
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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


def llama(rope):
    return module("llama", "Llama", "Llama", rope, **TEXT)


VISION = dict(hidden_size=256, num_attention_heads=4)
PLAIN, THREE, TWO, BATCH_OF_TWO = (2, 6), (3, 2, 6), (6, 2), (2, 6, 2)  # shapes of position_ids

# name -> (a function that makes the module, the shape of position_ids)
CASES = {
    # kinds
    "default": (llama(DEFAULT), PLAIN),
    "linear": (llama(dict(rope_type="linear", factor=4.0)), PLAIN),
    "dynamic": (llama(DYNAMIC), PLAIN),
    "yarn": (llama(YARN), PLAIN),
    "longrope": (llama(LONGROPE), PLAIN),
    "llama3": (llama(LLAMA3), PLAIN),
    "proportional": (module("gemma4", "Gemma4Text", "Gemma4Text", num_hidden_layers=6), PLAIN),
    "mrope": (module("qwen2_vl", "Qwen2VL", "Qwen2VLText", DEFAULT | {"mrope_section": [8, 12, 12]}, **TEXT), THREE),
    "mrope, one row": (
        module("qwen2_vl", "Qwen2VL", "Qwen2VLText", DEFAULT | {"mrope_section": [8, 12, 12]}, **TEXT), PLAIN
    ),
    # layouts
    "cohere": (module("cohere", "Cohere", "Cohere", DEFAULT, **TEXT), PLAIN),
    "deepseek_v2": (module("deepseek_v2", "DeepseekV2", "DeepseekV2", YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}), PLAIN),
    "deepseek_v4": (module("deepseek_v4", "DeepseekV4", "DeepseekV4"), PLAIN),
    "ernie4_5_vl": (
        module("ernie4_5_vl_moe", "Ernie4_5_VLMoeText", "Ernie4_5_VLMoeText", DEFAULT | {"mrope_section": [11, 11, 10]}, **TEXT),
        THREE,
    ),
    "gemma3": (module("gemma3", "Gemma3", "Gemma3Text", num_hidden_layers=6), PLAIN),
    "glm": (module("glm", "Glm", "Glm", DEFAULT | {"partial_rotary_factor": 0.5}, **TEXT), PLAIN),
    "gpt_oss": (module("gpt_oss", "GptOss", "GptOss"), PLAIN),
    "llama4": (module("llama4", "Llama4Text", "Llama4Text", LLAMA3, **TEXT), PLAIN),
    "modernbert": (module("modernbert", "ModernBert", "ModernBert"), PLAIN),
    "olmo2": (module("olmo2", "Olmo2", "Olmo2", DEFAULT, **TEXT), PLAIN),
    "qwen3_vl": (
        module("qwen3_vl", "Qwen3VLText", "Qwen3VLText", DEFAULT | {"mrope_section": [12, 10, 10]}, **TEXT), THREE
    ),
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


@pytest.mark.parametrize("case", ["yarn", "dynamic", "longrope", "qwen3_vl"])
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
    rotary = llama(rope)()
    patched = exact(rotary)
    with InDouble():
        judge = llama(rope)()
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
    rotary = llama(DYNAMIC)()
    rotary(torch.zeros(1), torch.tensor([[9999]]))
    patched, near = exact(rotary), torch.tensor([[1, 5000]])
    for a, b in zip(patched(torch.zeros(1), near), rotary(torch.zeros(1), near), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)
    grown, short = copy.deepcopy(patched), torch.tensor([[1, 50]])
    patched(torch.zeros(1), short)  # resets the length of this module, and not that of the copy
    assert not torch.equal(patched(torch.zeros(1), near)[1], grown(torch.zeros(1), near)[1])


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_module_has_the_frequencies_of_its_config(cast):
    for case in ("default", "longrope", "gemma3", "qwen3_vl", "pixtral"):
        make, shape = CASES[case]
        rotary, position_ids = make(), positions(shape)
        layer_type = layer_types(rotary)[0]
        expected = exact(rotary)(torch.zeros(1), position_ids, **layer_type)
        cast_before, cast_back, cast_after = (
            copy.deepcopy(rotary).to(cast),
            copy.deepcopy(rotary).to(cast).float(),
            exact(rotary).to(cast),
        )
        for patched in (exact(cast_before), exact(cast_back), cast_after):
            for a, b in zip(patched(torch.zeros(1), position_ids, **layer_type), expected, strict=True):
                assert torch.equal(a, b)
        with torch.autocast("cpu", torch.bfloat16):
            for a, b in zip(cast_after(torch.zeros(1), position_ids, **layer_type), expected, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [PLAIN, THREE])
def test_a_module_that_multiplies_matrices_gets_exact_angles(shape):
    """Modules of older transformers do. Those of Qwen2-VL return a table for each axis."""

    class Older(type(CASES["default"][0]())):
        def forward(self, x, position_ids):
            assert position_ids.dim() == len(shape)
            angles = (self.inv_freq[:, None] @ position_ids.unsqueeze(-2).float()).mT
            angles = torch.cat([angles, angles], -1)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    x, position_ids = torch.zeros(1), positions(shape)
    rotary = Older(CASES["default"][0]().config)
    actual = exact(rotary)(x, position_ids)
    assert [t.shape for t in actual] == [t.shape for t in rotary(x, position_ids)]
    assert all(map(torch.equal, actual, exact(CASES["default"][0]())(x, position_ids)))


# Modules whose tables are not made of the frequencies of their config, or in more than one way.
PHIMOE = module(
    "phimoe", "Phimoe", "Phimoe", LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.2}, **TEXT
)  # short only
KIMI = module("kimi_k25", "Kimi_K25Vision", "Kimi_K25Vision")
CHANGED = "its frequencies were changed"
LEFT = [
    (CASES["default"][0], lambda r: r.inv_freq.mul_(1.0001), CHANGED),
    (CASES["default"][0], lambda r: r.inv_freq[-1:].mul_(2), CHANGED),
    (CASES["default"][0], lambda r: r.to(torch.bfloat16).inv_freq.mul_(1.02), CHANGED),
    (CASES["default"][0], lambda r: setattr(r, "attention_scaling", 1.1), CHANGED),
    (CASES["dynamic"][0], lambda r: r.inv_freq.mul_(1.0001), CHANGED),
    (CASES["longrope"][0], lambda r: r.original_inv_freq.mul_(1.0001), CHANGED),
    (CASES["mrope"][0], lambda r: setattr(r, "mrope_section", [12, 10, 10]), CHANGED),
    (CASES["gemma3"][0], lambda r: r.full_attention_inv_freq.mul_(1.0001), CHANGED),
    (CASES["default"][0], lambda r: setattr(r, "forward", lambda x, position_ids: None), "its forward was replaced"),
    (CASES["default"][0], lambda r: r.to("meta"), "it is on the meta device"),
    (CASES["default"][0], lambda r: setattr(r, "a", torch.nn.Parameter(torch.zeros(1))), "it has weights"),
    (CASES["default"][0], lambda r: delattr(r, "config"), "its frequencies are not known: "),
    (CASES["default"][0], lambda r: r.config.rope_parameters.update(rope_type="x"), "its frequencies are not known: "),
    (PHIMOE, lambda r: None, "its tables are not cos and sin of positions times the frequencies of its config"),
    (KIMI, lambda r: None, "its positions may have any number of axes"),
]


@pytest.mark.parametrize("make, change, reason", LEFT)
def test_a_module_that_is_not_what_its_config_says_is_left_as_it_is(make, change, reason):
    rotary = make()
    change(rotary)
    forward, text = exact_rotary(rotary)
    assert forward is None and text.startswith(f"left as it is, because {reason}")


def test_a_module_that_makes_no_tables_is_not_mentioned():
    assert exact_rotary(torch.nn.Linear(2, 2)) == (None, "")


@pytest.mark.parametrize("case", ["default", "dynamic", "longrope", "gemma3", "qwen3_vl", "llama4", "pixtral"])
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
    class Operators(TorchDispatchMode):
        names = []

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.names.append(op._schema.name)
            return op(*args, **(kwargs or {}))

    patched, x, position_ids = exact(llama(YARN)()), torch.zeros(1), torch.tensor([[FAR]])
    with Operators() as operators:
        patched(x, position_ids)
    assert operators.names == ["aten::unsqueeze", "rope::axial_cos_sin"]


def test_far_logits_are_a_hundred_times_nearer_to_those_of_a_float64_model():
    """The judge computes everything in float64. The float32 model keeps its other roundings, about 1e-6."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        max_position_embeddings=2 * FAR, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    inputs = {"input_ids": torch.randint(96, (2, 32)), "position_ids": torch.arange(FAR, FAR + 32).expand(2, -1)}
    judge = copy.deepcopy(model).double()
    with InDouble():
        judge.model.rotary_emb = type(judge.model.rotary_emb)(config)

    def logits(model, **inputs):
        with torch.no_grad():
            return model(**inputs, use_cache=False).logits.double()

    def off(logits):
        return ((logits - expected).abs().max() / expected.abs().max()).item()

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
    hooks = needed("accelerate.hooks")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        max_position_embeddings=64, rope_parameters={"rope_theta": 10000.0, **DYNAMIC},
    )  # fmt: skip
    model, tokens = transformers.LlamaForCausalLM(config).eval(), torch.randint(96, (2, 9))
    expected, buffers = model(tokens).logits, [name for name, _ in model.named_buffers()]
    hooks.add_hook_to_module(model.model.rotary_emb, hooks.ModelHook())
    handle = patch(model, exact_angles=True)
    assert "model.rotary_emb.forward of 1 LlamaRotaryEmbedding: exact angles from the dynamic frequencies" in str(
        handle
    )
    assert "as before" not in str(handle)
    assert not torch.equal(model(tokens, position_ids=tokens + 2**17).logits, expected)
    handle.undo()
    hooks.remove_hook_from_module(model.model.rotary_emb)
    assert torch.equal(model(tokens).logits, expected)
    assert [name for name, _ in model.named_buffers()] == buffers

    model.model.rotary_emb.inv_freq.mul_(2)
    handle = patch(model, exact_angles=True)
    assert "model.rotary_emb: left as it is, because its frequencies were changed" in str(handle)
    assert "model.rotary_emb.inv_freq: 8 frequencies, as before" in str(handle)
