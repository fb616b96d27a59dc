"""Random arguments for rotary functions of every convention, among them those where sizes could be mistaken for one another."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor


class Sizes(NamedTuple):
    batch: int
    seq: int
    heads: int
    more: int = 0  # how many more heads k has


# One token, one head, as many tokens as heads, as many as the batch, and tables longer than a vector.
SIZES = [Sizes(2, 5, 3, 1), Sizes(2, 1, 3), Sizes(2, 5, 1, 1), Sizes(2, 3, 3), Sizes(3, 3, 2), Sizes(1, 70, 2, 1)]


class Sample:
    """Random arguments of some sizes and dtypes, the same each time."""

    def __init__(self, sizes: Sizes, pairs: int, more: int, layout: str, *dtypes: torch.dtype):
        self.sizes, self.pairs, self.head_dim = sizes, pairs, 2 * pairs + more
        self.layout = layout  # how x lies in memory: a key of LAYOUTS
        self.dtypes = dtypes  # of x and of the tables
        self.random = torch.Generator().manual_seed(0)

    def shape(self, dims: str, more: int = 0) -> list[int]:
        return [int(d) if d.isdigit() else getattr(self.sizes, d) + more * (d == "heads") for d in dims.split()]

    def x(self, dims: str, of_k: int = 0) -> Tensor:
        shape = [*self.shape(dims, of_k * self.sizes.more), self.head_dim]
        return LAYOUTS[self.layout](lambda *s: torch.randn(s, generator=self.random, dtype=torch.float64), shape).to(
            self.dtypes[0]
        )

    def angles(self, dims: str) -> tuple[Tensor, ...]:
        """Returns cos and sin of these dimensions, and of all pairs at last."""
        shape = 2, *self.shape(dims), self.pairs
        return torch.randn(shape, generator=self.random, dtype=torch.float64).to(self.dtypes[1]).unbind()


def _moved(random, shape):
    """The last dimensions but head_dim are exchanged in memory, as those of a projection that was transposed."""
    *before, a, b, d = shape
    return random(*before, b, a, d).transpose(-2, -3)


def _part(random, shape):
    """As q in the result of one projection of q, k and v."""
    return random(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]


LAYOUTS = {"dense": lambda random, shape: random(*shape), "moved": _moved, "part": _part}

# ---- forms of tables: what becomes of cos and sin [.., rotary_dim / 2] ----


def twice(*angles):
    return tuple(torch.cat([t, t], -1) for t in angles)


def adjacent(*angles):
    return tuple(t.repeat_interleave(2, -1) for t in angles)


def once(*angles):
    return angles


def complex_numbers(cos, sin):
    return (torch.complex(cos, sin),)


def matrices(c, s):
    return (torch.stack([c, -s, s, c], -1).unflatten(-1, (2, 2)),)


def angles_twice(a, _):
    return (torch.cat([a, a], -1),)


def half_read(cos, sin):
    """The channels that are not read hold something else."""
    return torch.stack([cos, -sin], -1).flatten(-2), torch.stack([-cos, sin], -1).flatten(-2)


def sin_first(form):
    return lambda *angles: form(*angles)[::-1]


def side_by_side(form):
    return lambda *angles: (torch.cat(form(*angles), -1),)


# ---- arguments ----


def taken(form, *shapes: str, tensors: int = 1, together: bool = False, options: Sequence = (), back=lambda x: x):
    """Returns a maker of arguments. Each shape is that of x without head_dim, and that of the tables without channels."""

    def make(s: Sample) -> Iterator[tuple]:
        if form is complex_numbers and s.dtypes[1].itemsize < 4:
            return  # complex numbers have parts of 32 bits or more
        for of_x, of_tables in (shape.split(":") for shape in shapes):
            tables = form(*s.angles(of_tables))
            xs = [back(s.x(of_x, i)) for i in range(tensors)]
            yield *xs, *((tables,) if together else tables), *options

    return make


def any_of(*makers):
    def make(s):
        for maker in makers:
            yield from maker(s)

    return make


UNSQUEEZED = {
    1: ["batch heads seq: batch seq", "batch heads seq: 1 seq", "heads seq: seq", "heads seq: heads"],
    2: ["batch seq heads: batch seq", "batch seq heads: 1 seq"],
    0: ["batch heads seq: seq", "batch heads seq: heads seq", "seq heads: heads"],
    -2: ["batch seq heads: batch seq", "batch seq heads: 1 seq", "seq heads: seq"],
}


def unsqueezed(form, tensors=2, ignored=0):
    """ignored: how many arguments before the dimension mean nothing, which look like positions."""
    options = {dim: [torch.tensor([[0]])] * ignored + [dim] for dim in UNSQUEEZED if dim >= 0}
    return any_of(*(taken(form, *UNSQUEEZED[dim], tensors=tensors, options=options[dim]) for dim in options))


def after_prefix(s):
    longer = s.sizes._replace(seq=s.sizes.seq + 2)
    tables = twice(*s.angles("seq"))
    s.sizes = longer
    yield s.x("batch heads seq"), s.x("batch heads seq", 1), *tables


def gathered(form, tensors=2, dim=None):
    """Tables [max_position, head_dim], and positions [batch, seq] after them."""

    def make(s):
        batch, seq, *_ = s.sizes
        for length, of_x in product((7, seq, s.sizes.heads, batch), ("batch heads seq", "batch seq heads")):
            if (dim or 1) != 1 + (of_x == "batch seq heads"):
                continue
            positions = torch.randint(length, (batch, seq), generator=s.random)
            angles = torch.randn(2, length, s.pairs, generator=s.random, dtype=torch.float64).to(s.dtypes[1])
            options = () if dim is None else (dim,)
            yield *(s.x(of_x, i) for i in range(tensors)), *form(*angles), positions, *options

    return make


PLAIN = [
    "batch heads seq: seq", "batch heads seq: 1 1 seq", "batch heads seq: batch 1 seq", "batch seq heads: 1 seq 1",
    "batch seq heads: batch seq 1", "batch seq heads: seq 1", "batch seq heads: batch seq heads", "seq heads: seq 1",
    "batch seq heads: seq heads", "heads seq: seq", "batch seq: 1 seq", "batch seq: batch seq",
]  # fmt: skip


def last_angles(s):
    seq = s.sizes.seq + 2
    yield s.x("batch seq heads"), *angles_twice(*s.angles(str(seq)))


def split(s):
    yield s.x("batch heads seq"), s.angles("batch heads seq")
    yield s.x("batch seq"), s.angles("batch seq")
    if s.head_dim == 2 * s.pairs:
        yield s.x("batch seq heads").flatten(2), s.angles("batch heads seq")


def by_position(s):
    batch, seq, *_ = s.sizes
    positions = (torch.arange(batch * seq) * 3 % 7).view(batch, seq)
    yield s.x("batch heads seq"), positions, *twice(*s.angles("7"))


def grid(s):
    if s.dtypes[1].itemsize >= 4 and s.head_dim == 2 * s.pairs:  # complex numbers have parts of 32 bits or more
        batch, seq, *_ = s.sizes
        for stride in (1, 2):
            sizes = torch.tensor([[1, 1, seq]] * batch if seq < 9 else [[5, 2, seq // 10]] * batch)
            yield s.x("batch seq heads"), sizes, torch.complex(*s.angles(str(seq + 5))), stride


THIRD, SECOND, SHARED = "batch heads seq: seq", "batch seq heads: seq", ["batch seq heads: 1 seq 1"]
FLUX = {
    (True, -1, 2): taken(adjacent, THIRD, together=True, options=(True, -1, 2)),
    (True, -2, 2): taken(twice, THIRD, together=True, options=(True, -2, 2)),
    (True, -1, 1): taken(adjacent, SECOND, together=True, options=(True, -1, 1)),
    (True, -2, 1): taken(twice, SECOND, together=True, options=(True, -2, 1)),
    (False, -1, 2): taken(complex_numbers, "batch seq heads: batch seq", options=(False, -1, 2)),
}
QWEN = {
    (True, -1): taken(adjacent, THIRD, together=True, options=(True, -1)),
    (True, -2): taken(twice, THIRD, together=True, options=(True, -2)),
    (False, -1): taken(complex_numbers, "batch seq heads: seq", options=(False, -1)),
}
OF_TIMM = ["batch heads seq: seq", "batch heads seq: heads seq", "batch heads seq: batch 1 seq"]
OF_TIMM += ["batch heads seq: batch heads seq", "batch seq: seq"]


def of_timm(change):
    forms = {False: adjacent, True: twice}
    return any_of(*(taken(change(form), *OF_TIMM, options=(half,)) for half, form in forms.items()))


# Makers of arguments for each convention of torch_rope.integrations._conventions
SAMPLES = {
    "llama": unsqueezed(twice),
    "glm": unsqueezed(twice),
    "cohere": unsqueezed(adjacent),
    "gpt_oss": unsqueezed(once),
    "openai_privacy_filter": unsqueezed(once),
    "nanochat": unsqueezed(twice),
    "mistral_large4": unsqueezed(twice),
    "deepseek_v3": unsqueezed(twice, ignored=1),
    "glmasr": unsqueezed(twice, ignored=1),
    "gemma4": unsqueezed(twice, 1),
    "deepseek_v4": unsqueezed(once, 1),
    "dinov3": after_prefix,
    "qwen2_vl": taken(twice, *UNSQUEEZED[-2], tensors=2),
    "minimax_m3_vl": taken(twice, "seq heads: seq", "heads seq: heads", tensors=2),
    "inkling2": taken(adjacent, *UNSQUEEZED[-2], tensors=2),
    "sam3": taken(adjacent, *PLAIN, tensors=2),
    "gptj": taken(sin_first(once), *UNSQUEEZED[2]),
    "deepseek_v2": taken(complex_numbers, *UNSQUEEZED[1][:2], tensors=2),
    "llama4": taken(complex_numbers, *UNSQUEEZED[2], tensors=2),
    "llama4 images": taken(complex_numbers, "batch seq heads: seq 1", tensors=2),
    "plain": taken(twice, *PLAIN, tensors=2),
    "plain, one": taken(twice, *PLAIN),
    "plain, together": taken(twice, *PLAIN, together=True),
    "gathered": any_of(gathered(twice, dim=1), gathered(twice, dim=2)),
    "gathered, deepseek_v3": any_of(gathered(twice, dim=1), gathered(twice, dim=2)),
    "glm, ignored": unsqueezed(twice, ignored=1),
    "cohere, ignored": unsqueezed(adjacent, ignored=1),
    "gathered, dim 1": gathered(twice),
    "flux": any_of(*FLUX.values()),
    "qwen_image": any_of(*QWEN.values()),
    "anima": any_of(*(taken(twice, *UNSQUEEZED[dim], options=(dim,)) for dim in (1, 2))),
    "z_image": taken(complex_numbers, *UNSQUEEZED[2]),
    "anyflow": taken(complex_numbers, *SHARED, "batch seq heads: batch seq 1"),
    "sana_wm": taken(complex_numbers, "batch heads seq: 1 1 seq", back=lambda x: x.transpose(2, 3)),
    "prx": taken(matrices, "batch heads seq: batch 1 seq", "batch seq heads: seq 1"),
    "hidream": taken(matrices, "batch seq heads: batch seq 1", tensors=2),
    "ernie": taken(angles_twice, "batch seq heads: batch seq 1"),
    "stable_audio3": last_angles,
    "helios": taken(side_by_side(half_read), "batch seq heads: batch seq"),
    "ltx": taken(adjacent, "batch seq: batch seq", "batch seq: 1 seq", together=True),
    "ltx2": split,
    "longcat": taken(twice, SECOND, together=True),
    "minimax_music": taken(twice, "seq heads: seq", together=True),
    "joyimage": taken(adjacent, SECOND, tensors=2, together=True),
    "joyimage_edit": taken(adjacent, "batch seq heads: batch seq", tensors=2, together=True),
    "wan": taken(half_read, *SHARED),
    "mochi": taken(once, "batch seq heads: seq heads", "batch seq heads: seq 1"),
    "minimax_h3": taken(twice, SECOND),
    "allegro": by_position,
    "wan_animate2": grid,
    "timm": of_timm(sin_first),
    "timm, one table": of_timm(lambda form: side_by_side(sin_first(form))),
}
