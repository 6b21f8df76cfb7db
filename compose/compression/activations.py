"""Activations that a composition sends in a code: their places, their bytes and what they lose."""

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from torch import Tensor

from compose.compression.exchange import Traffic
from compose.compression.row_codes import RowCode

PURPOSE = "activations"


@dataclass
class Lost:
    """What the messages of a place have lost, as squares of norms."""

    lost: float = 0.0
    expected: float = 0.0
    whole: float = 0.0
    """Of what plain messages bring."""
    elements: int = 0

    def plus(self, other: "Lost") -> "Lost":
        """Return what both have lost."""
        sums = (
            self.lost + other.lost,
            self.expected + other.expected,
            self.whole + other.whole,
            self.elements + other.elements,
        )
        return Lost(*sums)


class Activations:
    """The coded activations of a composition."""

    def __init__(self, code: RowCode, traffic: Traffic) -> None:
        """Take the form of the codes, and the count of what is sent."""
        self.code, self.traffic = code, traffic
        self.places: list[Place] = []
        self.account: dict[tuple[str, bool], Lost] | None = None
        """What was lost by place and whether it was a gradient; None if nothing is noted."""
        self.exact = True

    def at(self, name: str, axis: str) -> "Place":
        """Return a new place."""
        self.places.append(Place(self, name, axis))
        return self.places[-1]

    def open_account(self, exact: bool = True) -> None:
        """Note from now on what messages lose.

        Args:
            exact: Whether results are those of plain messages then; if not, they stay what they were.
        """
        self.account, self.exact = {}, exact


@dataclass(eq=False)
class Place:
    """The messages of one module."""

    owner: Activations
    name: str
    axis: str
    key: str = field(init=False)
    """The place as a string: torch.compile passes it to an operator."""

    def __post_init__(self) -> None:
        self.key = f"{self.name} {id(self):x}"
        _PLACES[self.key] = self

    @property
    def code(self) -> RowCode:
        """The form of the codes."""
        return self.owner.code

    def count(self, coded: int, plain: int) -> None:
        """Count the bytes that this rank sends to others, and those of plain messages."""
        self.owner.traffic.add(PURPOSE, self.axis, coded)
        self.owner.traffic.instead(PURPOSE, plain)

    def settled(
        self, coded: Tensor, gradient: bool, plain: Callable[[], Tensor], expected: Callable[[], Tensor]
    ) -> Tensor:
        """Return what messages bring: ``coded``, or the plain result while an exact account is open.

        A composition whose account is exact computes what plain messages bring, so it is compared with
        one process to the last digits. What the codes lose on the same messages is noted beside it. If
        the account only notes, results are bitwise those of training, which a proof checks.

        Args:
            coded: What coded messages bring.
            gradient: Whether it is a gradient.
            plain: Sends plain messages; a collective.
            expected: Returns this rank's share of the expected square of what is lost.
        """
        account = self.owner.account
        if account is None:
            return coded
        right = plain()
        own = account.setdefault((self.name, gradient), Lost())
        own.lost += float((coded.double() - right.double()).square().sum())
        own.expected += float(expected())
        own.whole += float(right.double().square().sum())
        own.elements += right.numel()
        return right if self.owner.exact else coded


_PLACES: WeakValueDictionary[str, Place] = WeakValueDictionary()


def place_of(key: str) -> Place:
    """Return the place with a key."""
    return _PLACES[key]
