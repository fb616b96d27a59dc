"""Prints a digest of the results of many random calls of each operator.

A digest changes if any bit of a result changes. To check that a change of the code changes no result, build the tree
before it and the tree after it, and compare:

    PYTHONPATH=before python tests/tools/bits.py > before.txt
    PYTHONPATH=after python tests/tools/bits.py > after.txt
    diff before.txt after.txt

--each prints a line for each call, so that diff shows the first call that differs. --emulate runs the CUDA kernels on
the CPU emulator, and --simulate runs the Metal back end on the simulated device mps; both come from the tree that
PYTHONPATH names. Both are slow, so ask for fewer calls with --calls. ATEN_CPU_CAPABILITY=default and
ATEN_CPU_CAPABILITY=avx2 select the other kernels of the CPU.

The operators and their arguments come from the schemas. A new argument with a default keeps its default. A new argument
without a default is an error until this file makes values for it.
"""

import argparse
import hashlib
import importlib.util
import random
import sys
from pathlib import Path

import torch

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Draw(random.Random):
    """A random generator with functions that make the arguments of one call."""

    def __init__(self, seed: str, device: str):
        super().__init__(seed)
        torch.manual_seed(self.getrandbits(32))
        self.device = device
        self.plain = self.maybe()  # sizes and layouts are those of models

    def one(self, *options):
        return self.choice(options)

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random() < chance

    def lay_out(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the values on the device, in a random layout.

        The order of the dimensions in memory is random, some dimensions have gaps, and the storage offset may be above
        0.
        """
        if self.plain:
            return values.to(self.device).contiguous()
        dims = range(values.dim())
        order = self.sample(dims, len(dims)) if self.maybe() else list(dims)
        steps = [self.one(1, 1, 1, 2, 3) for _ in dims] if self.maybe() else [1] * len(dims)
        start = self.one(0, 0, 1, 4)
        shape = [values.shape[d] * steps[d] for d in order]
        memory = torch.zeros(start + torch.Size(shape).numel(), dtype=values.dtype, device=self.device)
        t = memory[start:].view(shape).permute([order.index(d) for d in dims])
        t = t[tuple(slice(step - 1, None, step) for step in steps)]
        return t.copy_(values)

    def normal(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return self.lay_out(torch.randn(shape, dtype=torch.float64).to(dtype))

    def integers(self, values: torch.Tensor) -> torch.Tensor:
        return self.lay_out(values.to(self.one(torch.int32, torch.int64)))

    def float_type(self) -> torch.dtype:
        return self.choice(FLOATS[: 3 if self.device == "mps" else 4])

    def wide_type(self) -> torch.dtype:
        return self.one(torch.float32, torch.float32 if self.device == "mps" else torch.float64)

    def frequencies(self, *shape: int) -> torch.Tensor:
        parts = self.one(0, 0, 0, 2)
        return self.normal(parts, *shape, dtype=torch.float32) if parts else self.normal(*shape, dtype=self.wide_type())


def arguments_of_tables(draw: Draw, op) -> dict:
    """Returns random arguments of an operator that makes tables."""
    pairs, shape = draw.randint(0, 20), [draw.randint(0, 5) for _ in range(draw.randint(0, 3))]
    axes = [draw.randint(0, 3)] if "axial" in op._schema.name else []
    integers = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
    positions = torch.randn((*axes, *shape)) * draw.one(1, 50)
    return {
        "positions": draw.lay_out(positions.abs().to(draw.one(*integers, *[draw.wide_type() for _ in integers]))),
        "inv_freq": draw.frequencies(*axes, pairs),
        "attention_factor": draw.one(1.0, 1.2079441541679836, -0.37),
        "dtype": draw.one(None, draw.float_type()),
    }


def arguments_of_rotation(draw: Draw, op) -> dict:
    """Returns random arguments of an operator that rotates, or of its backward."""
    names = [a.name for a in op._schema.arguments]
    cache, backward, dtype = "k_cache" in names, "q_out_grad" in names, draw.float_type()
    has_norm = "q_norm_weight" in names and not (cache and draw.maybe())
    batch, seq = draw.one(0, 1, 1, 2, 3), draw.one(0, 1, 1, 2, 5, 9, 40)
    q_heads, k_heads = draw.one(0, 1, 2, 3, 8, 9), draw.one(0, 1, 2, 3)
    pairs = draw.one(0, 1, 2, 3, 4, 8, 8, 16, 32, 33, 64, 128, 300)
    head_dim = 2 * pairs + draw.one(0, 0, 0, 1, 2, 8, 16)
    if draw.plain:
        batch, seq, q_heads, k_heads = draw.one(1, 1, 2, 3), draw.one(1, 1, 2, 5, 40), draw.one(1, 4, 9), draw.one(1, 2)
        pairs = draw.one(8, 16, 32, 64)
        head_dim = 2 * pairs + draw.one(0, 0, 16, 48)
    dims = draw.one(3, 4) if batch == 1 else 4
    kind = draw.one("position", "position", "token", "head", *([] if backward and not has_norm else ["inv_freq"]))
    by_token = kind in ("token", "head")
    k_heads = q_heads if kind == "head" else k_heads
    v_heads, v_dim = k_heads, head_dim

    def heads(n: int, channels: int = head_dim) -> torch.Tensor:
        return draw.normal(batch, seq, n, channels, dtype=dtype)

    q, k, v = heads(q_heads), heads(k_heads), heads(k_heads)
    if draw.maybe(0.25):
        q, k, v = heads(q_heads + 2 * k_heads).split([q_heads, k_heads, k_heads], 2)
    elif draw.maybe(0.4):
        v_heads, v_dim = draw.one(0, 1, 2, 5), draw.one(0, 1, 8, 13, 64, 512, 2 * head_dim, head_dim + 9)
        v = heads(v_heads, v_dim)
    call = {"q": q, "x": q, "k": k, "v": v, "q_out_grad": heads(q_heads), "k_out_grad": heads(k_heads)}
    call |= {name: t if dims == 4 else t[0] for name, t in call.items()}
    if backward and "q_norm_weight" not in names and draw.maybe(0.3):
        call["k"] = call["k_out_grad"] = None
    over_heads = head_dim and draw.maybe(0.3)
    of_weights = draw.one(dtype, torch.float32)
    for name, n in {"q_norm_weight": q_heads, "k_norm_weight": k_heads}.items() if has_norm else ():
        shape = (n, head_dim) if over_heads else (head_dim,)
        call[name] = draw.normal(*shape, dtype=of_weights if draw.plain else draw.one(dtype, torch.float32))
    call["norm_v"] = draw.maybe(0.3)
    rest = head_dim - 2 * pairs
    call["rotary_start"] = draw.one(0, rest if draw.plain else draw.randint(0, rest))
    call["eager_rounding"] = draw.maybe(0.3) and not (has_norm or cache and call["norm_v"])

    slots = draw.maybe()
    by_position = not by_token or (cache and not slots)  # positions select angles or cells
    call["offset"] = draw.one(0, 0, 1, 7) if by_position else 0
    rows = draw.one(seq + 20, 64)  # the number of rows of a table by position, and the number of cells of a block

    if kind == "inv_freq":
        call["inv_freq"] = draw.frequencies(pairs)
    else:
        shape = (draw.one(1, batch), seq, *[q_heads] * (kind == "head")) if by_token else (rows,)
        type_of_tables = draw.one(dtype, torch.float32)
        call["cos"], call["sin"] = (draw.normal(*shape, pairs, dtype=type_of_tables) for _ in "cs")
    if by_position and draw.maybe():
        low = -call["offset"]
        if kind == "inv_freq" and (slots or not cache):
            low = draw.one(-100, low, 10**5)
        # The positions of a sequence are all different, because without slots they select the cells of a cache.
        positions = low + torch.rand(draw.one(1, batch), rows).argsort(-1)[:, :seq]
        call["positions"] = draw.integers(positions[0] if len(positions) == 1 and draw.maybe() else positions)

    if cache:
        blocks, block_size = batch + draw.randint(0, 2), rows
        caches = {"k_cache": (blocks, block_size, k_heads, head_dim), "v_cache": (blocks, block_size, v_heads, v_dim)}
        for name, shape in (caches | {"q_out": call["q"].shape}).items():
            quantised = draw.one(torch.int8, *[torch.float8_e4m3fn, torch.float8_e5m2] * (draw.device != "mps"))
            quantised = quantised if draw.maybe(0.4) else dtype
            call[name] = draw.normal(*shape, dtype=quantised)
            if quantised != dtype:
                call[f"{name[0]}_scale"] = draw.normal(draw.one(1, shape[-2]), dtype=torch.float32).abs().add(0.01)
        if "q_scale" not in call and draw.maybe():
            del call["q_out"]
        alike = call["k_cache"].shape == call["v_cache"].shape and "k_scale" not in call and "v_scale" not in call
        if alike and draw.maybe(0.3):  # neighbours in memory
            dim = draw.one(1, -1)
            call["k_cache"], call["v_cache"] = torch.stack((call["k_cache"], call["v_cache"]), dim).unbind(dim)
        if blocks == 1 and dims == 3:
            call |= {name: call[name][0] for name in ("k_cache", "v_cache")}
        if slots:
            cells = torch.randperm(blocks * block_size)[: batch * seq].view(batch, seq)
            cells = draw.integers(torch.where(torch.rand(batch, seq) < 0.2, -1, cells))
            call["slots"] = cells[0] if batch == 1 and draw.maybe() else cells

    call["norm_eps"] = draw.one(1e-6, 1e-3)
    call["attention_factor"] = draw.one(1.0, 1.0, 1.2079441541679836, -0.37)
    call["interleaved"], call["inverse"] = draw.maybe(), draw.maybe()
    required = [a.name for a in op._schema.arguments if not a.has_default_value()]
    return {name: call[name] for name in names if name in call or name in required}


# ---- Derivatives ----


def tuple_of(outs) -> tuple:
    return outs if isinstance(outs, tuple) else () if outs is None else (outs,)


def derivatives(draw: Draw, op, call: dict):
    """Yields the results, and derivatives with respect to some arguments: backward or double backward."""
    names = [name for name, t in call.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if "q_norm_weight" in call or "q_out_grad" in call:
        names = [name for name in names if name not in ("cos", "sin", "inv_freq")]
    like = torch.randn_like
    inputs = [call[name].requires_grad_() for name in draw.sample(names, draw.randint(1, len(names)))]
    outs = tuple_of(op(**call))
    yield from outs
    outs = [out for out in outs if out.requires_grad]
    outs = outs[-1:] if draw.maybe(0.2) else outs
    twice = draw.maybe(0.3)
    given = [like(out).requires_grad_(twice) for out in outs]
    grads = torch.autograd.grad(outs, inputs, given, create_graph=twice, allow_unused=True)
    yield from grads
    again = [grad for grad in grads if grad is not None and grad.requires_grad]
    if again:
        yield from torch.autograd.grad(again, [*inputs, *given], [like(grad) for grad in again], allow_unused=True)


def results(draw: Draw, op, call: dict):
    """Yields everything that a call returns or writes."""
    if op._schema.is_mutable:
        with draw.one(torch.no_grad, torch.inference_mode)():
            op(**call)
        # All tensors are compared, because an operator must write only the tensors that its schema names.
        yield from (t for t in call.values() if isinstance(t, torch.Tensor))
    elif draw.maybe():
        with draw.one(torch.no_grad, torch.inference_mode)():
            yield from tuple_of(op(**call))
    else:
        yield from derivatives(draw, op, call)


def digest(tensors) -> str:
    all_of_them = hashlib.sha256()
    for t in tensors:
        if t is None:
            all_of_them.update(b"None")
            continue
        all_of_them.update(f"{t.dtype} {tuple(t.shape)} {t.stride()}".encode())
        values = t.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        all_of_them.update(values.view(torch.uint8).numpy().tobytes())
    return all_of_them.hexdigest()[:16]


# ---- The build ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="calls of each operator (default: %(default)s)")
    parser.add_argument("--each", action="store_true", help="print a line for each call")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--emulate", action="store_true", help="run the CUDA kernels on the CPU emulator")
    kind.add_argument("--simulate", action="store_true", help="run the Metal back end on the simulated device mps")
    arguments = parser.parse_args()
    tree = Path(importlib.util.find_spec("torch_rope").origin).parents[1]
    sys.path.insert(0, str(tree / "tests"))
    if arguments.emulate:
        from backends.cuda.emulator import emulator

        emulator.load(emulator.build())
    if arguments.simulate:
        from backends.metal.simulator import simulator

        simulator.load()
    import torch_rope  # noqa: F401  registers the operators

    device = "mps" if arguments.simulate else "cpu"
    for name in sorted(s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("rope::")):
        op, every = getattr(torch.ops.rope, name.removeprefix("rope::")).default, hashlib.sha256()
        rotates = "cos" in [a.name for a in op._schema.arguments]
        make = arguments_of_rotation if rotates else arguments_of_tables
        for i in range(arguments.calls):
            draw = Draw(f"{op} {i}", device)
            of_call = digest(results(draw, op, make(draw, op)))
            every.update(of_call.encode())
            if arguments.each:
                print(name, i, of_call, flush=True)
        print(f"{name:36}{every.hexdigest()[:32]}", flush=True)


if __name__ == "__main__":
    main()
