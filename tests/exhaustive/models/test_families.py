"""Compares patched models of every family with the unpatched model: the logits, and all gradients of a training step.

The models are tiny and random. docs/families.md has a table of the families.
"""

import copy
import importlib
import inspect
import pkgutil
import re
import types
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from cases import ROOT, needed

transformers = needed("transformers")

from test_transformers import GRADIENTS, LOGITS  # noqa: E402
from test_transformers import SMALL as TINY  # noqa: E402
from test_transformers import calls as calls  # noqa: E402
from training import cast, close, difference, output, same, train_step  # noqa: E402

from torch_rope.families import INTERLEAVED, ROPE_INTERLEAVE  # noqa: E402
from torch_rope.integrations import _rotation  # noqa: E402
from torch_rope.integrations import transformers as integration  # noqa: E402
from torch_rope.integrations.transformers import methods, rotator  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("examine_once")]
DOC = (ROOT / "docs" / "families.md").read_text()

BROKEN = 0.05  # a model whose q and k are not rotated differs by 0.08 or more
SMALL = TINY | dict(eos_token_id=2, use_cache=False)
# The seeds are fixed, so that no token is so near to the boundary between two experts that rounding decides.
MOE = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
MLA = dict(
    q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, n_shared_experts=1,
    n_group=1, topk_group=1, first_k_dense_replace=1, num_key_value_heads=4,
)  # fmt: skip
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
    "deepseek_v3, rope_interleave=False": lambda: causal("deepseek_v3", **MOE | MLA, rope_interleave=False),
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


def table(heading):
    """Returns the table below a heading of docs/families.md, as a dict from the first column to the other columns."""
    text = re.search(rf"## {heading}.*?\n\n(\|.*?)\n\n", DOC, re.DOTALL)[1]
    lines = [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {first: rest for first, *rest in lines[2:]}


def test_the_documentation_lists_the_tested_families():
    assert sorted(table("Tested families")) == sorted(CASES)


DTYPES = [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None), (torch.float16, None)]


@pytest.mark.parametrize("family", CASES)
def test_a_patched_model_has_the_bits_of_the_unpatched_model(family, calls):
    """The results and all gradients have the same bits: in float32, under autocast, in bfloat16 and in float16."""
    model, inputs = CASES[family]()
    model.eval()
    pairing, _, _, call = table("Tested families")[family]
    for dtype, autocast in DTYPES:
        if dtype != torch.float32:
            if any(b.is_complex() for b in model.buffers()):
                continue  # the unpatched model does not work in this dtype: its complex table becomes real
            model, inputs = model.to(dtype), cast(inputs, dtype)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            expected = train_step(model, inputs)
            assert expected[0][0].isfinite().all()
            with integration.patch(model) as handle:
                calls.clear()  # patch itself calls the operators too
                assert same(train_step(model, inputs), expected), (dtype, autocast)
                assert {str(operator).split(".")[1] for operator in calls} == {call}
                assert f", {pairing}" in str(handle) and "rounded" not in str(handle)
            assert same(train_step(model, inputs), expected)
    assert (pairing.startswith("interleaved")) == (family in INTERLEAVED)


@pytest.mark.parametrize("family", CASES)
def test_a_model_that_rounds_once_or_is_fused_differs_by_rounding(family, monkeypatch):
    model, inputs = CASES[family]()
    model.eval()
    expected = train_step(model, inputs)
    for options in ({"fuse": True}, {"rounding": "once"}):
        with integration.patch(model, **options) as handle:
            with torch.no_grad():
                assert difference(output(model, inputs), expected[0]) < LOGITS
            assert close(train_step(model, inputs), expected, LOGITS, GRADIENTS)
            assert ("rounded once" in str(handle)) == ("rounding" in options)
            assert ("fused" in str(handle)) == ("fuse" in options)
            if "rounding" in options:
                monkeypatch.setattr(_rotation, "_rotate", lambda x, *args, **kwargs: x)
                for module in (_rotation, rotator):
                    monkeypatch.setattr(module, "_rotate_qk", lambda q, k, *args, **kwargs: (q, k))
                assert min(map(difference, train_step(model, inputs), expected)) > BROKEN
    assert same(train_step(model, inputs), expected)


def modeling_files():
    """Yields the modules of transformers that mention a rotation."""
    for package in pkgutil.iter_modules(transformers.models.__path__):
        folder = Path(transformers.models.__path__[0]) / package.name
        for file in sorted(folder.glob("modeling_*.py")):
            if re.search("rotary|rope|rotate", file.read_text()):
                yield importlib.import_module(f"transformers.models.{package.name}.{file.stem}")


# Families that are interleaved, but whose functions torch_rope does not support.
ELSEWHERE = {"deepseek_v4", "edgetam_video", "roformer", "sam2_video", "sam3_tracker_video", "sam3_vit_model"}


def code(function):
    """Returns what two functions with the same source, in two modeling files, have in common."""
    inner = inspect.unwrap(function).__code__
    called = [inspect.unwrap(function).__globals__.get(name) for name in inner.co_names]
    consts = [c for c in inner.co_consts[1:] if not isinstance(c, types.CodeType)]
    return (
        inner.co_code,
        inner.co_varnames,
        str(consts),
        *(code(f) for f in called if isinstance(f, types.FunctionType)),
    )


def test_the_documentation_lists_all_modeling_files(monkeypatch):
    """Finds out, without building models, which functions are rotations that torch_rope supports."""
    known, examine = {}, methods.RotaryFunction

    def once(function, rounding):  # many modeling files have the same function
        key = code(function)
        if key not in known:
            try:
                known[key] = examine(function, rounding)
            except NotImplementedError as error:
                known[key] = error
        if isinstance(known[key], NotImplementedError):
            raise known[key]
        return copy.copy(known[key])

    monkeypatch.setattr(methods, "RotaryFunction", once)
    # hunyuan_vl's function is a rotation, but its table has different angles for a pair; see test_transformers.py.
    served, refused, model_types = defaultdict(set), {"hunyuan_vl"}, {}
    for file in modeling_files():
        family, rebuilder = file.__name__.split(".")[-2], methods.Rebuilder()
        configs = "".join(c.read_text() for c in Path(file.__file__).parent.glob("configuration_*.py"))
        model_types[family] = set(re.findall(r'model_type(?:: str)? = "(.+)"', configs))
        classes = [c for c in vars(file).values() if isinstance(c, type) and issubclass(c, torch.nn.Module)]
        for method, (function, *_) in (
            m for c in classes if c.__module__ == file.__name__ for m in rebuilder.methods(c)
        ):
            try:
                new = rebuilder.rebuild(function)
            except NotImplementedError:
                refused.add(family)
                continue
            if new is not function:
                for call in new._torch_rope:
                    served[str(call).split("torch.ops.rope.")[1]].add(family)
            elif re.match("_?apply_(rotary|rope)", method):
                refused.add(family)
    assert {call: sorted(families - refused) for call, families in served.items()} == {
        call: families.split(", ") for call, (families,) in table("Supported modeling files").items()
    }
    assert refused == set(table("Refused modeling files"))

    interleaved = set().union(*(served[call] for call in served if "interleaved" in call))
    assert all(model_types[family] & INTERLEAVED for family in interleaved)
    assert (INTERLEAVED - ELSEWHERE).issubset(set().union(*(model_types[family] for family in interleaved)))
    assert ROPE_INTERLEAVE <= INTERLEAVED
