"""Kernelizes models and prints how the results differ: with kernel_mapping(), and with a mapping to the build for the Hub
whose folder the environment variable ROPE_KERNEL names. test_hub.py runs this program."""

import itertools
import json
import logging
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
logging.disable(logging.WARNING)  # kernels warns about layers that it has no kernel for

import transformers.utils.import_utils  # noqa: E402

# transformers accepts only one minor release of kernels. The parts that are used here are the same in other releases.
transformers.utils.import_utils.is_kernels_available = lambda *args, **kwargs: True

import torch  # noqa: E402
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping  # noqa: E402
from models import MOE, SMALL, difference, tokens  # noqa: E402

from torch_rope.integrations.transformers import kernel_mapping  # noqa: E402

LAYER = LocalLayerRepository(Path(os.environ["ROPE_KERNEL"]), layer_name="apply_rotary_transformers")
# An entry for training with torch.compile serves the other modes too.
BUILD = {"rotary_pos_emb": {"cpu": {Mode.TRAINING | Mode.TORCH_COMPILE: LAYER}}}
# llama: half-split, each angle twice in the table. gpt_oss: half-split, each angle once. The last one: interleaved.
FAMILIES = ["llama", "gpt_oss", "openai_privacy_filter"]


def step(model):
    model.zero_grad()
    logits = model(tokens()).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


for family in FAMILIES:
    torch.manual_seed(0)
    kind = transformers.AutoModelForTokenClassification if "filter" in family else transformers.AutoModelForCausalLM
    model = kind.from_config(transformers.AutoConfig.for_model(family, **SMALL | MOE), attn_implementation="eager")
    expected, gradients = step(model)
    modes = [Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE if family == "llama" else Mode.TRAINING]
    for build, mode in itertools.product((False, True), modes):
        with use_kernel_mapping(BUILD if build else kernel_mapping(), inherit_mapping=False):
            kernelize(model, mode=mode, device="cpu")
        torch._dynamo.reset()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if Mode.TORCH_COMPILE in mode else model
        actual = step(run)  # the first call examines the function, and compiles
        with torch.profiler.profile() as profile:
            run(tokens())
        with use_kernel_mapping({}, inherit_mapping=False):
            kernelize(model, mode=mode, device="cpu")
        calls = {e.key: e.count for e in profile.key_averages() if e.key.endswith("::rotate_qk")}
        report = {"family": family, "build": build, "mode": str(mode), "calls": calls}
        report |= {"logits": difference(actual[0], expected), "gradients": difference(actual[1], gradients)}
        print(json.dumps(report | {"undone": difference(model(tokens()).logits, expected)}))
