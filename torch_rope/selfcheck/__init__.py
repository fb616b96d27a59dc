"""Checks the values, the gradients and the speed of the operators on this machine.

    python -m torch_rope.selfcheck [--device mps] [--quick] [--only TEXT] [--json FILE]

It takes about two minutes, and needs only torch. It prints one block, which is short enough to be pasted into an issue,
and writes the same and more to a JSON file. The exit status is 0 if no check fails, 1 if one fails, and 2 if the device
cannot be used.

The checks run in processes of their own, so a check that crashes or hangs loses only itself. The files are:

    run.py      starts the processes, and collects what they report
    report.py   makes the block from the report
    worker.py   runs checks in such a process, and finds out which kernels took part in a failure
    checks.py   checks values and gradients
    kernels.py  reaches every Metal kernel
    programs.py checks that need a process of their own: compilers, graph capture, threads, the exit
    speed.py    measures
"""

from torch_rope.selfcheck.run import main

__all__ = ["main"]
