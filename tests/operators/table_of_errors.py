"""Reads tables of errors: calls that are illegal, with the message of the error that each must raise."""

import re
from dataclasses import dataclass

import pytest
import torch
from cases import supported

import torch_rope

B, S, H, D, R = 2, 6, 3, 16, 8  # batch, seq, heads, head_dim, rotary_dim

# The tensors that each operator takes besides those of the angles. The x of rotate is called q here.
OWN = {
    "rotate": ["q"],
    "rotate_": ["q"],
    "rotate_qk": ["q", "k"],
    "rotate_qk_": ["q", "k"],
    "norm_rotate_qk": ["q", "k", "q_norm_weight", "k_norm_weight"],
    "rotate_into_cache_": ["q", "k", "v", "k_cache", "v_cache", "q_norm_weight", "k_norm_weight"],
}
# The groups of operators that a case can be for. Any other operator is a group of its own.
GROUPS = {
    "all": list(OWN),
    "qk": [op for op in OWN if "k" in OWN[op]],
    "norm": [op for op in OWN if "q_norm_weight" in OWN[op]],
    "in place": [op for op in OWN if op.endswith("_")],
    "cache": ["rotate_into_cache_"],
}


def arguments(op, device="cpu") -> dict:
    """Returns the arguments of a legal call with tables, by name. Each case changes some of them."""
    with torch.device(device):
        if op.endswith("cos_sin"):
            axes = [2] * ("axial" in op)
            return {"positions": torch.zeros(*axes, 3, dtype=torch.int64), "inv_freq": torch.ones(*axes, 4)}
        cos, sin = torch_rope.cos_sin(torch.arange(20), torch_rope.inv_freq(R))
        good = {"q": torch.randn(B, S, H, D), "k": torch.randn(B, S, 1, D), "v": torch.randn(B, S, 1, D)}
        good["k_cache"], good["v_cache"] = torch.randn(B, 2, 20, 1, D).unbind(1)
        good["q_norm_weight"], good["k_norm_weight"] = torch.rand(D), torch.rand(D)
        good["q_out_grad"], good["k_out_grad"] = torch.randn(B, S, H, D), torch.randn(B, S, 1, D)
    names = OWN.get(op) or ["q", "k", "q_out_grad", "k_out_grad", *["q_norm_weight", "k_norm_weight"] * ("norm" in op)]
    return {name: good[name] for name in names} | {"cos": cos, "sin": sin}


@dataclass
class Case:
    operators: str  # a key of GROUPS, or an operator
    error: type  # of the exception
    changes: str  # the keyword arguments that differ from the legal call, in Python
    message: str


def table(text: str) -> list:
    """Returns the cases of a table, as parameters of pytest.

    A line in brackets names the operators and the type of the error in the lines that follow. Each of these reads
    "changes -> message", and goes on in the next line if that is indented. The message may stop early. It may contain
    {q}, the name of the operator's first argument, and "...", which stands for anything.
    """
    cases, operators, error = [], "", ValueError
    for line in filter(None, re.sub(r"\n +", " ", text).split("\n")):
        if heading := re.fullmatch(r"\[(.*): (\w+)\]", line):
            operators, error = heading[1], {e.__name__: e for e in (ValueError, TypeError, IndexError)}[heading[2]]
        else:
            cases.append(Case(operators, error, *line.split(" -> ")))
    return [pytest.param(case, id=f"{case.operators}: {case.message[:70]}") for case in cases]


def changed(a, changes, device) -> dict:
    """Returns the arguments `a` after the changes. These may use the legal arguments and the names below."""

    def ones(*shape, dtype=torch.float32):
        return torch.ones(shape, dtype=dtype)

    with torch.device(device):
        names = a | {
            "ones": ones,
            "ints": lambda *shape: torch.zeros(shape, dtype=torch.int64),
            "values": torch.tensor,
            "both": lambda *shape: {"cos": ones(*shape), "sin": ones(*shape)},  # tables of this shape
            "freq": lambda *shape, **dtype: {"cos": None, "sin": None, "inv_freq": ones(*shape, **dtype)},
            "scales": {"k_scale": ones(1), "v_scale": ones()},
            "int8": {name: a[name].to(torch.int8) for name in ("k_cache", "v_cache") if name in a},
            "three_heads": {"k": ones(B, S, H, D), "k_cache": ones(B, 20, H, D).to(torch.int8)},
        }
        return a | eval(f"dict({changes})", globals() | names)


def calls(case, device):
    """Yields, for each operator of a case, the operator, its arguments by name, and a pattern of the message."""
    if not supported(device, torch.float64) and re.search("double|float64", case.changes):
        pytest.skip("Apple GPUs have no float64")
    for op in GROUPS.get(case.operators, [case.operators]):
        a = changed(arguments(op, device), case.changes, device)
        q = "q" if "k" in OWN.get(op, "k") else "x"
        if q == "x":
            a["x"] = a.pop("q")
        message = re.escape(f"rope.{op}: " + case.message.replace("{q}", q))
        yield getattr(torch.ops.rope, op), a, message.replace(r"\.\.\.", ".*")
