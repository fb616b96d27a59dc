"""Tests what patch says of every family and of all modeling files of the installed release of transformers.

A test makes the tables of docs/families.md. test_bits.py compares a model of each family with the unpatched one.
"""

import contextlib
import importlib
import inspect
import pkgutil
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from cases import ROOT, needed, python

transformers = needed("transformers")

from families import CASES  # noqa: E402
from pages import compare, listed, markdown, said  # noqa: E402

import torch_rope  # noqa: E402
from torch_rope.frequencies.families import HALF_SPLIT, INTERLEAVED, ROPE_INTERLEAVE  # noqa: E402
from torch_rope.integrations import transformers as integration  # noqa: E402
from torch_rope.integrations._text import NoText, text_of  # noqa: E402
from torch_rope.integrations.transformers.fuse import ROLES  # noqa: E402
from torch_rope.integrations.transformers.known_layers import FORWARDS  # noqa: E402

pytestmark = [pytest.mark.cpu]
DOC = (ROOT / "docs" / "families.md").read_text()


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
    layers = defaultdict(set)
    for file in modeling_files():
        roles = {*ROLES, *filter(integration.LIBRARY.rotary.search, vars(file))}
        for cls in (type(module) for module in classes_of(file) if "Attention" in type(module).__name__):
            with contextlib.suppress(NoText):
                if record := FORWARDS.get(text_of(cls.forward, roles, cls)):
                    never = record.never.strip("'")
                    form = f"not fused: {never}" if never and "if" not in never else record.form
                    layers[form].add(cls.__name__.replace("Attention", ""))
    kept = set().union(*served.values())
    if (release := f"transformers {transformers.__version__} rotate") in DOC:
        count = f"{len(kept | refused.keys())} modeling files of {release}. `patch` supports {len(kept)} of them:"
        reasons = refused | dict(re.findall(r"^\| (\w+) \| (.*) \|$", DOC, re.M))  # those that the page has stay
        families = listed(["what patch says", "tested model_type", "modeling files"], tested, served)
        reasons = markdown(["modeling file", "reason"], [[f, reasons[f]] for f in sorted(refused)])
        layers = listed(["form", "attention layers"], layers)
        compare("families.md", families=f"{count}\n\n{families}", refused=reasons, layers=layers)
    else:  # the page was made with another release
        supported = {f for row in re.findall(r"^\| rotate.*\| (.*) \|$", DOC, re.M) for f in row.split(", ") if f}
        assert not supported & refused.keys()
        assert supported & model_types.keys() <= kept
