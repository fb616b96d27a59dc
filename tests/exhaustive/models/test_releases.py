"""Tests that patch and from_pretrained work with older releases of transformers than the installed one, and the newest."""

import os
import subprocess
import sys

import pytest
from cases import ROOT

pytestmark = pytest.mark.cpu
RELEASES = ["==5.20.*", "==5.21.*", "==5.22.*", "==5.23.*", ""]  # "" is the newest
PROGRAM = """
import torch, transformers
from torch_rope.integrations.transformers import patch

sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, pad_token_id=0, eos_token_id=1)
for kind in ("llama", "qwen3", "olmo2", "gemma3_text", "cohere", "glm", "gpt_oss", "smollm3"):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model, ids = transformers.AutoModelForCausalLM.from_config(config).eval(), torch.randint(96, (2, 9))
    expected = model(ids).logits
    with patch(model):
        assert torch.equal(model(ids).logits, expected), kind
    with patch(model, fuse=True) as patched, torch.no_grad():
        assert "; fused: " in str(patched) and "kept apart" not in str(patched), kind
        for make in (transformers.DynamicCache, lambda **more: transformers.StaticCache(max_cache_len=12, **more)):
            cache = make(config=config)
            parts = [model(ids[:, a:b], None, None, cache).logits for a, b in ((0, 6), (6, 7), (7, 9))]
            assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-4), kind
    with patch(model, fuse=True), torch.no_grad():  # the own forward of a layer with hooks computes
        model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
        assert torch.allclose(model(ids, None, None, make(config=config)).logits, expected, atol=1e-4), kind
"""


@pytest.mark.parametrize("release", RELEASES)
def test_patch_works_with_other_releases_of_transformers(release, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(tmp_path)]
    subprocess.run([*install, f"transformers{release}"], check=True)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    loads = ["-m", "pytest", "-q", "tests/modules/test_rotary_embedding.py", "-k", "from_pretrained"]
    for what in (["-c", PROGRAM], loads):
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run([sys.executable, *what], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
