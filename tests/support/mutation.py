"""One function with one piece of its text replaced for a while: a fault as a bad edit makes it."""

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from types import CodeType, FunctionType
from typing import Any


@contextmanager
def mutated(place: str, old: str, new: str) -> Iterator[None]:
    """``place``: "package.module:Class.function". The function runs with ``old`` replaced by ``new``,
    wherever it was imported to. ``old`` must stand in its text just once, so that a table of faults
    cannot fall behind the code.
    """
    function = function_at(place)
    source = textwrap.dedent(inspect.getsource(function))
    # A piece of several lines is written without the function's own indentation.
    assert source.count(old) == 1, f"{place}: {source.count(old)} times {old!r}"
    before = function.__code__
    mutation = _compiled(function, source.replace(old, new))
    _forget()
    function.__code__ = mutation
    try:
        yield
    finally:
        function.__code__ = before
        _forget()


def _forget() -> None:
    """Forget what functions of the project have kept: a fault in one would not run, or stay."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("compose.", "models.")):
            for value in list(vars(module).values()):
                if isinstance(value, _lru_cache_wrapper):
                    value.cache_clear()


def function_at(place: str) -> FunctionType:
    """The function itself: without decorators, or that of an operator."""
    module, _, path = place.partition(":")
    result: Any = importlib.import_module(module)
    for name in path.split("."):
        result = inspect.getattr_static(result, name)
    while not isinstance(result, FunctionType) or hasattr(result, "__wrapped__"):
        kept = ("__wrapped__", "_init_fn", "__func__")  # _init_fn: of torch.library.custom_op
        result = getattr(result, next(name for name in kept if hasattr(result, name)))
    return result


def _compiled(function: FunctionType, source: str) -> CodeType:
    """The code of ``source``, the function's text, with the same names from around it."""
    names = function.__code__.co_freevars
    around = "".join(f"    {name} = None\n" for name in names)
    # Under another name, or its own would hide a global one that it calls.
    renamed = _without_decorators(source).replace(f"def {function.__name__}(", "def _mutated(", 1)
    body = textwrap.indent(renamed, "    ")
    text = f"def _around():\n{around}{body}\n    return _mutated\n"
    scope: dict[str, Callable[[], FunctionType]] = {}
    exec(compile(text, inspect.getfile(function), "exec"), dict(function.__globals__), scope)
    made = scope["_around"]().__code__
    assert made.co_freevars == names, (made.co_freevars, names)
    return made


def _without_decorators(source: str) -> str:
    lines = source.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(("def ", "async def ")))
    return "\n".join(lines[first:])
