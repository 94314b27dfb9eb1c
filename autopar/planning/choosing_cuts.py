"""Which cuts are worth stages' plans, by what units are thought to take and to need on each stage's devices."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.capture.trace import Trace
from autopar.errors import ConstraintError
from autopar.planning.asked import Asked
from autopar.planning.units import Unit, balanced, fastest
from autopar.request import UNLIMITED
from autopar.stages import NO_PIPELINE, CutPoint, find_refusal

_LACKS = 16  # the share of its memory that a stage lacks at least where it does not fit

_MOST_TRIED = 64  # cuts, each of which places all nodes of a trace

Units = Sequence[Sequence[Unit]]
"""Per stage, what units take on its devices."""


@dataclass
class CutChoice:
    """The cuts of one pipeline, as indices of the units that begin later stages.

    Attributes:
        room: per stage, the bytes that it is taken to have.
    """

    asked: Asked
    room: list[int] = field(init=False)

    def __post_init__(self) -> None:
        chunks = self.asked.wish.chunks
        self.room = [budget // chunks for budget in self.asked.budgets] * chunks

    def best(self, units: Units, *, ample: bool = False) -> tuple[int, ...]:
        """The cuts of the fastest step; as if memory sufficed, if it is taken to be `ample`."""
        asked, room = self.asked, [UNLIMITED] * len(self.room) if ample else self.room
        if len(asked.profiles) == 1 or asked.wish.chunks > 1:
            return balanced(units, asked.in_flight, room)
        return fastest(units, asked.in_flight, room, asked.how.num)

    def ways(self, units: Units) -> Iterator[tuple[int, ...]]:
        """The best, and, where devices have unequal memory, those if it sufficed: what stages need is not well known."""
        yield self.best(units)
        if self._unequal:
            yield self.best(units, ample=True)

    def others(self, units: Units, lacking: Mapping[int, int]) -> tuple[int, ...] | None:
        """The best where stages are taken to have as much less as they lacked; others may have room. None where all devices have the same
        memory, and where the cuts were asked for.

        Args:
            lacking: by stage that does not fit, the bytes that it is said to need.
        """
        if not self._unequal or self.asked.wish.cuts is not None:
            return None
        budgets = self.asked.budgets
        for stage, needed in lacking.items():
            budget = budgets[stage % len(budgets)]
            self.room[stage] = self.room[stage] * budget // max(needed, budget + budget // _LACKS)
        return self.best(units)

    @property
    def _unequal(self) -> bool:
        """Whether devices have unequal memory."""
        return len(set(self.asked.budgets)) > 1


def nearest_legal(part: Trace, points: Sequence[CutPoint], wanted: Sequence[int]) -> tuple[int, ...]:
    """The legal cuts that are nearest to the wanted ones, themselves where they are legal.

    The distance is the number of units by which cuts are moved. Cuts are tried in the order of their distance.

    Args:
        wanted: indices of the units that begin later stages.

    Raises:
        ConstraintError: none of the cuts that were tried is legal.
    """
    first = tuple(wanted)
    waiting, seen, refusal = [(0, first)], {first}, None
    for _ in range(_MOST_TRIED):
        if not waiting:
            break
        _, cuts = heapq.heappop(waiting)
        found = find_refusal(part, [points[index - 1].position for index in cuts])
        if found is None:
            return cuts
        refusal = refusal or found
        for moved in _moved_by_one(cuts, len(points)):
            if moved not in seen:
                seen.add(moved)
                distance = sum(abs(a - b) for a, b in zip(moved, first, strict=True))
                heapq.heappush(waiting, (distance, moved))
    assert refusal is not None, "the wanted cuts were tried"
    what = f"no way was found to cut the model into {len(first) + 1} stages: {refusal.what}"
    remedy = f"use a shorter pipeline axis, or {NO_PIPELINE}"
    raise ConstraintError(what, where=refusal.where, remedy=remedy) from refusal


def _moved_by_one(cuts: tuple[int, ...], num_points: int) -> Iterator[tuple[int, ...]]:
    """The cuts of which one begins one unit earlier or later; no two cuts coincide."""
    for place, index in enumerate(cuts):
        for other in (index - 1, index + 1):
            if 1 <= other <= num_points and other not in cuts:
                yield (*cuts[:place], other, *cuts[place + 1 :])
