"""Runs tests once per mutant: pytest collects them once, and each mutant has a fork of that process, in which tests run
until one fails that passes without the mistake. The first are those that found most mistakes for their time.

python session.py JOB.json  with the job: folder, options, mutants {number: [file, line, what is wrong, folders of tests, the
quick ones first]}, results (file)
"""

import collections
import contextlib
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
SOON = 10  # seconds: what is not found by then waits until there are more tests that are known to find mistakes
UNDECIDED = 99


class Session:
    def __init__(self, job: dict):
        self.job, self.folder = job, Path(job["folder"])
        self.known = {"seconds": {}, "kills": {}}  # of each test; and the test that found a mistake last time
        if (kept := self.folder / "known.json").exists():
            self.known = json.loads(kept.read_text())
        self.seconds = self.known["seconds"]
        self.killers = collections.defaultdict(list)  # the mutants that a test found
        self.results, self.right = {}, {}  # of mutants; whether a test passes without a mistake

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.testsfailed:
            sys.exit("the tests are not collected")
        self.session = session
        self.items = {item.nodeid: item for item in session.items}
        (self.folder / "log").mkdir(exist_ok=True)
        undecided = self.run([int(number) for number in self.job["mutants"]], SOON)
        self.run(undecided, math.inf)
        if not all(self.right.values()):
            sys.exit("some tests fail without a mistake")
        Path(self.job["results"]).write_text(json.dumps(self.results))
        return True

    def order(self, number: int) -> list[str]:
        """Of the tests: the one that found this mistake last time, then those that find most for their time."""
        file, _, what, folders = self.job["mutants"][str(number)]
        last = self.known["kills"].get(f"{file}: {what}")
        seconds = {t: 0.1 * 4**i for i, folder in enumerate(folders) for t in self.items if t.startswith(folder)}
        tests = list(seconds)
        random.Random(0).shuffle(tests)

        def worth(test: str) -> float:
            found = sum(1 / (1 + abs(number - n) / 10) for n in self.killers.get(test, ()))  # most of all near by
            return (found + 0.05) / (self.seconds.get(test, seconds[test]) + 0.002)

        return sorted(tests, key=lambda t: (t != last, -worth(t)))

    def run(self, queue: list[int], most: float) -> list[int]:
        """Returns the mutants that no test found in that many seconds."""
        running, undecided = {}, []
        while queue or running:
            while queue and len(running) < JOBS:
                number = queue.pop(0)
                running[self.fork(number, self.order(number), most)] = number, time.time()
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                number, begin = running[pid]
                if not ended:
                    self.limit(pid, number)
                    continue
                del running[pid]
                code = os.waitstatus_to_exitcode(status)
                if code == UNDECIDED:
                    undecided.append(number)
                elif not self.end(number, code, time.time() - begin):
                    queue.insert(0, number)
            time.sleep(0.02)
        return undecided

    def passes(self, test: str) -> bool:
        """Without a mistake."""
        if test not in self.right:
            self.right[test] = os.waitpid(self.fork(0, [test], math.inf), 0)[1] == 0
            if not self.right[test]:
                print(f"FAILS WITHOUT A MISTAKE: {test}, see {self.log(0)}", flush=True)
                self.log(0).rename(self.log(0).with_suffix(f".{len(self.items)}"))
                self.items.pop(test)
        return self.right[test]

    def log(self, number: int) -> Path:
        return self.folder / "log" / str(number)

    def fork(self, number: int, tests: list[str], most: float) -> int:
        log = self.log(number)
        for suffix in ("", ".now", ".seconds"):
            log.with_suffix(suffix).unlink(missing_ok=True)
        return os.fork() or self.child(number, tests, most, log)

    def child(self, number: int, tests: list[str], most: float, log: Path) -> None:
        os.setpgid(0, 0)
        os.environ["ROPE_MUTANT"] = str(number)
        out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        items = [self.items[test] for test in tests]
        seconds = log.with_suffix(".seconds").open("w")
        for item, after in zip(items, [*items[1:], None], strict=True):
            log.with_suffix(".now").write_text(item.nodeid)
            begin = time.time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            print(json.dumps([item.nodeid, time.time() - begin]), file=seconds, flush=True)
            if self.session.testsfailed or time.process_time() > most:
                os._exit(bool(self.session.testsfailed) or UNDECIDED)
        os._exit(0)

    def limit(self, pid: int, number: int) -> None:
        """Ends what hangs."""
        now = self.log(number).with_suffix(".now")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if time.time() - now.stat().st_mtime > 60 + 20 * self.seconds.get(now.read_text(), 12):
                os.killpg(pid, signal.SIGKILL)

    def end(self, number: int, code: int, took: float) -> bool:
        """False if it has to run again."""
        log = self.log(number)
        test = log.with_suffix(".now").read_text()
        for line in log.with_suffix(".seconds").read_text().splitlines():
            name, seconds = json.loads(line)
            self.seconds[name] = min(seconds, self.seconds.get(name, seconds))
        if code and not self.passes(test):
            return False
        file, line, what, _ = self.job["mutants"][str(number)]
        self.known["kills"].pop(f"{file}: {what}", None)
        if code:
            self.killers[test].append(number)
            self.known["kills"][f"{file}: {what}"] = test
        (self.folder / "known.json").write_text(json.dumps(self.known))
        how = "" if code in (0, 1) else f" ({signal.Signals(-code).name})" if code < 0 else f" (exit {code})"
        self.results[number] = {"caught": bool(code), "test": test, "seconds": took}
        print(f"{number:4} {'caught' if code else 'MISSED'} {took:5.1f} s  {file}:{line}: {what}", flush=True)
        if code:
            print(f"            by {test}{how}", flush=True)
        return True

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report):
        if report.failed:
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
