"""Kernelizes models with kernel_mapping() and prints how the results differ. test_transformers.py runs this program."""

import json
import logging
import os

os.environ["HF_HUB_OFFLINE"] = "1"
logging.disable(logging.WARNING)  # kernels warns about layers that it has no kernel for

import transformers.utils.import_utils  # noqa: E402

# transformers accepts only one minor release of kernels. The parts that are used here are the same in other releases.
transformers.utils.import_utils.is_kernels_available = lambda *args, **kwargs: True

import test_transformers as tests  # noqa: E402
import torch  # noqa: E402
from kernels import Mode, kernelize, use_kernel_mapping  # noqa: E402

from torch_rope.integrations.transformers import kernel_mapping  # noqa: E402

MOE = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def step(model):
    model.zero_grad()
    logits = model(tests.tokens()).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


for family in ("llama", "gpt_oss", "openai_privacy_filter"):
    config = transformers.AutoConfig.for_model(family, **tests.SMALL, **({} if family == "llama" else MOE))
    kind = transformers.AutoModelForTokenClassification if "filter" in family else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation="eager")
    expected, gradients = step(model)
    modes = [Mode.INFERENCE, Mode.TRAINING]
    for mode in modes + [mode | Mode.TORCH_COMPILE for mode in modes if family == "llama"]:
        with use_kernel_mapping(kernel_mapping(), inherit_mapping=False):
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
            "calls": sum(e.count for e in profile.key_averages() if e.key == "rope::rotate_qk"),
            "logits": tests.difference(actual[0], expected),
            "gradients": tests.difference(actual[1], gradients),
            "undone": tests.difference(model(tests.tokens()).logits, expected),
        }
        print(json.dumps(report))
