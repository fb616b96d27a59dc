"""Denoises a small video with and without torch_rope, and shows where the time of a step goes.

    pip install diffusers matplotlib
    python examples/denoise.py

The model is diffusers' WanTransformer3DModel with the proportions of Wan 2.1 1.3B, but with fewer layers and heads. Its
weights are random, so the video shows only clouds of colour, and this program downloads nothing. Two copies of the
model, one of them patched by torch_rope, take turns in denoising the same latents, while the profiler of torch measures
the parts of each step. Frames and times are drawn into a picture. The exit status is 1 if a bit of a frame differs.
"""

import argparse
import copy
import os
import sys
from pathlib import Path
from statistics import median

os.environ["KINETO_LOG_LEVEL"] = "6"  # hides messages of torch's profiler, which reads it at import

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
def denoise(model: nn.Module, latents: Tensor, text: Tensor, noise: float, less: float) -> Tensor:
    """Makes one step of Euler's method, from one share of noise to a smaller one."""
    return latents + (less - noise) * model(latents, torch.tensor([1000 * noise]), text, return_dict=False)[0]


def profile(*step) -> tuple[Tensor, dict[str, float]]:
    """Makes a step. Returns the latents and the milliseconds of each part, including what its operators call.

    Without torch_rope the rotation is many operators. They are those on tensors of [batch, tokens, heads, 64], because
    nothing else takes half of the channels of a head.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        latents = denoise(*step)
    parts = dict.fromkeys(PARTS, 0.0)
    for event in profiler.events():
        if event.cpu_parent is None:
            shape = event.input_shapes[0] if event.input_shapes else []
            half = len(shape) == 4 and shape[-1] == HEAD_DIM // 2
            found = [part for part, (operators, _) in PARTS.items() if event.name.startswith(operators)]
            parts["rotation" if half else (found or ["other"])[0]] += event.cpu_time_total / 1000
    return latents, parts


def draw(videos: dict[str, Tensor], parts: dict[str, dict[str, float]], title: str, file: Path) -> None:
    """Draws the frames of both videos, with colours from a fixed linear map of the channels, and the parts of a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    figure.suptitle(title)
    above, below = figure.subfigures(2, 1, height_ratios=[4, 3])
    to_rgb = torch.randn(3, CHANNELS, generator=torch.Generator().manual_seed(1))
    rows = above.subplots(2, videos["diffusers"].shape[2], squeeze=False)
    for row, (name, latents) in zip(rows, videos.items(), strict=True):
        rgb = torch.einsum("rc,cfhw->fhwr", to_rgb, F.avg_pool3d(latents, (1, 2, 2))[0])
        row[0].set_ylabel(name)
        for axes, frame in zip(row, torch.sigmoid((rgb - rgb.mean((0, 1, 2))) / rgb.std((0, 1, 2))), strict=True):
            axes.imshow(frame, interpolation="bicubic")
            axes.set(xticks=[], yticks=[])
    axes, left = below.subplots(), torch.zeros(2)
    for part, (_, colour) in PARTS.items():
        times = torch.tensor([parts[name][part] for name in parts])
        axes.barh(list(parts), times, left=left, color=colour, label=part)
        left = left + times
    axes.set(title="Where the time of a step goes", xlabel="milliseconds")
    axes.invert_yaxis()
    below.legend(loc="outside lower center", ncols=len(PARTS), frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"layers": 4, "heads": 6, "frames": 5, "height": 30, "width": 52, "steps": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    picture = ROOT / "build" / "denoise.png"
    parser.add_argument("--picture", type=Path, default=picture, help="file of the picture (default: %(default)s)")
    options = parser.parse_args()

    print("Importing diffusers and making the models, some 15 seconds ...", flush=True)
    try:
        import matplotlib  # noqa: F401
        from diffusers import WanTransformer3DModel
    except ImportError as error:
        sys.exit(f"{error}. This example needs: pip install diffusers matplotlib")
    torch.manual_seed(0)
    ffn_dim = 8960 * options.heads // 12  # Wan 2.1 1.3B has 12 heads and 8960 channels in its feed-forward network
    shape = {"num_layers": options.layers, "num_attention_heads": options.heads, "attention_head_dim": HEAD_DIM}
    model = WanTransformer3DModel(**shape, ffn_dim=ffn_dim, text_dim=TEXT[1]).eval()
    models = {"diffusers": model, "with torch_rope": copy.deepcopy(model)}
    print(patch(models["with torch_rope"]))
    text = torch.randn(1, *TEXT)
    # Smooth noise that changes slowly becomes a video that the eye can compare.
    coarse = torch.randn(CHANNELS, options.frames + 3, 5, 8).unfold(1, 4, 1).mean(-1) * 2
    smooth = F.interpolate(coarse, (options.height, options.width), mode="bicubic")[None]
    videos, profiles = dict.fromkeys(models, smooth), {name: [] for name in models}

    tokens = options.frames * options.height * options.width // 4
    title = f"A Wan of {options.layers} layers and {options.heads} heads denoises {tokens} tokens in float32"
    print(f"\n{title}, with {torch.get_num_threads()} threads", flush=True)
    shares = torch.linspace(1, 0, options.steps + 1)
    shares = (3 * shares / (1 + 2 * shares)).tolist()  # Wan's pipelines shift the shares of noise by 3
    for step in range(options.steps):
        for name, model in models.items():
            videos[name], parts = profile(model, videos[name], text, *shares[step : step + 2])
            profiles[name].append(parts)
        seconds = ", ".join(f"{name} {sum(profiles[name][-1].values()) / 1000:.2f} s" for name in models)
        print(f"  step {step + 1} of {options.steps}: {seconds}", flush=True)
    parts = {name: {part: median(p[part] for p in steps) for part in PARTS} for name, steps in profiles.items()}
    draw(videos, parts, title, options.picture)
    for name, times in parts.items():
        share = 100 * times["rotation"] / sum(times.values())
        print(f"{name:15} rotates in {times['rotation']:.3g} ms of a step, {share:.2g} % of it (medians)")
    print(f"Picture: {options.picture}")
    stock, ours = (latents.view(torch.int32) for latents in videos.values())
    if not torch.equal(stock, ours):
        sys.exit("The bits of the frames differ.")
    print(f"All {stock.numel()} numbers of the frames have the same bits.")


if __name__ == "__main__":
    main()
