"""Compares every causal language model of transformers, tiny and random, with itself after patch(fuse=True)."""

import re
import sys

import pytest
import torch
from cases import ROOT, needed
from layers import counting

transformers = needed("transformers")

from language_models import CACHES, FORMS, ROTATING, calls_of_layers, compared, file_of, made, qk_of  # noqa: E402
from models import GRADIENTS, LOGITS, difference, logits, new_cache, tokens, train  # noqa: E402

from torch_rope.integrations.transformers import patch  # noqa: E402
from torch_rope.integrations.transformers.known_layers import FORWARDS, NORMS  # noqa: E402

sys.path.append(str(ROOT / "tests" / "known"))
import forwards  # noqa: E402

pytestmark = [pytest.mark.cpu]


def test_the_table_has_what_the_tool_reads():
    read, norms = (
        {text: record for text, (record, _) in found.items()} for found in (forwards.entries(), forwards.norms())
    )
    known = {text: record for text, record in FORWARDS.items() if text in read}
    assert len(known) > 50 and known == {text: read[text] for text in known}
    assert {text: norms[text] for text in NORMS} == NORMS


def test_fused_models_compute_the_same_and_the_page_counts_them():
    says = {}
    for name in ROTATING:
        says[name.replace("_", "").lower()], same = compared(name)
        assert same, name
    fused = {name for name in says if "kept apart" not in says[name]}
    page = " ".join((ROOT / "docs" / "integrations" / "transformers.md").read_text().split())
    listed = re.search(rf"{len(fused)} of {len(says)} causal .*? are fused, among them (.*?)\. ", page)
    assert {re.sub(r"\W", "", name).lower() for name in re.split(", | and ", listed[1])} <= fused


@pytest.mark.parametrize("name", FORMS)
def test_each_form_computes_the_same(name):
    says, same = compared(name, **FORMS[name])
    assert same and "; fused" in says and "kept apart" not in says and "fell back" not in says


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_q_and_k_have_the_rounding_of_the_model(dtype):
    """At most one element in 10,000 differs, by one rounding, if a layer gets the same input."""
    for name in ROTATING:
        model, file = made(name, **FORMS.get(name, {})).to(dtype), file_of(name)
        with patch(model, fuse=True) as patched:
            if "; fused" not in str(patched):
                continue
            kinds = CACHES.get(name, ("dynamic", "static"))
            calls = calls_of_layers(model, (None, 12), *((new_cache(kind, model), 9, 1, 1) for kind in kinds))
            actual = [t for pair in qk_of(calls, file) for t in pair]
            # A layer of GraniteMoeHybrid that gets no tables is in the table, and computes by its own forward.
            assert name == "GraniteMoeHybrid" or "fell back" not in str(patched)
        expected = [t for pair in qk_of(calls, file) for t in pair]
        differ = [(a != e).sum().item() for a, e in zip(actual, expected, strict=True)]
        assert sum(differ) <= 1 + 1e-4 * sum(t.numel() for t in actual), (name, sum(differ))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("name", FORMS)
def test_padding_training_and_compiling(name):
    model, mask, text = made(name, **FORMS[name]), torch.ones(2, 12, dtype=torch.long), tokens(2, 12)
    mask[0, :3] = 0

    @torch.no_grad()
    def padded():
        caches = [new_cache(kind, model) for kind in ("dynamic", "static")]
        return torch.cat([model(text, attention_mask=mask, cache=cache).logits for cache in (None, *caches)])

    def trained():
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        return train(model, enabled=False)

    expected, (loss, gradients) = padded(), trained()
    with patch(model.eval(), fuse=True):
        assert difference(padded()[:, 3:], expected[:, 3:]) < 10 * LOGITS
        actual, actual_gradients = trained()
        assert difference(actual, loss) < LOGITS and difference(actual_gradients, gradients) < 10 * GRADIENTS
        model.eval().activation_checkpointing_disable()
        graphs, cache = [], new_cache("static", model)
        logits(model, text[:, :4], cache, 4)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=counting(graphs), dynamic=False)
        actual = logits(compiled, text[:, 4:], cache, 1, 1, 6)
    expected = logits(model, text, new_cache("static", model), 4, 1, 1, 6)[:, 4:]
    assert difference(actual, expected) < 10 * LOGITS and min(graphs) > 0
