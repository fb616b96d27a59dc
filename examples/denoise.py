"""Denoises a small video with and without torch_rope, and compares the frames and the time of a step.

    pip install diffusers matplotlib
    python examples/denoise.py --steps 8

The model is diffusers' WanTransformer3DModel with the proportions of Wan 2.1 1.3B, but with fewer layers and heads. Its
weights are random, so the video shows only clouds of colour, and this program downloads nothing. Two copies of the
model, one of them patched by torch_rope, take turns in denoising the same latents. Each step is made twice: once to
measure its time, and once with the profiler of torch, which measures its parts. The frames of both copies, the bits
that differ and the parts of a step are drawn into a picture. The exit status is 1 if one bit of a frame differs.
"""

import argparse
import copy
import os
import sys
import time
from pathlib import Path
from statistics import median

os.environ["KINETO_LOG_LEVEL"] = "6"  # hides messages of torch's profiler, which reads it at import

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import matplotlib
    from diffusers import WanTransformer3DModel
except ImportError as error:
    sys.exit(f"{error}. This example needs: pip install diffusers matplotlib")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

from torch_rope.integrations.diffusers import patch  # noqa: E402

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


def build(layers: int, heads: int, dtype: torch.dtype) -> WanTransformer3DModel:
    ffn_dim = 8960 * heads // 12  # Wan 2.1 1.3B has 12 heads and 8960 channels in its feed-forward network
    model = WanTransformer3DModel(
        num_layers=layers, num_attention_heads=heads, attention_head_dim=HEAD_DIM, ffn_dim=ffn_dim, text_dim=TEXT[1]
    )
    for name, weight in model.named_parameters():
        if not any(part in name for part in model._keep_in_fp32_modules):  # from_pretrained keeps them too
            weight.data = weight.data.to(dtype)
    return model.eval()


@torch.no_grad()
def denoise(model: WanTransformer3DModel, latents: Tensor, text: Tensor, noise: float, less: float) -> Tensor:
    """Makes one step of Euler's method, from one share of noise to a smaller one."""
    velocity = model(latents.to(text.dtype), torch.tensor([1000 * noise]), text, return_dict=False)[0]
    return latents + (less - noise) * velocity.float()


