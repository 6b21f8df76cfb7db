"""One folder per model: model.py (the module), plan.py (its parallelization), hf.py (weight names).

This file is not installed. In a checkout it makes ``models`` a second name of ``compose.models``, so
that each module is there once, whatever name it is imported by.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _SecondName(MetaPathFinder, Loader):
    """Finds ``models.NAME`` as ``compose.models.NAME``."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        if not fullname.startswith("models.") or not find_spec(f"compose.{fullname}"):
            return None
        module = import_module(f"compose.{fullname}")
        # An import of models.llama.plan would put the module in the place of the function of that name.
        for name, loaded in [*sys.modules.items()]:
            second = name.removeprefix("compose.")
            if name.startswith("compose.models.") and second != fullname:
                sys.modules.setdefault(second, loaded)
        return ModuleSpec(fullname, self, loader_state=(module, module.__spec__))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that is there."""
        return spec.loader_state[0]

    def exec_module(self, module: ModuleType) -> None:
        """Give it back its own spec, in place of that of the second name."""
        assert module.__spec__
        module.__spec__ = module.__spec__.loader_state[1]


sys.meta_path.insert(0, _SecondName())
sys.modules[__name__] = import_module("compose.models")
