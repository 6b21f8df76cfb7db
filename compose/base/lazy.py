"""Names of a package that are imported when they are first used."""

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def export(package: str, modules: Mapping[str, str]) -> None:
    """Give a package names that are imported at their first use, so that importing it is quick.

    Args:
        package: The ``__name__`` of the package.
        modules: The module of each name.
    """

    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in modules:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            found = getattr(importlib.import_module(modules[name]), name)
            setattr(self, name, found)
            return found

        def __setattr__(self, name: str, value: Any) -> None:
            # compose.apply is the function. Python would replace it by the module of that name.
            if not (name in modules and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[package].__class__ = Lazy
