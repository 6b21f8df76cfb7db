"""Tied parameters: one parameter with several names, which stays one when modules are rebuilt."""

from torch import nn


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of every parameter that has more than one; the first name comes first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(model: nn.Module, names: list[str]) -> None:
    """Put the parameter ``names[0]`` under the other names too."""
    first = model.get_parameter(names[0])
    for name in names[1:]:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).register_parameter(leaf, first)
