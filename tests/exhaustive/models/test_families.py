"""Compares patched models of every family with the unpatched model: the logits, and all gradients of a training step.

The models are tiny and random. A test makes the tables of docs/families.md from what patch says of them, and of all
modeling files of the installed release of transformers.
"""

import importlib
import inspect
import pkgutil
import re
import sys
import types
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from cases import ROOT, needed, python

transformers = needed("transformers")

import models  # noqa: E402
from models import GRADIENTS, LOGITS, MLA, MOE  # noqa: E402
from models import calls as calls  # noqa: E402
from pages import compare, listed, markdown, said  # noqa: E402
from training import cast, close, difference, output, same, train_step  # noqa: E402

import torch_rope  # noqa: E402
from torch_rope.frequencies.families import HALF_SPLIT, INTERLEAVED, ROPE_INTERLEAVE  # noqa: E402
from torch_rope.integrations import _bits, diffusers, timm  # noqa: E402
from torch_rope.integrations import transformers as integration  # noqa: E402
from torch_rope.integrations._names import nested  # noqa: E402
from torch_rope.integrations._rotary import text_of  # noqa: E402

pytestmark = [pytest.mark.cpu]
DOC = (ROOT / "docs" / "families.md").read_text()

BROKEN = 0.05  # a model whose q and k are not rotated differs by 0.08 or more
SMALL = models.SMALL | dict(eos_token_id=2, use_cache=False)
V4 = dict(num_key_value_heads=1, head_dim=32, layer_types=["sliding_attention"] * 2)
LONGROPE = dict(
    rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=8,
    short_factor=[1 + i / 8 for i in range(8)], long_factor=[2.0 + i for i in range(8)],
)  # fmt: skip
VISION = dict(depth=2, hidden_size=64, num_heads=4, patch_size=2, temporal_patch_size=1, initializer_range=0.2)
IMAGE_TOKENS = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)


def tokens():
    return {"input_ids": torch.randint(3, 80, (2, 12))}


def pixels():
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def made(kind, model_type, inputs=tokens, **changes):
    config = transformers.AutoConfig.for_model(model_type, **SMALL | changes)
    return getattr(transformers, f"AutoModel{kind}").from_config(config, attn_implementation="eager"), inputs()


def causal(model_type, **changes):
    return made("ForCausalLM", model_type, **changes)


def qwen_vl(model_type, section, vision, **rope):
    """Returns a model and its inputs: text and an image of 4 x 4 patches, whose tokens have positions on three axes."""
    rope |= {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}
    text = SMALL | {"rope_parameters": rope}
    config = transformers.AutoConfig.for_model(
        model_type, text_config=text, vision_config=VISION | vision, **IMAGE_TOKENS
    )
    inputs = tokens()
    inputs["input_ids"][:, 2:8] = torch.tensor([92, 90, 90, 90, 90, 93])
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == 90).int()
    inputs |= {"pixel_values": torch.randn(32, 12), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    inputs["use_cache"] = False
    return transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager"), inputs


def falcon():
    """Has no head_dim in its config."""
    config = transformers.FalconConfig(**{n: v for n, v in SMALL.items() if n != "head_dim"}, alibi=False)
    return transformers.FalconForCausalLM._from_config(config, attn_implementation="eager"), tokens()


def gemma4_vision():
    positions = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, -1, -1)
    inputs = {"pixel_values": torch.rand(2, 16, 12), "pixel_position_ids": positions}
    changes = dict(num_key_value_heads=4, patch_size=2, position_embedding_size=16, pooling_kernel_size=2)
    return made("", "gemma4_vision", lambda: inputs, **changes)


def llama4_vision():
    config = transformers.Llama4VisionConfig(
        **SMALL | dict(intermediate_size=256, image_size=16, patch_size=4, vision_output_dim=64),
        projector_input_dim=64, projector_output_dim=64,
    )  # fmt: skip
    return transformers.Llama4VisionModel._from_config(config, attn_implementation="eager"), pixels()