def profile(*step) -> dict[str, float]:
    """Returns the milliseconds of each part of a step. What an operator calls belongs to the part of that operator.

    Without torch_rope the rotation is many operators. They are those on tensors of [batch, tokens, heads, 64], because
    nothing else takes half of the channels of a head.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        denoise(*step)
    parts = dict.fromkeys(PARTS, 0.0)
    for event in profiler.events():
        if event.cpu_parent is None:
            shape = event.input_shapes[0] if event.input_shapes else []
            half = len(shape) == 4 and shape[-1] == HEAD_DIM // 2
            found = [part for part, (operators, _) in PARTS.items() if event.name.startswith(operators)]
            parts["rotation" if half else (found or ["other"])[0]] += event.cpu_time_total / 1000
    return parts


def colours(latents: Tensor) -> Tensor:
    """Shows latents [1, channels, frames, height, width] as [frames, height, width, RGB], by a fixed linear map."""
    weight = torch.randn(3, CHANNELS, generator=torch.Generator().manual_seed(1))
    rgb = torch.einsum("rc,cfhw->fhwr", weight, latents[0])
    return torch.sigmoid((rgb - rgb.mean((0, 1, 2))) / rgb.std((0, 1, 2)))


def draw(videos: dict[str, Tensor], parts: dict[str, dict[str, float]], title: str, file: Path) -> None:
    """Draws some frames of both videos, where they differ, and the times of the parts of a step."""
    stock, ours = (latents.view(torch.int32) for latents in videos.values())
    rows = {name: colours(F.avg_pool3d(latents, (1, 2, 2))) for name, latents in videos.items()}
    rows["bits that differ"] = (stock != ours)[0].any(0)[..., None] * torch.tensor([0.9, 0.3, 0.2])  # black if equal
    shown = torch.linspace(0, stock.shape[2] - 1, min(stock.shape[2], 5)).round().long()
    figure = pyplot.figure(figsize=(10, 6.2), layout="constrained")
    figure.suptitle(title)
    above, below = figure.subfigures(2, 1, height_ratios=[5, 4])
    for axes_of_row, (name, frames) in zip(above.subplots(3, len(shown), squeeze=False), rows.items(), strict=True):
        axes_of_row[0].set_ylabel(name, rotation=0, ha="right", va="center", labelpad=8)
        for axes, frame in zip(axes_of_row, frames[shown], strict=True):
            axes.imshow(frame, interpolation="bicubic" if name in videos else "nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)

    whole, rotation = below.subplots(1, 2, width_ratios=[3, 1])
    left = dict.fromkeys(parts, 0.0)
    for part, (_, colour) in PARTS.items():
        times = [parts[name][part] for name in parts]
        whole.barh(list(parts), times, left=list(left.values()), color=colour, label=part)
        left = {name: left[name] + parts[name][part] for name in parts}
    bars = rotation.barh(list(parts), [parts[name]["rotation"] for name in parts], color=PARTS["rotation"][1])
    rotation.bar_label(bars, [f"{parts[name]['rotation']:.3g} ms" for name in parts], padding=4)
    rotation.set(title="The rotation alone", xlabel="milliseconds", yticks=[])
    rotation.margins(x=0.35)
    whole.set(title="Where the time of a step goes", xlabel="milliseconds")
    below.legend(*whole.get_legend_handles_labels(), loc="outside lower center", ncols=len(PARTS), frameon=False)
    for axes in (whole, rotation):
        axes.invert_yaxis()
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 4, "heads": 6, "frames": 5, "height": 30, "width": 52, "steps": 8}
    for name, default in sizes.items():
        of = "of the latents " if name in ("frames", "height", "width") else ""
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{of}(default: %(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(default: %(default)s)")
    picture = ROOT / "build" / "denoise.png"
    parser.add_argument("--picture", type=Path, default=picture, help="file of the picture (default: %(default)s)")
    options = parser.parse_args()
    if min(vars(options)[name] for name in sizes) < 1 or options.height % 2 or options.width % 2:
        parser.error("sizes must be at least 1, and --height and --width must be even")

    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    model = build(options.layers, options.heads, dtype)
    models = {"diffusers": model, "with torch_rope": copy.deepcopy(model)}
    print(patch(models["with torch_rope"]))
    text = torch.randn(1, *TEXT).to(dtype)
    # Smooth noise that changes slowly becomes a video that the eye can compare.
    coarse = torch.randn(CHANNELS, options.frames + 3, 5, 8).unfold(1, 4, 1).mean(-1) * 2
    smooth = F.interpolate(coarse, (options.height, options.width), mode="bicubic")[None]
    videos, seconds, profiles = dict.fromkeys(models, smooth), {}, {}
    shares = torch.linspace(1, 0, options.steps + 1)
    shares = (3 * shares / (1 + 2 * shares)).tolist()  # Wan's pipelines shift the shares of noise by 3
    for noise, less in zip(shares, shares[1:], strict=False):
        for name, model in models.items():
            step, start = (model, videos[name], text, noise, less), time.perf_counter()
            videos[name] = denoise(*step)
            seconds.setdefault(name, []).append(time.perf_counter() - start)
            profiles.setdefault(name, []).append(profile(*step))
    parts = {name: {part: median(p[part] for p in runs) for part in PARTS} for name, runs in profiles.items()}

    tokens = options.frames * options.height * options.width // 4
    title = f"A Wan of {options.layers} layers and {options.heads} heads denoises {tokens} tokens in {options.dtype}"
    draw(videos, parts, title, options.picture)
    print(f"\n{title}, in {options.steps} steps with {torch.get_num_threads()} threads.")
    print(f"{'':20} {'step':>12} {'rotation':>12} {'share':>9}")
    for name in models:
        rotation, whole = parts[name]["rotation"], sum(parts[name].values())
        print(f"{name:20} {1000 * median(seconds[name]):9.4g} ms {rotation:9.3g} ms {100 * rotation / whole:7.2f} %")
    print("Times are medians of the steps. The rotation and its share in all operators are from the profiler of torch.")
    stock, ours = videos.values()
    print(f"Largest difference of the frames: {float((stock - ours).abs().max()):.1e}")
    print(f"Picture: {options.picture}")
    if not torch.equal(stock.view(torch.int32), ours.view(torch.int32)):
        sys.exit("The bits of the frames differ.")
    print(f"All {stock.numel()} numbers of the frames have the same bits.")


if __name__ == "__main__":
    main()
