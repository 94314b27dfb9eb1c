"""A plan from potentials: decisions one after the other, each the cheapest by what is settled and by what potentials say of the rest.

Where a reader's tensor is there already, what it costs to lead it to the reader stands in place of the reader's potentials, and so where
its reader is settled. A layout that some reader has it in is at hand for the others. All versions are kept, and nothing runs again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autopar.solve.ascent import Ascent
from autopar.solve.potentials import Decision, Floats, Group, Reader

_NEVER = 1e30  # seconds: of a layout that nothing leads to


@dataclass
class _Settled:
    """What is settled of each group.

    Attributes:
        at_hand: layouts that the tensor is in. read: readers and the layouts in which they read it.
    """

    ascent: Ascent
    at_hand: dict[int, list[int]] = field(default_factory=dict)
    read: dict[int, list[tuple[Reader, int]]] = field(default_factory=dict)

    def costs(self, decision: Decision, groups: list[int]) -> Floats:
        """Of each strategy, given what is settled."""
        found = decision.costs.copy()
        for g in groups:
            group = self.ascent.groups[g]
            there = self._led(group, self.at_hand[g]) if g in self.at_hand else None
            for reader in group.readers:
                if there is not None and reader.side.decision is decision:
                    found += (there - reader.worth)[reader.side.at]
            for source in group.sources:
                if source.decision is decision:
                    for reader, layout in self.read.get(g, ()):
                        costs = self._leading(group, layout)
                        costs = costs if there is None else np.minimum(costs, there[layout])
                        found += source.times * (reader.worth + costs)[source.at]
        return found

    def settle(self, decision: Decision, strategy: int, groups: list[int]) -> None:
        for g in groups:
            group = self.ascent.groups[g]
            for source in group.sources:
                if source.decision is decision and source.times[strategy]:
                    self.at_hand.setdefault(g, []).append(int(source.at[strategy]))
            for reader in group.readers:
                if reader.side.decision is decision:
                    layout = int(reader.side.at[strategy])
                    self.read.setdefault(g, []).append((reader, layout))
                    if g in self.at_hand:
                        self.at_hand[g].append(layout)

    def _led(self, group: Group, layouts: list[int]) -> Floats:
        """What leads from any of these to each layout."""
        costs = np.full(len(group.useful), np.inf)
        costs[layouts] = 0.0
        return np.minimum(group.spread(costs, group.costs), _NEVER)

    def _leading(self, group: Group, layout: int) -> Floats:
        """What leads from each layout to this one."""
        costs = np.full(len(group.useful), -np.inf)
        costs[layout] = 0.0
        return np.minimum(-group.drawn(costs, group.costs), _NEVER)


def decided(ascent: Ascent, *, back: bool = False) -> tuple[int, ...]:
    """A strategy per op.

    Args:
        back: decide in the order of the way back.
    """
    groups: dict[int, list[int]] = {}
    for g, group in enumerate(ascent.groups):
        places = {side.decision.place for side in (*group.sources, *(reader.side for reader in group.readers))}
        for place in sorted(places):
            groups.setdefault(place, []).append(g)
    settled, found = _Settled(ascent), dict[int, int]()
    again = {decision.place for decision in ascent.again.values()}
    for decision in ascent.order[::-1] if back else ascent.order:
        if decision.place not in again:
            here = groups.get(decision.place, [])
            found[decision.place] = strategy = int(np.argmin(settled.costs(decision, here)))
            settled.settle(decision, strategy, here)
    return tuple(found[decision.place] for decision in ascent.x)
