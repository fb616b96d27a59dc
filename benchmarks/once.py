"""A plugin of pytest that runs every test once, even if the machine is lost in between.

gpu.py loads it. It writes the outcome of each test to a journal as soon as it is known, and leaves out the tests whose
outcomes the journal has. The variable ROPE_ONCE has its settings as JSON:

journal   the file
step, run the names under which the journal keeps the outcomes
share     i and n: this process runs every n-th test, from the i-th on
deadline  no test begins after this time
limit     the seconds after which a test is taken for hanging
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from . import jsonl
from .gpu import outcomes

SETTINGS = json.loads(os.environ["ROPE_ONCE"])
JOURNAL = Path(SETTINGS["journal"])
OUTCOME = pytest.StashKey[dict]()


def note(**fields) -> None:
    jsonl.append(JOURNAL, {"step": SETTINGS["step"], "run": SETTINGS["run"], **fields})


def pytest_collection_modifyitems(config, items):
    known = outcomes(jsonl.read(JOURNAL), SETTINGS["step"])
    first, shares = SETTINGS["share"]
    items[:] = [item for item in items[first::shares] if known.get(item.nodeid, "started") == "started"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    note(test=item.nodeid, outcome="started")
    item.stash[OUTCOME] = {"outcome": "passed"}
    signal.alarm(SETTINGS["limit"])  # it ends the process, because no exception reaches code that waits for a GPU
    result = yield
    signal.alarm(0)
    note(test=item.nodeid, **item.stash[OUTCOME])
    if time.time() > SETTINGS["deadline"]:
        item.session.shouldstop = "the time is over"
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed:
        item.stash[OUTCOME] = {"outcome": "failed", "reason": report.longreprtext[-2000:]}
        if cuda_is_lost():  # every later test of this process would fail too
            note(test=item.nodeid, **item.stash[OUTCOME])
            os._exit(1)
    elif report.skipped and item.stash[OUTCOME]["outcome"] == "passed":
        item.stash[OUTCOME] = {"outcome": "skipped"}
    return report


def cuda_is_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def pytest_sessionfinish(session, exitstatus):
    note(exitstatus=int(exitstatus))
