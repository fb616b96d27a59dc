"""The demo, with a small random Llama in place of SmolLM2. test_examples.py runs it with SmolLM2."""

import types

import pytest
import torch
from cases import ROOT, needed

pytestmark = pytest.mark.cpu


def test_the_demo_generates_the_tokens_of_transformers(monkeypatch, capsys):
    needed("gguf")
    transformers = needed("transformers")
    for name in ("HF_HUB_OFFLINE", "TQDM_DISABLE", "KINETO_LOG_LEVEL"):
        monkeypatch.setenv(name, "1")  # the import of the example sets them
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import generate

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, initializer_range=0.2))
    config = generate.Config(**sizes, inv_freq=generate.torch_rope.inv_freq(32, 500.0), max_seq=48, interleaved=True)
    tokenizer = types.SimpleNamespace(eos_token_id=None, decode=lambda tokens, **_: "".join(f"{t} " for t in tokens))
    loaded = config, generate.from_transformers("llama", model), 500.0, tokenizer, torch.randint(64, (1, 20))
    monkeypatch.setattr(generate, "load", lambda *_: loaded)
    with torch.inference_mode():
        try:
            generate.generate("?", 12, half_split=False, compiled=False)
        finally:
            torch.compiler.set_stance("default")
    assert "All 12 tokens are equal." in capsys.readouterr().out
