"""Denoises a small video with and without torch_rope, and shows where the time of a step goes.

    pip install diffusers matplotlib
    python examples/denoise.py

The model is diffusers' WanTransformer3DModel with the proportions of Wan 2.1 1.3B, fewer layers and heads, and random
weights. Two copies, one of them patched by torch_rope, take turns in denoising the same latents, while the profiler of
torch measures the parts of each step. The exit status is 1 if a bit of a frame differs.
"""

import argparse
import copy
import os
import sys
from pathlib import Path
from statistics import median

os.environ["KINETO_LOG_LEVEL"] = "6"  # hides messages of torch's profiler, which reads it at import

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from torch_rope.integrations.diffusers import patch

ROOT = Path(__file__).resolve().parents[1]
HEAD_DIM, CHANNELS, TEXT = 128, 16, (512, 4096)  # of Wan: channels of a head and of a latent, shape of the prompt
# The parts of a step, their operators and their colours. What has no part is "other": sums, casts, activations.
PARTS = {
    "attention": (("aten::scaled_dot_product_attention",), "#27496d"),
    "matrix products": (("aten::linear", "aten::conv3d"), "#6c9bc4"),
    "norms": (("aten::layer_norm", "aten::rms_norm"), "#b9d2e6"),
    "other": ((), "#d5d8dc"),
    "rotation": (("rope::",), "#e4572e"),
}


@torch.no_grad()
def step(model: nn.Module, latents: Tensor, text: Tensor, noise: float, less: float) -> tuple[Tensor, dict[str, float]]:
    """Makes a step of Euler's method, from one share of noise to a smaller one. Returns the milliseconds of its parts, too.

    Without torch_rope the rotation is many operators. They are those on tensors of [batch, tokens, heads, 64], because
    nothing else takes half of the channels of a head. What an operator calls belongs to the part of that operator.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        latents = latents + (less - noise) * model(latents, torch.tensor([1000 * noise]), text, return_dict=False)[0]
    parts = dict.fromkeys(PARTS, 0.0)
    for event in (event for event in profiler.events() if event.cpu_parent is None):
        shape = event.input_shapes[0] if event.input_shapes else []
        half = len(shape) == 4 and shape[-1] == HEAD_DIM // 2
        found = [part for part, (operators, _) in PARTS.items() if event.name.startswith(operators)]
        parts["rotation" if half else (found or ["other"])[0]] += event.cpu_time_total / 1000
    return latents, parts


def draw(parts: dict[str, dict[str, float]], title: str, file: Path) -> None:
    figure = Figure(figsize=(10, 3), layout="constrained")
    axes, left = figure.subplots(), torch.zeros(len(parts))
    for part, (_, colour) in PARTS.items():
        times = torch.tensor([parts[name][part] for name in parts])
        axes.barh(list(parts), times, left=left, color=colour, label=part)
        left = left + times
    axes.set(title=title, xlabel="milliseconds of a step; all but the rotation differs by noise only")
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"layers": 4, "heads": 6, "frames": 5, "height": 30, "width": 52, "steps": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=ROOT / "build" / "denoise.png", help="(default: %(default)s)")
    o = parser.parse_args()
    if o.height % 2 or o.width % 2 or min(o.layers, o.heads, o.frames, o.height, o.width, o.steps) < 1:
        parser.error("all numbers must be positive, and height and width even")

    print("Importing diffusers, some 10 seconds ...", flush=True)
    from diffusers import WanTransformer3DModel

    print("Making and patching the models ...", flush=True)
    torch.manual_seed(0)
    ffn_dim = 8960 * o.heads // 12  # Wan 2.1 1.3B has 12 heads and 8960 channels in its feed-forward network
    shape = {"num_layers": o.layers, "num_attention_heads": o.heads, "attention_head_dim": HEAD_DIM}
    model = WanTransformer3DModel(**shape, ffn_dim=ffn_dim, text_dim=TEXT[1]).eval()
    models = {"diffusers": model, "with torch_rope": copy.deepcopy(model)}
    print(patch(models["with torch_rope"]))
    text, noise = torch.randn(1, *TEXT), torch.randn(1, CHANNELS, o.frames, o.height, o.width)
    videos, profiles = dict.fromkeys(models, noise), {name: [] for name in models}

    title = f"A Wan of {o.layers} layers and {o.heads} heads, {o.frames * o.height * o.width // 4} tokens, float32"
    print(f"\n{title}, with {torch.get_num_threads()} threads", flush=True)
    shares = [3 * t / (1 + 2 * t) for t in torch.linspace(1, 0, o.steps + 1).tolist()]  # of noise, shifted as in Wan
    for i in range(o.steps):
        for name, model in models.items():
            videos[name], parts = step(model, videos[name], text, *shares[i : i + 2])
            profiles[name].append(parts)
        seconds = sum(sum(found[-1].values()) for found in profiles.values()) / 1000
        print(f"  step {i + 1} of {o.steps}, in both models: {seconds:.1f} s", flush=True)
    parts = {name: {part: median(p[part] for p in steps) for part in PARTS} for name, steps in profiles.items()}
    for name, times in parts.items():
        share = 100 * times["rotation"] / sum(times.values())
        print(f"{name:15} rotates in {times['rotation']:.3g} ms of a step, {share:.2g} % of it (medians)")
    draw(parts, title, o.picture)
    print(f"Picture: {o.picture}")
    stock, ours = (video.view(torch.int32) for video in videos.values())
    if not torch.equal(stock, ours):
        sys.exit("The bits of the frames differ.")
    print(f"All {stock.numel()} numbers of the frames have the same bits.")


if __name__ == "__main__":
    main()
