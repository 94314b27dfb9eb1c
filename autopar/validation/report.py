"""What validation found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Validation:
    """A program whose every value was justified.

    Attributes:
        how: how many nodes were justified in which way: ``proven`` by numbers or by counting,
            ``open`` by the op's rule alone, ``step`` and ``cast`` by the rule of that step.
        open: keys of the nodes of which only the op's own rule says that they are right.
        unproven: parts of the program that nothing here looks at, in words.
    """

    how: Counter[str] = field(default_factory=Counter)
    open: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        """How many nodes of all graphs were justified."""
        return sum(self.how.values())

    def joined(self, other: Validation) -> Validation:
        """Both together, each name once."""
        return Validation(
            self.how + other.how,
            tuple(dict.fromkeys((*self.open, *other.open))),
            tuple(dict.fromkeys((*self.unproven, *other.unproven))),
        )

    def __str__(self) -> str:
        lines = [
            f"{self.num_nodes} nodes justified, {self.how['open']} of them by their op's rule alone"
        ]
        if self.open:
            more = f" and {len(self.open) - _SHOWN} more" if len(self.open) > _SHOWN else ""
            lines.append(f"by rule alone: {', '.join(self.open[:_SHOWN])}{more}")
        return "\n".join((*lines, *(f"not justified: {each}" for each in self.unproven)))
