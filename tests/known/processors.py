"""Prints the entries of torch_rope/integrations/diffusers/known_layers.py for the release of diffusers that is installed.

    python tests/known/processors.py          # the RMS norms, and the processors that rotate
    python tests/known/processors.py --check  # compares each form with the processors' own methods in tiny models

A class whose text is not in the table gets no entry: somebody must read it, and compare it with a form.
"""

import importlib
import inspect
import itertools
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

import diffusers
import torch
from diffusers import models
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path[:0] = [str(Path(__file__).parents[1] / path) for path in (".", "exhaustive/models")]

from torch_rope.integrations._text import NoText, text_of  # noqa: E402
from torch_rope.integrations.diffusers import LIBRARY, fuse, patch  # noqa: E402
from torch_rope.integrations.diffusers.known_layers import NORMS, PROCESSORS  # noqa: E402

# ---- texts ----


def classes() -> Iterator[type]:
    """Yields torch's RMS norm, and the RMS norms and processors of diffusers."""
    yield torch.nn.RMSNorm
    for found in pkgutil.walk_packages(models.__path__, "diffusers.models."):
        if (
            re.search("[.]transformers[.]|controlnet_[a-z_]+$|norm|attention_processor", found.name)
            and "flax" not in found.name
        ):
            module = importlib.import_module(found.name)
            for name, kind in vars(module).items():
                if getattr(kind, "__module__", "") == found.name and ("Processor" in name or name.endswith("RMSNorm")):
                    yield kind


def entries() -> Iterator[str]:
    """Yields what the table would say of each text, and why there is no entry."""
    of_texts = defaultdict(list)
    for kind in classes():
        function: Any = getattr(kind, "__call__" if "Processor" in kind.__name__ else "forward", None)
        if not isinstance(function, FunctionType):
            continue
        roles = {name for name in function.__globals__ if LIBRARY.rotary.search(name)} | {"dispatch_attention_fn"}
        try:
            text = text_of(function, roles, kind)
        except NoText as error:
            text = f"there is no text: {error}"
        if (
            text in PROCESSORS
            or text in NORMS
            or any(word in inspect.getsource(function) for word in ("rot", "RMS", "rms"))
        ):
            of_texts[text].append(kind.__name__)
    for text, names in of_texts.items():
        entry = NORMS.get(text) or PROCESSORS.get(text)
        of = ", ".join(dict.fromkeys(names))
        yield f'"{text}": {entry},  # {of}: {diffusers.__version__}' if entry else f"# {of}: no entry ({text})"


# The models whose processors call no function that rotates.
REFUSED = {"Cosmos3OmniTransformer", "Ideogram4Transformer2DModel"}

# ---- forms and the processors' own methods ----


class Call(NamedTuple):
    """A call of a form in a model, and the processor's own method."""

    form: Callable
    own: Callable
    args: tuple  # layer, processor, attn, x and others
    kwargs: dict
    more: dict  # the arguments that are only the form's

    def given(self, name: str) -> Any:
        return inspect.signature(self.own).bind(*self.args[1:], **self.kwargs).arguments.get(name)

    def sizes(self) -> tuple[int, int]:
        """Returns how many tokens x and the text have."""
        text = self.given("encoder_hidden_states")
        return self.args[3].shape[1], 0 if text is None else text.shape[1]

    def masked(self) -> "Call":
        """Returns a call in which all but the first token are masked, if it has no mask and may have one."""
        if self.given("attention_mask") is not None or "encoder_hidden_states_mask" in self.kwargs:
            return self
        mask = torch.zeros(1, 1, 1, sum(self.sizes()), dtype=torch.bool)
        mask[..., 0] = True
        bound = inspect.signature(self.own).bind(*self.args[1:], **self.kwargs)
        bound.arguments["attention_mask"] = mask
        return self._replace(args=(self.args[0], *bound.args), kwargs=bound.kwargs)

    def part(self, batch: int, image: int, text: int) -> "Call":
        """Returns a call with fewer sequences and tokens."""
        old = self.sizes()
        new = {sum(old): image + (text if old[1] else 0), old[1]: text, old[0]: image}

        def small(t: Tensor) -> Tensor:
            is_mask = t.dtype in (torch.bool, torch.long)
            first = slice(batch if t.dim() > 2 or is_mask else new.get(len(t)))
            others = t.shape[1:] if is_mask else t.shape[1:-1]  # the last dimension of others is no number of tokens
            return t[(first, *(slice(new.get(n)) for n in others))].clone()

        args, kwargs = tree_map_only(Tensor, small, (self.args[3:], self.kwargs))
        return self._replace(args=(*self.args[:3], *args), kwargs=kwargs)

    def outcome(self, fused: bool, trains: bool) -> tuple[list, list, list]:
        """Returns the q, k and v that attention is given, the results, and the gradients."""
        given, layer, attn = [], self.args[0], self.args[2]
        dispatch = layer.own.__globals__["dispatch_attention_fn"]

        def witness(q, k, v, *args, **kwargs):
            given.extend((q.detach(), k.detach(), v.detach()))
            return dispatch(q, k, v, *args, **kwargs)

        leaves = [self.args[3].requires_grad_(trains), *(p for p in attn.parameters() if trains)]
        names = {"dispatch_attention_fn": witness}
        with mock.patch.dict(layer.own.__globals__, names), torch.set_grad_enabled(trains):
            function, args, more = (self.form, self.args, self.more) if fused else (self.own, self.args[1:], {})
            results = [t for t in tree_leaves(function(*args, **self.kwargs, **more)) if t is not None]
        if not trains:
            return given, results, []
        torch.manual_seed(0)
        gradients = torch.autograd.grad(results, leaves, [torch.randn_like(t) for t in results], allow_unused=True)
        return given, [t.detach() for t in results], [g for g in gradients if g is not None]


