"""Tests of python -m torch_rope.selfcheck: a correct build passes, and a broken operator is found."""

import pytest
import torch
from cases import EMULATED, python

from torch_rope import selfcheck

pytestmark = [
    pytest.mark.skipif(EMULATED, reason="users have no emulated device"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo", "ignore:.isinstance.treespec"),
]
rope = torch.ops.rope


def test_a_quick_run_passes(device, capsys):
    assert selfcheck.main(["--device", device, "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("\nAll checks passed.\n") and "FAILED" not in out
    assert f"torch {torch.__version__}" in out and f"device {device}" in out


def swapped_sign(x, *args, inverse=False, **kwargs):
    return rope.rotate.default(x, *args, inverse=not inverse, **kwargs)


def an_ulp_off(x, *args, **kwargs):
    return rope.rotate.default(x, *args, **kwargs) * (1 + 4 * torch.finfo(x.dtype).eps)


def raising(*args, **kwargs):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("broken", [swapped_sign, an_ulp_off, raising])
def test_a_broken_operator_is_found_and_later_checks_still_run(broken, device, monkeypatch, capsys):
    broken.default = rope.rotate.default
    monkeypatch.setattr(rope, "rotate", broken)
    assert selfcheck.main(["--device", device, "--quick", "--only", "rotate float16"]) == 1
    out = capsys.readouterr().out
    assert out.endswith(" checks failed\n")
    assert "rope.rotate(float16[" in out and "interleaved=" in out  # the call, to repeat it
    if broken is raising:
        assert "RuntimeError: no such kernel" in out
    assert out.index("gradient, rotate float16") > out.index("FAILED")


def test_a_cell_that_must_not_be_written_is_found(device, monkeypatch, capsys):
    write = rope.rotate_into_cache_

    def broken(q, k, v, k_cache, v_cache, *args, **kwargs):
        write(q, k, v, k_cache, v_cache, *args, **kwargs)
        v_cache[..., -1, -1, -1] = 0

    monkeypatch.setattr(rope, "rotate_into_cache_", broken)
    assert selfcheck.main(["--device", device, "--quick", "--only", "rotate_into_cache_ bfloat16"]) == 1
    out = capsys.readouterr().out
    assert "rope.rotate_into_cache_(bfloat16[" in out and ": 0, expected" in out


@pytest.mark.parametrize("name", ["meta", "tpu", "nonsense:3", "cpu:"])
def test_a_missing_device_is_reported_in_one_line(name, capsys):
    assert selfcheck.main(["--device", name]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"torch_rope.selfcheck: device {name} cannot be used: ") and err.count("\n") == 1


def test_speed_is_printed_for_each_operator(device, monkeypatch, capsys):
    monkeypatch.setattr(selfcheck, "HALF", (torch.float16,))
    check = selfcheck.Check(torch.device(device))
    medians = check.medians
    check.medians = lambda contenders: medians(contenders, seconds=0)
    check.speed()
    lines = capsys.readouterr().out.splitlines()
    assert check.failed == 0 and all("float16 [" in line for line in lines[-6:])


def test_selfcheck_needs_neither_numpy_nor_pytest():
    result = python(
        "import sys\nsys.modules['numpy'] = sys.modules['pytest'] = None\n"
        "from torch_rope.selfcheck import main\nsys.exit(main(['--device', 'cpu', '--quick', '--only', 'opcheck']))"
    )
    assert result.returncode == 0, result.stdout + result.stderr