# Functions that return a model and its inputs, by model_type.
CASES = {
    **{
        name: lambda name=name: causal(name)
        for name in [
            "apertus", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm",
            "glm4", "gpt_neox", "granite", "helium", "llama", "mistral", "nanochat", "nemotron", "olmo2",
            "olmo3", "persimmon", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2",
        ]  # fmt: skip
    },
    **{name: lambda name=name: causal(name, **MOE) for name in ("gpt_oss", "mixtral", "qwen3_moe")},
    "deepseek_v2": lambda: causal("deepseek_v2", **MOE | MLA),
    "deepseek_v3": lambda: causal("deepseek_v3", **MOE | MLA),
    "deepseek_v3 without rope_interleave": lambda: causal("deepseek_v3", **MOE | MLA, rope_interleave=False),
    "deepseek_v4": lambda: causal("deepseek_v4", **MOE | MLA | V4),
    "dinov3_vit": lambda: made(
        "", "dinov3_vit", pixels, patch_size=4, image_size=16, num_register_tokens=2, layer_norm_eps=1e-5, layerscale_value=1.0
    ),
    "falcon": falcon,
    "gemma4_text": lambda: causal("gemma4_text", vocab_size_per_layer_input=96),
    "gemma4_vision": gemma4_vision,
    "gptj": lambda: causal("gptj", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64),
    "llama4_text": lambda: causal("llama4_text", **MOE, intermediate_size_mlp=64),
    "llama4_vision_model": llama4_vision,
    "modernbert": lambda: made("ForMaskedLM", "modernbert"),
    "openai_privacy_filter": lambda: made("ForTokenClassification", "openai_privacy_filter", **MOE),
    "phi": lambda: causal("phi", partial_rotary_factor=0.5),
    "phi3": lambda: causal("phi3", rope_parameters=LONGROPE),
    "pixtral": lambda: made(
        "", "pixtral", lambda: pixels() | {"image_sizes": torch.tensor([[16, 16], [16, 12]])}, image_size=16, patch_size=4
    ),
    "sam3_vit_model": lambda: made(
        "", "sam3_vit_model", pixels, patch_size=4, image_size=16, pretrain_image_size=16, window_size=2, global_attn_indexes=[1]
    ),
    "qwen2_vl": lambda: qwen_vl("qwen2_vl", [2, 3, 3], {"embed_dim": 64, "mlp_ratio": 2}),
    "qwen3_vl": lambda: qwen_vl(
        "qwen3_vl", [4, 2, 2], {"out_hidden_size": 64, "intermediate_size": 64, "deepstack_visual_indexes": [0]},
        mrope_interleaved=True,
    ),
}  # fmt: skip


DTYPES = [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None), (torch.float16, None)]


@pytest.mark.parametrize("family", CASES)
def test_a_patched_model_has_the_bits_of_the_unpatched_model(family, calls):
    """The results and all gradients have the same bits: in float32, under autocast, in bfloat16 and in float16."""
    model, inputs = CASES[family]()
    model.eval()
    for dtype, autocast in DTYPES:
        if dtype != torch.float32:
            if any(b.is_complex() for b in model.buffers()):
                continue  # the unpatched model does not work in this dtype: its complex table becomes real
            model, inputs = model.to(dtype), cast(inputs, dtype)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            expected = train_step(model, inputs)
            assert expected[0][0].isfinite().all()
            with integration.patch(model) as patched:
                calls.clear()  # patch itself calls the operators too
                assert same(train_step(model, inputs), expected), (dtype, autocast)
                assert {str(operator).split(".")[1] for operator in calls} == {
                    call.split(",")[0] for call in said(patched)
                }
                assert (family in INTERLEAVED) in {"interleaved" in call for call in said(patched)}
                assert "rounded" not in str(patched)
            assert same(train_step(model, inputs), expected)


