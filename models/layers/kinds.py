"""The table of differences of a family: architectures of transformers that one model here can be."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from .published import BALANCE, BALANCED, Keys, number, only, required, size, truth


@dataclass(frozen=True)
class Kind:
    """One architecture: the options that it has, and its words for them in config.json and files."""

    architecture: str
    """The name of its class."""
    keys: Keys
    """The keys of its config.json. Their ``fields`` are those of our fields that are free."""
    fixed: Mapping[str, Any]
    """Those of our fields that have one value in it."""
    modules: Mapping[str, str]
    """The names of its modules, by ours."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of our fields whose key may be absent."""
    like: Mapping[str, str] = field(default_factory=dict)
    """Our fields that have the value of another one if their key is absent."""
    null: tuple[str, ...] = ()
    """Our fields whose 0 is a null there."""
    writes: Mapping[str, Any] = field(default_factory=dict)
    """Other keys that are written, with their value."""

    def read(
        self, config: type, values: Mapping[str, Any], besides: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Return our fields from a config.json, each by its type, with those that are fixed.

        Fields of ``besides`` are read elsewhere. Raises ValueError if a key is missing or its value is
        of another type.
        """
        result = dict(self.fixed)
        types = {one.name: one.type for one in fields(config)}
        for ours, theirs in self.keys.fields.items():
            if ours in besides:
                continue
            if theirs == BALANCE and not truth(values, BALANCED, False):
                result[ours] = 0.0
                continue
            if values.get(theirs) is None:
                if ours in self.null and (theirs in values or ours not in self.defaults):
                    result[ours] = types[ours](0)  # type: ignore[operator]
                    continue
                if ours in self.defaults:
                    result[ours] = self.defaults[ours]
                    continue
                if ours in self.like:
                    result[ours] = result[self.like[ours]]
                    continue
            reader = {int: size, float: number, bool: truth}.get(types[ours])  # type: ignore[call-overload]
            if reader is None:
                only(values, theirs, *get_args(types[ours]))
                reader = required
            result[ours] = reader(values, theirs)
        return result

    def write(self, model_type: str, config: object) -> dict[str, Any]:
        """Return the config.json of a model of this kind."""
        given = {ours: getattr(config, ours) for ours in self.keys.fields}
        balance = next((given[ours] for ours, key in self.keys.fields.items() if key == BALANCE), None)
        return {
            "architectures": [self.architecture],
            "model_type": model_type,
            **{
                theirs: None if ours in self.null and not given[ours] else given[ours]
                for ours, theirs in self.keys.fields.items()
            },
            **({} if balance is None else {BALANCED: balance > 0}),
            **self.writes,
        }


def kind_of(kinds: Mapping[str, Kind], config: object, strict: bool = True) -> str:
    """Return the model_type of the first architecture that has the options of a config.

    If none has, a ValueError names the field that the nearest one cannot have; without ``strict`` that
    one is returned, since its names serve.
    """
    others = {
        name: [ours for ours, value in kind.fixed.items() if getattr(config, ours) != value]
        for name, kind in kinds.items()
    }
    # A model with experts is not near to one without.
    nearest = min(others, key=lambda name: (len(others[name]), "n_experts" in others[name]))
    for ours in others[nearest] if strict else ():
        raise ValueError(
            f"{ours}: {getattr(config, ours)} has no place in the config.json of"
            f" {kinds[nearest].architecture}"
        )
    return nearest


def with_experts(values: Mapping[str, Any], key: str = "num_local_experts") -> dict[str, Any]:
    """Return the keys of a config.json in which the experts' number has this name alone.

    It has two in published files. Raises ValueError if they say different things.
    """
    result = dict(values)
    for other in ("num_local_experts", "num_experts"):
        result.setdefault(key, values.get(other))
        only(values, other, result[key])
    return result
