"""Lets a function call something else by a name: a copy of its code names another global.

A code object knows the globals that it loads by their names. So a copy of the code that has another name in the same
place calls what the module holds under that name, and everything else is kept: globals, closure, ``super()``, lines and
breakpoints. No source is needed. The module holds the name as long as the copy of the code exists.
"""

import dis
import functools
import importlib.util
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator

from ._text import nested

# find(name, function) returns what takes the place of a function that is called by a name, or None.
Find = Callable[[str, types.FunctionType], Callable | None]
_numbers = itertools.count()  # of the names that modules hold


def copy_of(function: types.FunctionType, code: types.CodeType, closure: tuple | None) -> types.FunctionType:
    """Returns a function with everything of this function but its code and its closure."""
    new = types.FunctionType(code, function.__globals__, argdefs=function.__defaults__, closure=closure)
    functools.update_wrapper(new, function, (*functools.WRAPPER_ASSIGNMENTS, "__kwdefaults__"))
    del vars(new)["__wrapped__"]
    return new


def renamed(function: types.FunctionType, find: Find, known: dict | None = None) -> types.FunctionType:
    """Returns a copy of a function that calls what find returns, or the function itself if it calls nothing of it.

    Functions of the same module that it calls, functions that it defines or imports inside of it, and decorators that
    keep the function in their closure are followed. ``_torch_rope`` of the result is a tuple of what find returned.
    known: what was returned for functions before.

    Raises NotImplementedError if a name of its cannot be given another meaning, or find raises it.
    """
    known = {} if known is None else known
    if function not in known:
        known[function] = function  # ends the recursion of functions that call each other
        try:
            known[function] = _renamed(function, find, known)
        except NotImplementedError:
            del known[function]
            raise
    return known[function]


def _renamed(function: types.FunctionType, find: Find, known: dict) -> types.FunctionType:
    inner = getattr(function, "__wrapped__", None)
    if isinstance(inner, types.FunctionType):
        return _decorated(function, inner, renamed(inner, find, known))
    names, codes = {}, {}  # what is called, by its name or its code, and the namespace that gets another name for it
    _, *inside = nested(function.__code__)
    for code in inside:
        if (new := find(code.co_name, made_inside(function, code))) is not None:
            if code.co_freevars:
                raise NotImplementedError(f"defines {code.co_name}, which needs names of the function around it")
            codes[code] = function.__globals__, new
    for name, value, home in _functions(function, codes):
        new = find(name, value)
        if new is None and value.__module__ == function.__module__ and value is not function:
            new = renamed(value, find, known)
        if new is not None and new is not value:
            names[name] = home, new
    if not names and not codes:
        return function
    result = copy_of(function, _replaced(function.__code__, names, codes), function.__closure__)
    called = [new for _, new in (*names.values(), *codes.values())]
    vars(result)["_torch_rope"] = tuple(dict.fromkeys(c for new in called for c in vars(new).get("_torch_rope", ())))
    return result


def _decorated(function: types.FunctionType, inner: Callable, new: Callable) -> types.FunctionType:
    """Returns a function whose decorator keeps a new function instead of the inner one."""
    if new is inner:
        return function
    cells = tuple(types.CellType(new) if c.cell_contents is inner else c for c in function.__closure__ or ())
    if cells == (function.__closure__ or ()):
        raise NotImplementedError(
            f"has the decorator function {function.__code__.co_name}, which must hold the method in its closure"
        )
    result = copy_of(function, function.__code__, cells)
    vars(result).update(__wrapped__=new, _torch_rope=vars(new)["_torch_rope"])
    return result


def _functions(
    function: types.FunctionType, replaced: Collection[types.CodeType]
) -> Iterator[tuple[str, types.FunctionType, dict]]:
    """Yields the functions that a function loads as globals, or imports inside, but for those of replaced code: the name, the
    function, and the namespace that holds it."""
    seen = set()
    for code in nested(function.__code__):
        if code in replaced:
            continue
        home, constants = {}, []
        for i in dis.get_instructions(code):
            if i.opname.startswith("LOAD_CONST") or i.opname == "LOAD_SMALL_INT":
                constants.append(i.argval)
            elif i.opname == "IMPORT_NAME":
                package = function.__globals__.get("__package__")
                name = importlib.util.resolve_name("." * constants[-2] + i.argval, package)
                home = vars(sys.modules[name]) if name in sys.modules else {}
            elif i.opname in ("LOAD_GLOBAL", "IMPORT_FROM") and i.argval not in seen:
                holder = home if i.opname == "IMPORT_FROM" else function.__globals__
                value = holder.get(i.argval)
                # The kernels package makes a module of a function, whose forward has the function in its closure.
                for cell in getattr(getattr(type(value), "forward", None), "__closure__", None) or ():
                    value = cell.cell_contents
                if isinstance(value, types.FunctionType):
                    seen.add(i.argval)
                    yield i.argval, value, holder


def made_inside(function: types.FunctionType, code: types.CodeType) -> types.FunctionType:
    """Returns the function that a function defines by this code, as far as it needs nothing of the function around it."""
    return types.FunctionType(code, function.__globals__, closure=tuple(types.CellType() for _ in code.co_freevars))


def _call(*args, **kwargs):
    """Stands where code defines a function that is replaced."""
    return replacement(*args, **kwargs)  # noqa: F821  a copy of the code has another name


def _replaced(code: types.CodeType, names: dict[str, tuple], codes: dict[types.CodeType, tuple]) -> types.CodeType:
    """Returns code in which globals have other names, and functions that it defines have other code, see _renamed.

    No other code has these names, and the namespaces hold them as long as this code exists.
    """
    if code in codes:
        of_code = {name: getattr(code, name) for name in ("co_name", "co_firstlineno", "co_filename")}
        code, names = _call.__code__.replace(**of_code), {"replacement": codes[code]}
    new = {name: f"_torch_rope_{name}_{next(_numbers)}" for name in code.co_names if name in names}
    for i in dis.get_instructions(code) if new else ():
        if i.argval in names and i.opname not in ("LOAD_GLOBAL", "IMPORT_FROM") and "FAST" not in i.opname:
            raise NotImplementedError(f"uses the name {i.argval} in {i.opname}, and so cannot call it by another name")
    constants = [_replaced(c, names, codes) if isinstance(c, types.CodeType) else c for c in code.co_consts]
    code = code.replace(co_names=tuple(new.get(n, n) for n in code.co_names), co_consts=tuple(constants))
    for old, name in new.items():
        home, value = names[old]
        home[name] = value
        weakref.finalize(code, home.pop, name, None).atexit = False
    return code