@pytest.mark.parametrize("family", CASES)
def test_a_model_that_rounds_once_or_is_fused_differs_by_rounding(family, monkeypatch):
    model, inputs = CASES[family]()
    model.eval()
    expected = train_step(model, inputs)
    for options in ({"fuse": True}, {"rounding": "once"}):
        with integration.patch(model, **options) as patched:
            with torch.no_grad():
                assert difference(output(model, inputs), expected[0]) < LOGITS
            assert close(train_step(model, inputs), expected, LOGITS, GRADIENTS)
            assert "rounding" not in options or "rounded once" in str(patched)
            assert ("; fused: " in str(patched) or "; kept apart, " in str(patched)) == ("fuse" in options)
            if "rounding" in options:
                with monkeypatch.context() as broken:
                    broken.setattr(_bits, "_rotate", lambda x, *args, **kwargs: x)
                    broken.setattr(_bits, "_rotate_qk", lambda q, k, *args, **kwargs: (q, k))
                    assert min(map(difference, train_step(model, inputs), expected)) > BROKEN
    assert same(train_step(model, inputs), expected)


def test_patch_takes_little_time():
    """In a fresh process. CPU time is counted, because others may use the machine."""
    program = """
import time
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from torch_rope.integrations.transformers import patch
torch.set_num_threads(1)
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=30, **sizes))
for _ in range(2):
    begin = time.process_time()
    patched = patch(model)
    print(time.process_time() - begin)
    patched.undo()
"""
    first, next_one = map(float, python(program).stdout.split())
    assert first <= 0.5 and next_one <= 0.1


def modeling_files():
    """Yields the modules of transformers that mention a rotation."""
    for package in pkgutil.iter_modules(transformers.models.__path__):
        folder = Path(transformers.models.__path__[0]) / package.name
        for file in sorted(folder.glob("modeling_*.py")):
            if re.search("rotary|rope|rotate", file.read_text()):
                yield importlib.import_module(f"transformers.models.{package.name}.{file.stem}")


def classes_of(file):
    """Yields a module of each class of a file, which was not initialised: patch needs only its methods."""
    classes = [c for c in vars(file).values() if isinstance(c, type) and issubclass(c, torch.nn.Module)]
    for cls in classes:
        if cls.__module__ == file.__name__ and not inspect.isabstract(cls):
            module = cls.__new__(cls)
            torch.nn.Module.__init__(module)
            yield module


# Families with functions that torch_rope does not support, with another family's file, or with re-ordered channels.
ELSEWHERE = {"deepseek_v4", "edgetam_video", "roformer", "sam2_video", "sam3_tracker_video", "sam3_vit_model"}
ELSEWHERE |= {"exaone", "internlm3", "iquestcoder", "sarvam_mla", "sarvam_moe", "qwen2_5_omni_dit"}


def test_only_one_attention_reorders_channels_before_it_rotates():
    """So pairs are those of the rotary function, apart from Qwen2.5-Omni's DiT: its scores are those of interleaved pairs."""
    found = set()
    for module in (module for file in modeling_files() for module in classes_of(file)):
        of_file = vars(sys.modules[type(module).__module__])
        for method in filter(inspect.isfunction, vars(type(module)).values()):
            called = {n for n in inspect.unwrap(method).__code__.co_names if inspect.isfunction(of_file.get(n))}
            if any(re.search("rot|rope", name) for name in called):
                found |= {n for n in called if not re.search("rot|rope|attention|repeat_kv|max_seqlen|attn_scale", n)}
    assert found == {"deinterleave_head_dim"}
    omni = transformers.models.qwen2_5_omni.modeling_qwen2_5_omni
    config = transformers.CONFIG_MAPPING["qwen2_5_omni_dit"]()
    q, k = torch.randn(2, 1, 2, 6, config.head_dim)
    tables = omni.Qwen2_5OmniDiTRotaryEmbedding(config)(q, torch.arange(6)[None])
    own = omni.apply_rotary_pos_emb(*map(omni.deinterleave_head_dim, (q, k)), *tables)
    ours = torch_rope.RotaryEmbedding.from_config(config)(q.transpose(1, 2), k.transpose(1, 2))
    assert (torch.einsum("bshd,bthd->bhst", *ours) - own[0] @ own[1].mT).abs().max() < 1e-4


