"""Kernelizes models and prints how the results differ. test_transformers.py runs this program with kernel_mapping(),
test_hub.py with a mapping to a build for the Hub, whose folder the environment variable ROPE_KERNEL names."""

import json
import logging
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
logging.disable(logging.WARNING)  # kernels warns about layers that it has no kernel for

import transformers.utils.import_utils  # noqa: E402

# transformers accepts only one minor release of kernels. The parts that are used here are the same in other releases.
transformers.utils.import_utils.is_kernels_available = lambda *args, **kwargs: True

import test_transformers as tests  # noqa: E402
import torch  # noqa: E402
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping  # noqa: E402
from transformers.utils import kernel_config  # noqa: E402
from transformers.utils.kernel_config import KernelConfig  # noqa: E402

from torch_rope.integrations.transformers import kernel_mapping  # noqa: E402

MOE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
MODES = dict.fromkeys(("llama", "gpt_oss", "openai_privacy_filter"), [Mode.INFERENCE, Mode.TRAINING])
MAPPING = kernel_mapping()
MODES["llama"] = MODES["llama"] + [mode | Mode.TORCH_COMPILE for mode in MODES["llama"]]
if folder := os.environ.get("ROPE_KERNEL"):
    # An entry for training with torch.compile serves the other modes too.
    both = Mode.TRAINING | Mode.TORCH_COMPILE
    layer = LocalLayerRepository(Path(folder), layer_name="apply_rotary_transformers")
    MAPPING = {"rotary_pos_emb": {device: {both: layer} for device in ("cpu", "cuda", "mps")}}
    MODES = {"llama": [Mode.INFERENCE, both], "openai_privacy_filter": [Mode.TRAINING]}


def step(model):
    model.zero_grad()
    logits = model(tests.tokens()).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


for family, modes in MODES.items():
    config = transformers.AutoConfig.for_model(family, **tests.SMALL, **({} if family == "llama" else MOE))
    kind = transformers.AutoModelForTokenClassification if "filter" in family else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation="eager")
    expected, gradients = step(model)
    for mode in modes:
        with use_kernel_mapping(MAPPING, inherit_mapping=False):
            kernelize(model, mode=mode, device="cpu")
        torch._dynamo.reset()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if Mode.TORCH_COMPILE in mode else model
        actual = step(run)  # the first call examines the function, and compiles
        with torch.profiler.profile() as profile:
            run(tests.tokens())
        with use_kernel_mapping({}, inherit_mapping=False):
            kernelize(model, mode=mode, device="cpu")
        report = {
            "family": family,
            "mode": str(mode).replace("Mode.", ""),
            "calls": {e.key: e.count for e in profile.key_averages() if e.key.endswith("::rotate_qk")},
            "logits": tests.difference(actual[0], expected),
            "gradients": tests.difference(actual[1], gradients),
            "undone": tests.difference(model(tests.tokens()).logits, expected),
        }
        print(json.dumps(report))

if folder:  # the mapping that transformers makes of its own notation, for a device that it takes
    kernel_config.infer_device = lambda model: "mps"
    config = KernelConfig({"rotary_pos_emb": f"{folder}:apply_rotary_transformers"}, use_local_kernel=True)
    config.sanitize_kernel_mapping(model)
    config.create_compatible_mapping(model.eval())
    assert config.kernel_mapping["rotary_pos_emb"]["mps"][Mode.INFERENCE].load() is layer.load()