def calls(model: torch.nn.Module, inputs: dict) -> list[Call]:
    """Returns a call of each kind that a forward of a fused model makes."""
    found: dict[tuple, Call] = {}

    def recording(form: Callable) -> Callable:
        def call(layer, processor, attn, *args, **kwargs):
            own: Any = type(processor).__mro__[1].__call__
            more = {n: kwargs.pop(n) for n in [*kwargs] if n not in inspect.signature(own).parameters}
            kept = Call(form, own, (layer, processor, attn, *args), kwargs, more)
            result = form(layer, processor, attn, *args, **kwargs, **more)
            found.setdefault((own, kept.sizes(), len(attn._modules)), kept)
            return result

        return call

    with mock.patch.dict(fuse.FORMS, {name: recording(form) for name, form in fuse.FORMS.items()}), torch.no_grad():
        model(**inputs)
    return [*found.values()]


def compare(call: Call, sizes: tuple[int, int, int]) -> tuple[int, int, float, float]:
    """Returns how many elements of q and k there are, how many differ, and the largest differences of results and gradients.

    Asserts that an element differs by one rounding.
    """
    elements = differing = 0
    largest = [0.0, 0.0]
    for trains in (False, True):
        small = call.part(*sizes)
        small = small.masked() if sizes[0] > 1 else small
        (ours, *actual), (theirs, *expected) = (small.outcome(fused, trains) for fused in (True, False))
        for a, e in zip(ours, theirs, strict=True):
            a, e = a.double(), e.double()
            one_rounding = 2 * torch.finfo(ours[0].dtype).eps * e.abs().amax(-1, keepdim=True)
            assert ((a - e).abs() <= one_rounding).all() or ours[0].dtype == torch.float32
            elements, differing = elements + a.numel(), differing + int((a != e).sum())
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            for x, y in zip(a, e, strict=True):
                scale = max(t.abs().max().item() for t in e) if e else 1.0
                largest[i] = max(largest[i], (x.double() - y.double()).abs().max().item() / scale)
    return elements, differing, *largest


def check(model: torch.nn.Module, inputs: dict) -> Iterator[tuple]:
    """Yields the class of each processor that a model fuses, numbers of sequences, tokens of x and of the text, and what
    compare returns. Among them are as many tokens as heads, and as many of the text as of the image."""
    with patch(model, fuse=True) as patched:
        for call in calls(model, inputs) if "; fused: " in str(patched) else ():
            heads, (image, text) = getattr(call.args[2], "heads", 1), call.sizes()
            few = min(image, text) or image
            for batch, size in itertools.product((1, 2), ((image, text), (few, few), (heads - 1, 1), (heads, heads))):
                yield type(call.args[1]).__name__, (batch, *size), *compare(call, (batch, *size))


def main() -> None:
    print(*entries(), sep="\n")
    if "--check" in sys.argv:
        from diffusion_models import MODELS, TABLES
        from training import cast

        for name, dtype in itertools.product(MODELS, (torch.float32, torch.bfloat16)):
            model, inputs = MODELS[name]()
            inputs |= cast({n: value for n, value in inputs.items() if n not in TABLES}, dtype)
            for line in check(model.to(dtype), inputs) if name not in REFUSED else ():
                print(name, dtype, *line)


if __name__ == "__main__":
    main()