def test_the_documentation_lists_all_modeling_files():
    """Finds out, without building models, which functions are rotations that torch_rope supports."""
    served, refused, model_types = defaultdict(set), {}, {}
    for file in modeling_files():
        family = file.__name__.split(".")[-2]
        configs = "".join(c.read_text() for c in Path(file.__file__).parent.glob("configuration_*.py"))
        model_types[family] = set(re.findall(r'model_type(?:: str)? = "(.+)"', configs))
        for module in classes_of(file):
            try:
                patched = integration.patch(module)
            except ValueError:  # it does not rotate
                continue
            except NotImplementedError as error:
                refused.setdefault(family, str(error).partition(": ")[2])
                continue
            for call in said(patched):
                served[call].add(family)
    interleaved = set().union(*(served[call] for call in served if "interleaved" in call)) & model_types.keys()
    assert all(model_types[family] & INTERLEAVED for family in interleaved)
    assert (INTERLEAVED - ELSEWHERE).issubset(set().union(*(model_types[family] for family in interleaved)))
    assert ROPE_INTERLEAVE <= INTERLEAVED
    half = set().union(*(served[call] for call in served if "interleaved" not in call)) & model_types.keys()
    half = {name.removesuffix("_text") for family in half for name in model_types[family] - INTERLEAVED}
    assert (HALF_SPLIT - ELSEWHERE).issubset(half) and not HALF_SPLIT & INTERLEAVED
    tested = defaultdict(set)
    for family, make in CASES.items():
        for call in said(integration.patch(make()[0])):
            tested[call].add(family.split()[0])
    served = {call: kept for call, families in served.items() if (kept := families - refused.keys())}
    kept = set().union(*served.values())
    if (release := f"transformers {transformers.__version__} rotate") in DOC:
        count = f"{len(kept | refused.keys())} modeling files of {release}. `patch` supports {len(kept)} of them:"
        reasons = refused | dict(re.findall(r"^\| (\w+) \| (.*) \|$", DOC, re.M))  # those that the page has stay
        families = listed(["what patch says", "tested model_type", "modeling files"], tested, served)
        reasons = markdown(["modeling file", "reason"], [[f, reasons[f]] for f in sorted(refused)])
        compare("families.md", families=f"{count}\n\n{families}", refused=reasons)
    else:  # the page was made with another release
        supported = {f for row in re.findall(r"^\| rotate.*\| (.*) \|$", DOC, re.M) for f in row.split(", ") if f}
        assert not supported & refused.keys()
        assert supported & model_types.keys() <= kept


def rotary_functions(file):
    """Yields the functions of a file that may rotate, and those that its methods define."""
    holders = [file, *(c for c in vars(file).values() if isinstance(c, type) and c.__module__ == file.__name__)]
    functions = [f for holder in holders for f in vars(holder).values() if inspect.isfunction(f)]
    for function in map(inspect.unwrap, functions):
        for code in nested(function.__code__):
            if re.search("rot|rope", code.co_name):
                closure = tuple(types.CellType() for _ in code.co_freevars)
                yield types.FunctionType(code, function.__globals__, closure=closure)


@pytest.mark.parametrize("library", [integration, diffusers, timm], ids=lambda library: library.__name__.split(".")[-1])
def test_each_text_that_is_listed_is_that_of_a_function(library):
    """A text that no installed release has any more may be taken from the list."""
    files = modeling_files()
    if library is timm:
        files = [importlib.import_module("vision_models").timm.layers.pos_embed_sincos]
    elif library is diffusers:
        package = needed("diffusers").models
        names = [m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
        files = map(importlib.import_module, names)
    assert set(library.LIBRARY.texts) <= {text_of(f) for file in files for f in rotary_functions(file)}
