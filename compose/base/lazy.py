"""Names of a package that are imported when they are first asked for."""

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def export(package: str, modules: Mapping[str, str]) -> None:
    """Give ``package`` names that it imports when they are asked for, so that importing it is quick.

    Args:
        package: Its ``__name__``.
        modules: Which module each name is in, by the name.
    """

    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in modules:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            found = getattr(importlib.import_module(modules[name]), name)
            setattr(self, name, found)
            return found

        def __setattr__(self, name: str, value: Any) -> None:
            # compose.apply is the function. Python would put the module of that name in its place.
            if not (name in modules and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Lazy
