"""The models, a folder each: those that come with compose, and any other folder (``model.path``).

A wheel has its models here. In a checkout they are in ``models/`` beside ``compose/``, and the package
``models`` there is a second name of this one. A folder elsewhere is a module of this package whose name
tells its path. Every process can therefore import it, and ``from ..layers`` works in a copied model.
"""

import os
import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

if not (Path(__file__).parent / "layers").is_dir():
    __path__.append(str(Path(__file__).parents[2] / "models"))


def module_name(folder: str) -> str:
    """Return the name of a folder's module, which holds its absolute path, as ``compose.models._2fx``.

    A byte that is no letter and no digit stands there as _ and two hexadecimal digits.
    """
    place = os.fsencode(os.path.realpath(folder))
    return f"{__name__}." + re.sub(rb"[^A-Za-z0-9]", lambda m: b"_%02x" % m[0][0], place).decode()


class _Folders(MetaPathFinder):
    """Finds the module of a folder, with an ``__init__.py`` or without."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        package, _, own = fullname.rpartition(".")
        if package != __name__ or not own.startswith("_2f"):
            return None
        place = re.sub(rb"_(..)", lambda m: bytes.fromhex(m[1].decode()), own.encode())
        folder = os.fsdecode(place)
        if (init := Path(folder) / "__init__.py").is_file():
            return spec_from_file_location(fullname, init, submodule_search_locations=[folder])
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [folder]
        return spec


sys.meta_path.append(_Folders())
