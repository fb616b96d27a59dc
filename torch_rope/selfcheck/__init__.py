"""Checks the values, the gradients and the speed of the operators on this machine.

    python -m torch_rope.selfcheck [--device mps] [--quick] [--only TEXT]

It takes about a minute, and needs only torch. It prints one block, which is short enough to be pasted into an issue. The
exit status is 0 if no check fails, 1 if one fails, and 2 if the device cannot be used.

Each group of checks runs in a process of its own, so a check that crashes or hangs loses only its group:

    run.py     starts the processes, and prints what they found
    worker.py  runs a group in such a process
    calls.py   makes legal calls, for the tests of the repository too
    checks.py  checks values and gradients
    metal.py   checks each Metal kernel
    speed.py   measures
"""
