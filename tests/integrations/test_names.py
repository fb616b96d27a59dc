"""Tests of functions that call another function by a name: of Python alone, without models."""

import functools
import inspect

import pytest

from torch_rope.integrations._names import renamed

pytestmark = pytest.mark.cpu
step = 1


def turn(x, by=90):
    return x + by


def half(x):
    """A helper of the same file, which is followed."""
    return turn(x) / 2


class Base:
    def method(self, x):
        return turn(x)


class Derived(Base):
    def method(self, x):
        return super().method(x) + half(x)


def decorator(function):
    @functools.wraps(function)
    def doubled(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return doubled


def hiding(function):
    held = {"function": function}
    return functools.wraps(function)(lambda *args: held["function"](*args))


def calls(x, *, scale=1) -> float:
    """Its text."""
    return scale * turn(x)


def calls_in_a_comprehension(x):
    return sum(turn(y) for y in [x])


def calls_a_helper(x):
    return half(x)


def calls_what_it_imports(x):
    from test_names import turn as renamed

    return renamed(x)


def calls_unless_a_package_is_missing(x):
    if x > 99:
        from no_such_package import thing  # noqa: F401
    return turn(x)


def calls_what_it_defines(x):
    def turn(x, by=90):
        return x + by

    return turn(x)


def negative(x, by=90):
    return -x - by


negative._torch_rope = ("turn is negative",)


def find(name, function):
    """Lets negative take the place of turn."""
    return negative if name == "turn" else None


CALLS = {
    calls: lambda x: -x - 90,
    decorator(decorator(calls)): lambda x: 4 * (-x - 90),
    calls_in_a_comprehension: lambda x: -x - 90,
    calls_a_helper: lambda x: (-x - 90) / 2,
    calls_what_it_imports: lambda x: -x - 90,
    calls_what_it_defines: lambda x: -x - 90,
    calls_unless_a_package_is_missing: lambda x: -x - 90,
}


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_a_function_calls_something_else_in_a_copy(function):
    before, names = function(3), set(globals())
    new = renamed(function, find)
    assert new(3) == CALLS[function](3) and new._torch_rope == ("turn is negative",)
    assert function(3) == before and not hasattr(function, "_torch_rope")
    assert renamed(function, find)(3) == CALLS[function](3)
    assert {name[:12] for name in set(globals()) ^ names} == {"_torch_rope_"}
    del new
    assert set(globals()) == names


def test_a_copy_is_the_same_but_for_the_name():
    new = renamed(calls, find)
    for function in (new, renamed(decorator(calls), find)):  # transformers looks at the arguments of a forward
        assert inspect.signature(function) == inspect.signature(calls)
    assert new(3, scale=2) == -186
    for name in ("__module__", "__qualname__", "__doc__", "__annotations__"):
        assert getattr(new, name) == getattr(calls, name)
    code, expected = new.__code__, calls.__code__
    assert list(code.co_lines()) == list(expected.co_lines()) and code.co_filename == expected.co_filename
    known = {}
    assert renamed(calls, find, known) is renamed(calls, find, known)


def test_two_replacements_of_one_name_do_not_meet():
    first, second = renamed(calls, find), renamed(calls, lambda name, _: half if name == "turn" else None)
    assert first(3) == -93 and second(3) == half(3)


def test_what_calls_nothing_of_it_stays_the_same_function():
    for function in (negative, decorator(negative), find):
        assert renamed(function, find) is function
    assert renamed(calls, lambda *_: None) is calls


def test_super_finds_the_class():
    new = renamed(Derived.method, find)
    assert new(Derived(), 10) == 100 + -50 and Derived().method(10) == 100 + 50


def counts(x):
    global step
    step += turn(x)
    return step


def test_globals_are_those_of_the_module(monkeypatch):
    """A later assignment is seen, and what a copy assigns too."""
    new = renamed(counts, find)
    monkeypatch.setitem(globals(), "step", 100)
    assert new(3) == 7 and step == 7


def uses_an_attribute(x):
    return turn(x.turn)


def needs_a_name_around_it(x):
    def turn(y):
        return x + y

    return turn(x)


@pytest.mark.parametrize(
    "function, reason",
    [
        (uses_an_attribute, "uses the name turn in LOAD_ATTR"),
        (needs_a_name_around_it, "defines turn, which needs names of the function around it"),
        (hiding(calls), "has the decorator function <lambda>, which must hold the method in its closure"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_renamed_is_refused(function, reason):
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=reason):
            renamed(function, find)
