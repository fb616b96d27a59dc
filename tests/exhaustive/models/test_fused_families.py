"""Compares every causal language model of transformers, tiny and random, with itself after patch(fuse=True)."""

import re
import sys

import pytest
import torch
from cases import ROOT, needed
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

transformers = needed("transformers")

from language_models import made  # noqa: E402
from models import difference, logits, new_cache, tokens  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from torch_rope.integrations.transformers import patch  # noqa: E402

pytestmark = [pytest.mark.cpu]
CACHES = {"DeepseekV4": ["dynamic"], "Dory": [], "MiniMax": []}  # those that a model takes, if not both
NAMES = {n[:-11] for n in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if n.endswith("ForCausalLM")}
NAMES -= {"Blt", "Fuyu", "Gemma4Assistant", "Gemma4UnifiedAssistant", "Phi4Multimodal"}  # for bytes, images, drafts
NAMES -= {"Inkling2", "Jamba", "NemotronH"}  # whose text is not rotated


def results(model, name, file):
    """Returns all that attention functions get, and the logits, for a text at once and with caches beyond the window."""
    given, own = [], vars(file).get("eager_attention_forward")

    def attention(layer, *args, **kwargs):
        given.append(tree_map_only(Tensor, torch.clone, (args, sorted(kwargs.items()))))
        return own(layer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as watched:
        watched.setattr(file, "eager_attention_forward", attention, raising=False)
        ways = [(new_cache(kind, model), 6, 1, 1, 1, 1, 2) for kind in CACHES.get(name, ("dynamic", "static"))]
        return given, [logits(model, tokens(2, 12), *way) for way in ((None, 12), *ways)]


def test_fused_models_compute_the_same_and_the_page_counts_them():
    says = {}
    for name in NAMES:
        file = sys.modules[getattr(transformers, f"{name}ForCausalLM").__module__]
        if not any("apply_rot" in n for n in vars(file)):
            continue
        with patch(model := made(name), fuse=True) as patched:
            text, actual = str(patched), results(model, name, file)
        expected = results(model, name, file)
        for a, e in zip(*map(tree_leaves, (actual, expected)), strict=True):
            near = isinstance(e, Tensor) and a.shape == e.shape and difference(a, e) < 1e-4
            assert near or (torch.equal(a, e) if isinstance(e, Tensor) else a is e or a == e), name
        assert expected[0] or "; fused" not in text, name
        says[name.replace("_", "").lower()] = text
    fused = {name for name in says if "kept apart" not in says[name]}
    page = " ".join((ROOT / "docs" / "integrations" / "transformers.md").read_text().split())
    listed = re.search(rf"{len(fused)} of {len(says)} causal .*? are fused, among them (.*?)\. (.*?) are not", page)
    assert {re.sub(r"\W", "", name).lower() for name in re.split(", | and ", listed[1])} <= fused
    for name, word in re.findall(r"([\w-]+) \(`(\w+)`\)", listed[2]):
        assert f"kept apart, because its forward uses {word}" in says[re.sub(r"\W", "", name).lower()]
