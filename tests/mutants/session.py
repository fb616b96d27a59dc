"""Runs the tests for each mutant of a build until one test finds the mutant.

pytest collects the tests once. For each mutant this process forks, and the fork runs tests until one fails that passes
without the mistake. Tests that found the most mistakes for the time they take run first.

Usage: python session.py JOB.json

The job is a dict: folder, options (of pytest), results (the file to write), and mutants: number -> [file, line, what is
wrong, folders of tests, the quick ones first].
"""

import collections
import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

JOBS = int(os.environ.get("MAX_JOBS", "2"))
# A mutant that no test finds in this many seconds waits until more tests are known to find mistakes.
SOON = 10
UNDECIDED = 99  # the exit status of a fork that has run for that long


class Fork:
    """A process that runs tests with one mistake, until a test fails or `most` seconds of processor time are over."""

    def __init__(self, session: "Session", number: int, tests: list[str], most: float):
        self.number, self.begin, self.idle, self.size = number, time.time(), 0.0, 0
        self.log = session.folder / "log" / str(number)  # what the tests print
        self.run = self.log.with_suffix(".tests")  # each test that has begun, and its seconds
        for file in (self.log, self.run):
            file.write_text("")
        self.pid = os.fork()
        if self.pid:
            return
        os.setpgid(0, 0)
        os.environ["ROPE_MUTANT"] = str(number)
        out = os.open(self.log, os.O_WRONLY | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        items = [session.items[test] for test in tests]
        for item, after in zip(items, [*items[1:], None], strict=True):
            begin = time.time()
            self.record(json.dumps(item.nodeid) + "\n")
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            self.record(f"{time.time() - begin}\n")
            if session.failed or time.process_time() > most:
                os._exit(1 if session.failed else UNDECIDED)
        os._exit(0)

    def record(self, line: str) -> None:
        with self.run.open("a") as file:
            file.write(line)

    def tests(self) -> list[tuple[str, float]]:
        """Returns the tests that have begun, each with its seconds, or with infinity if it has not ended."""
        lines = [json.loads(line) for line in self.run.read_text().splitlines()]
        return list(zip(lines[::2], [*lines[1::2], math.inf], strict=False))

    def ended(self, wait: bool = False) -> int | None:
        """Returns the exit status, or None if the process still runs."""
        pid, status = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def limit(self, seconds: float, usual: dict[str, float]) -> None:
        """Kills the process if its test hangs.

        seconds: the time since the last call. usual: the seconds that each test takes.
        """
        size = self.run.stat().st_size
        self.idle = self.idle + seconds if size == self.size else 0
        self.size = size
        if self.idle > 60 and self.idle > 60 + 20 * usual.get(self.tests()[-1][0], 12):
            os.killpg(self.pid, signal.SIGKILL)


class Session:
    """A plugin of pytest that runs the collected tests in forks."""

    def __init__(self, job: dict):
        self.job, self.folder = job, Path(job["folder"])
        # From earlier runs: the seconds of each test, and the test that found each mistake.
        self.known = {"seconds": {}, "kills": {}}
        if (kept := self.folder / "known.json").exists():
            self.known = json.loads(kept.read_text())
        self.seconds = self.known["seconds"]
        self.killers = collections.defaultdict(list)  # the mutants that each test has found
        self.results = {}  # the result of each mutant
        self.right = {}  # whether a test passes without a mistake
        self.failed = False  # whether a test has failed in this process

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.testsfailed:
            sys.exit("pytest cannot collect the tests")
        self.items = {item.nodeid: item for item in session.items}
        (self.folder / "log").mkdir(exist_ok=True)
        undecided = self.run([int(number) for number in self.job["mutants"]], SOON)
        self.run(undecided, math.inf)
        if not all(self.right.values()):
            sys.exit("some tests fail without a mistake")
        Path(self.job["results"]).write_text(json.dumps(self.results))
        return True

    def order(self, number: int) -> list[str]:
        """Returns the tests in the order in which they run for a mutant.

        The test that found this mistake last time comes first, then the tests that find the most mistakes for the time
        they take. While little is known, tests whose names contain the name of the source come before others.
        """
        file, _, what, folders = self.job["mutants"][str(number)]
        topic = Path(file).stem
        last = self.known["kills"].get(f"{file}: {what}")
        seconds = {t: 0.1 * 4**i for i, folder in enumerate(folders) for t in self.items if t.startswith(folder)}
        tests = list(seconds)
        random.Random(0).shuffle(tests)

        def worth(test: str) -> float:
            """Returns the value of a test for its time. Mutants with numbers near this one count most."""
            found = sum(1 / (1 + abs(number - n) / 10) for n in self.killers.get(test, ()))
            return (found + (1 if topic in test else 0.05)) / (self.seconds.get(test, seconds[test]) + 0.002)

        return sorted(tests, key=lambda t: (t != last, -worth(t)))

    def run(self, queue: list[int], most: float) -> list[int]:
        """Runs the mutants in the queue. Returns those that no test found in `most` seconds."""
        running, undecided, last = [], [], time.monotonic()
        while queue or running:
            while queue and len(running) < JOBS:
                number = queue.pop(0)
                running.append(Fork(self, number, self.order(number), most))
            time.sleep(0.02)
            # At most one second counts, so that forks do not seem to hang after all processes were stopped for a while.
            passed, last = min(time.monotonic() - last, 1), time.monotonic()
            for fork in list(running):
                code = fork.ended()
                if code is None:
                    fork.limit(passed, self.seconds)
                    continue
                running.remove(fork)
                if code == UNDECIDED:
                    undecided.append(fork.number)
                elif not self.end(fork, code):
                    queue.insert(0, fork.number)
        return undecided

    def passes(self, test: str) -> bool:
        """Returns whether a test passes without a mistake. A test that does not is left out from then on."""
        if test not in self.right:
            fork = Fork(self, 0, [test], math.inf)
            self.right[test] = fork.ended(wait=True) == 0
            if not self.right[test]:
                print(f"{test} FAILS WITHOUT A MISTAKE, see {fork.log}", flush=True)
                fork.log.rename(fork.log.with_suffix(f".{len(self.items)}"))
                self.items.pop(test)
        return self.right[test]

    def end(self, fork: "Fork", code: int) -> bool:
        """Records the result of a fork that has ended. Returns False if the mutant must run again."""
        tests = fork.tests()
        for name, seconds in tests:
            if seconds < math.inf:
                self.seconds[name] = min(seconds, self.seconds.get(name, seconds))
        test = tests[-1][0]
        if code and not self.passes(test):
            return False
        file, line, what, _ = self.job["mutants"][str(fork.number)]
        self.known["kills"].pop(f"{file}: {what}", None)
        if code:
            self.killers[test].append(fork.number)
            self.known["kills"][f"{file}: {what}"] = test
        (self.folder / "known.json").write_text(json.dumps(self.known))
        how = "" if code in (0, 1) else f" ({signal.Signals(-code).name})" if code < 0 else f" (exit {code})"
        took = time.time() - fork.begin
        self.results[fork.number] = {"caught": bool(code), "test": test, "seconds": took}
        print(f"{fork.number:4} {'caught' if code else 'MISSED'} {took:5.1f} s  {file}:{line}: {what}", flush=True)
        if code:
            print(f"            by {test}{how}", flush=True)
        return True

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = True
            print(report.nodeid, report.longreprtext[-5000:], flush=True)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    sys.path[0] = os.getcwd()
    fixed = [
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:faulthandler",
        "-s",
        "-o",
        "addopts=",
    ]
    folders = sorted({folder for *_, folders in job["mutants"].values() for folder in folders})
    code = pytest.main([*fixed, *job["options"], *folders], plugins=[Session(job)])
    sys.exit(int(code))


if __name__ == "__main__":
    main()
