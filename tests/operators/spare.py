"""A device without kernels: its tensors wrap tensors of the CPU, on which torch's operators run. test_devices.py
runs this file as a program, because a device is registered for the whole process."""

import copy
import random

import torch
from calls import describe, make
from cases import OPERATORS, written_by
from programs import tensors_of
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("spare")


class Spare(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        place = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "device": "spare:0"}
        spare = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, **place)
        spare.inner = inner
        return spare

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op.namespace == "rope":  # the kernel that a device of its own has
            return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs or {})
        inner = tree_map_only(Spare, lambda t: t.inner, (args, kwargs or {}))
        inner = tree_map_only(torch.device, lambda _: torch.device("cpu"), inner)
        outs = op(*inner[0], **inner[1])
        return args[0] if op._schema.name.endswith("_") else tree_map_only(torch.Tensor, Spare, outs)


library = torch.library.Library("aten", "IMPL")
for name in ("empty_strided", "empty.memory_format"):  # they make tensors of no other tensor

    def empty(*sizes, dtype=None, name=name, **_):
        return Spare(getattr(torch, name.split(".")[0])(*sizes, dtype=dtype))

    library.impl(name, empty, "PrivateUse1")


def results(op: str, call: dict, differentiate: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the results of a call and what it writes, and its gradients."""
    call = {name: t.detach() if isinstance(t, torch.Tensor) else t for name, t in call.items()}
    tensors = [t for t in call.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    leaves = [t.requires_grad_() for t in tensors if differentiate]
    outs = tensors_of(getattr(torch.ops.rope, op)(**call))
    given = [type(out)(torch.ones(out.shape, dtype=out.dtype).cumsum(-1)) for out in outs] if leaves else []
    gradients = torch.autograd.grad(outs, leaves, given) if leaves else []
    return [*outs, *(call[name] for name in written_by(op) if name in call)], list(gradients)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts that two results differ by a rounding: of an element that is stored, or of large terms of it.

    The definition computes angles in float64, which rounds them by up to 1e-9.
    """
    assert found.device.type == "spare" and found.dtype == expected.dtype
    is_int, is_quantised = not expected.is_floating_point(), expected.dtype.itemsize == 1
    info = torch.iinfo(expected.dtype) if is_int else torch.finfo(expected.dtype)
    largest = expected.double().nan_to_num().abs().max().item() if expected.numel() else 0.0
    least = 1.0 if is_int else info.smallest_normal * info.eps if is_quantised else max(64 * info.eps, 1e-9) * largest
    close = {"rtol": 0 if is_int else 1.01 * info.eps, "atol": least, "equal_nan": True}
    torch.testing.assert_close(found.inner.detach().double(), expected.detach().double(), **close)


if __name__ == "__main__":
    for number in range(6):
        for op in OPERATORS:
            torch.manual_seed(number)
            call = make(op, **describe(op, random.Random(number)))
            there = tree_map_only(torch.Tensor, Spare, copy.deepcopy(call))
            if "q_out" in call and call["q_out"] is call["q"]:
                there["q_out"] = there["q"]
            differentiate = number % 2 == 1 and not written_by(op)
            outs, gradients = zip(results(op, there, differentiate), results(op, call, differentiate), strict=True)
            assert [out.stride() for out in outs[0]] == [out.stride() for out in outs[1]]
            for found, expected in (*zip(*outs, strict=True), *zip(*gradients, strict=True)):
                assert_close(found, expected)
    # In bfloat16, almost all elements of a norm that rounds as a model does have the bits of the kernels.
    given = {"dtype": torch.bfloat16, "q_weight": "own", "k_weight": "own", "tables": "dtype of x", "q_factor": "[S]"}
    for before in False, True:
        call = make("norm_rotate_qk", **given, eager_rounding=True, round_before_weight=before, norm_weight_offset=1.0)
        outs = torch.ops.rope.norm_rotate_qk(**tree_map_only(torch.Tensor, Spare, call))
        for found, expected in zip(outs, torch.ops.rope.norm_rotate_qk(**call), strict=True):
            assert (found.inner != expected).sum() <= expected.numel() / 500
