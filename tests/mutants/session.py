"""Runs the tests for each mistake of a build until one of them fails.

pytest collects the tests once, and they run once without a mistake, which shows how long each takes. Then this process
forks for each mistake. Tests that found the most mistakes for the time they take run first.

Usage: python session.py JOB.json

The job is a dict: options (of pytest), tests (folders), mutants: number -> "file:line: what is wrong", and results, the
file that gets number -> the test that failed, or null.
"""

import collections
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

JOBS = int(os.environ.get("MAX_JOBS", "2"))


class Session:
    """A plugin of pytest that runs the collected tests in forks."""

    def __init__(self, job: dict):
        self.job, self.failed = job, False
        self.folder = Path(job["results"]).parent / "log"
        self.seconds: dict[str, float] = {}  # of each test
        self.found = collections.Counter()  # how many mistakes each test has found
        self.results: dict[str, str | None] = {}

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = True
            print(report.nodeid, report.longreprtext[-5000:], flush=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        self.items = {item.nodeid: item for item in session.items}
        self.folder.mkdir(exist_ok=True)
        _, status = os.waitpid(self.start("0"), 0)
        self.seconds, last = self.log("0")
        if session.testsfailed or status:
            sys.exit(f"the tests must pass without a mistake, but {last} does not; see {self.folder}/0")
        queue, running = list(self.job["mutants"]), {}
        while queue or running:
            while queue and len(running) < JOBS:
                number = queue.pop(0)
                running[self.start(number)] = number
            pid, status = os.wait()
            self.end(running.pop(pid), os.waitstatus_to_exitcode(status))
        Path(self.job["results"]).write_text(json.dumps(self.results))
        return True

    def start(self, number: str) -> int:
        """Forks. The new process makes the mistake, and runs tests until one fails."""
        topic = Path(self.job["mutants"].get(number, "").split(":")[0]).stem

        def worth(test: str) -> float:
            expected = self.found[test] + (1 if topic in test else 0.05)
            return expected / (self.seconds.get(test, 1) + 0.002)

        tests = sorted(self.items, key=worth, reverse=True) if self.seconds else list(self.items)
        if pid := os.fork():
            return pid
        os.environ["ROPE_MUTANT"] = number
        log = os.open(self.folder / number, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for test, after in zip(tests, [*tests[1:], None], strict=True):
            print(f"\nbegin {test}", flush=True)
            signal.alarm(int(60 + 20 * self.seconds.get(test, 12)))  # kills the process if the test hangs
            begin = time.time()
            item = self.items[test]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=self.items.get(after))
            print(f"\nend {time.time() - begin}", flush=True)
            if self.failed:
                os._exit(1)
        os._exit(0)

    def log(self, number: str) -> tuple[dict[str, float], str]:
        """Returns the seconds of the tests that have ended, and the last test that began."""
        lines = (self.folder / number).read_text(errors="replace").splitlines()
        begun = [line[6:] for line in lines if line.startswith("begin ")]
        ended = [float(line[4:]) for line in lines if line.startswith("end ")]
        return dict(zip(begun, ended, strict=False)), begun[-1]

    def end(self, number: str, code: int) -> None:
        """Records the result of a process."""
        test = self.log(number)[1] if code else None
        self.results[number] = test
        if test:
            self.found[test] += 1
        by = "" if not test else f"\n          by {test}" + (f" ({signal.Signals(-code).name})" if code < 0 else "")
        print(f"{number:>4} {'caught' if test else 'MISSED'}  {self.job['mutants'][number]}{by}", flush=True)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    sys.path[0] = os.getcwd()
    without = [f"-pno:{name}" for name in ("terminal", "cacheprovider", "xdist", "faulthandler", "logging")]
    arguments = [*without, "-s", "-o", "addopts=", *job["options"], *job["tests"]]
    sys.exit(int(pytest.main(arguments, plugins=[Session(job)])))


if __name__ == "__main__":
    main()
