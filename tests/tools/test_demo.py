"""The decoder of the examples, as a small Llama and Qwen3 of random weights. test_examples.py runs it with SmolLM2."""

import types

import pytest
import torch
from cases import ROOT, Calls
from models import make
from torch._dynamo.testing import CompileCounter

pytestmark = pytest.mark.cpu
SIZES = {"vocab_size": 64, "head_dim": 32, "rms_norm_eps": 1e-3, "pad_token_id": None}
SIZES |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
PROMPT, LENGTH = 20, 32
# Less than twice the mean difference of logits that a cache of this dtype causes, as a part of the largest logit.
BOUNDS = {"float8_e4m3fn": 0.04, "float8_e5m2": 0.08, "int8": 0.018}


@pytest.fixture(params=["llama", "qwen3"])
def stock(request, monkeypatch):
    """A model of transformers. The weights of its norms are not 1."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    model = make(request.param, **SIZES)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    return model


def all_logits(decoder, tokens):
    """Returns the logits after the prompt, and after each later token."""
    pieces = torch.arange(LENGTH).split([PROMPT] + [1] * (LENGTH - PROMPT))
    return torch.cat([decoder(tokens[:, piece], piece) for piece in pieces], dim=1)


@torch.inference_mode()
def test_the_decoder_computes_the_logits_of_transformers_by_one_call_in_a_layer(stock):
    from generate import Decoder

    decoder, tokens = Decoder.from_transformers(stock, 2, LENGTH), torch.randint(64, (2, LENGTH))
    with Calls() as calls:
        logits = all_logits(decoder, tokens)
    assert [name for name in calls.names if "rope::" in name] == ["rope::rotate_into_cache_"] * 2 * 13
    torch.testing.assert_close(logits, stock(tokens).logits[:, PROMPT - 1 :], atol=1e-4, rtol=1e-4)
    for dtype, bound in BOUNDS.items():
        decoder = Decoder.from_transformers(stock, 2, LENGTH)
        all_logits(decoder, tokens)
        for layer in decoder.layers:
            layer.self_attn.quantise(getattr(torch, dtype))
        assert bound / 10 < (all_logits(decoder, tokens) - logits).abs().mean() / logits.abs().max() < bound


def test_the_demo_compares_its_tokens_with_transformers_and_compiles_one_graph(stock, capsys):
    from demo import Decoder, compare

    tokenizer = types.SimpleNamespace(eos_token_id=None, decode=lambda tokens, **_: "".join(f"{t} " for t in tokens))
    decoder, counter = Decoder.from_transformers(stock, 1, LENGTH), CompileCounter()
    rest = stock, tokenizer, torch.randint(64, (1, PROMPT)), LENGTH - PROMPT
    assert compare(decoder, torch.compile(decoder, fullgraph=True, backend=counter), *rest)
    assert "All 12 tokens equal those of transformers" in capsys.readouterr().out and counter.frame_count == 1
    stock.lm_head.weight.data = -stock.lm_head.weight
    assert not compare(decoder, decoder, *rest)
