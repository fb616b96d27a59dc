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

The operators come from the schemas, and their calls from tests/calls.py of the tree of this file.
"""

import argparse
import hashlib
import importlib.util
import random
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def tuple_of(outs) -> tuple:
    return outs if isinstance(outs, tuple) else () if outs is None else (outs,)


def derivatives(pick: random.Random, op, call: dict):
    """Yields the results, and derivatives with respect to some arguments: backward or double backward."""
    names = [name for name, t in call.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if "q_norm_weight" in call or "q_out_grad" in call:
        names = [name for name in names if name not in ("cos", "sin", "inv_freq")]
    like = torch.randn_like
    inputs = [call[name].requires_grad_() for name in pick.sample(names, pick.randint(1, len(names)))]
    outs = tuple_of(op(**call))
    yield from outs
    outs = [out for out in outs if out.requires_grad]
    outs = outs[-1:] if pick.random() < 0.2 else outs
    twice = pick.random() < 0.3
    given = [like(out).requires_grad_(twice) for out in outs]
    grads = torch.autograd.grad(outs, inputs, given, create_graph=twice, allow_unused=True)
    yield from grads
    again = [grad for grad in grads if grad is not None and grad.requires_grad]
    if again:
        yield from torch.autograd.grad(again, [*inputs, *given], [like(grad) for grad in again], allow_unused=True)


def results(pick: random.Random, op, call: dict):
    """Yields everything that a call returns or writes."""
    if op._schema.is_mutable:
        with pick.choice((torch.no_grad, torch.inference_mode))():
            op(**call)
        # All tensors are compared, because an operator must write only the tensors that its schema names.
        yield from (t for t in call.values() if isinstance(t, torch.Tensor))
    elif pick.random() < 0.5:
        with pick.choice((torch.no_grad, torch.inference_mode))():
            yield from tuple_of(op(**call))
    else:
        yield from derivatives(pick, op, call)


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
    import torch_rope.selfcheck

    torch_rope.selfcheck.__path__ = [str(ROOT / "torch_rope/selfcheck")]  # whose calls.py those of the tests extend
    sys.path.insert(0, str(ROOT / "tests"))
    import calls

    device = "mps" if arguments.simulate else "cpu"
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("rope::")}
    for name in sorted(names):
        op, every = getattr(torch.ops.rope, name.removeprefix("rope::")).default, hashlib.sha256()
        for i in range(arguments.calls):
            pick = random.Random(f"{op} {i}")
            torch.manual_seed(pick.getrandbits(32))
            size = calls.any_size(pick) if i % 2 else {}
            call = calls.make(name[6:], device, **calls.describe(name[6:], pick, device, **size))
            of_call = digest(results(pick, op, call))
            every.update(of_call.encode())
            if arguments.each:
                print(name, i, of_call, flush=True)
        print(f"{name:36}{every.hexdigest()[:32]}", flush=True)


if __name__ == "__main__":
    main()
