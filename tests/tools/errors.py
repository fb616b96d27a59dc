"""Prints every error message of torch_rope that a test expects, as a Markdown table: the type, who raises it, the message.

    python tests/tools/errors.py

It runs the tests that use pytest.raises and records each expected exception whose message begins with the name of an
operator or function of torch_rope. Read the table like a user: is each message clear without the code?
"""

import contextlib
import inspect
import sys
import types
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = ["operators", "modules", "pytorch", "integrations"]
raises = pytest.raises
found = set()  # (type, who raises it, message)


class Recorder:
    """Stands for pytest.raises(...), and records the exception."""

    def __init__(self, *args, **kwargs):
        self.context = raises(*args, **kwargs)

    def __enter__(self):
        return self.context.__enter__()

    def __exit__(self, kind, error, traceback):
        who, colon, message = str(error).removeprefix("vmap: ").partition(": ")
        if colon and who.startswith(("rope.", "torch_rope")):
            found.add((kind.__name__, who, " ".join(message.split())))
        return self.context.__exit__(kind, error, traceback)


def record_in_rank(device, function, *args):
    """Runs a function in the process of a rank, and returns its result and the errors that were found there."""
    pytest.raises = Recorder
    return function(device, *args), found


def record_ranks(ranks_class):
    """Makes every call of Ranks record the errors of its processes."""
    call = ranks_class.__call__

    def recorded(self, function, *args):
        results = call(self, record_in_rank, function, *args)
        found.update(*(errors for _, errors in results))
        return [result for result, _ in results]

    ranks_class.__call__ = recorded


class Plugin:
    """Selects the tests that use pytest.raises, themselves or in a function of their file that they name."""

    def pytest_collection_modifyitems(self, config, items):
        def expects_an_error(test):
            functions = test, *map(test.__globals__.get, test.__code__.co_names)
            return any(isinstance(f, types.FunctionType) and "pytest.raises" in inspect.getsource(f) for f in functions)

        items[:] = [item for item in items if expects_an_error(inspect.unwrap(item.function))]
        if ranks := sys.modules.get("ranks"):
            record_ranks(ranks.Ranks)


def main():
    pytest.raises = Recorder
    with contextlib.redirect_stdout(sys.stderr):
        paths = [str(TESTS / folder) for folder in FOLDERS]
        status = pytest.main(["-q", "-p", "no:cacheprovider", *paths], plugins=[Plugin()])
    operators = {}
    for kind, who, message in found:
        operators.setdefault((kind, message), []).append(who)
    print("| type | operator | message |\n| --- | --- | --- |")
    for kind, who, message in sorted((k, ", ".join(sorted(w)), m) for (k, m), w in operators.items()):
        print(f"| {kind} | {who} | {message.replace('|', chr(92) + '|')} |")
    return status


if __name__ == "__main__":
    sys.exit(main())
