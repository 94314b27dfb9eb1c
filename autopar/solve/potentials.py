"""The potentials of one tensor's readers, and the two steps that raise the bound with them.

Terms. A *decision* is the choice of an op's strategy, or of the strategy of its recomputation. Its
*costs* are the reduced costs of the strategies. The *leeway* of a layout is the amount by which the
least cost of a strategy that produces or reads the layout exceeds the least of all costs. The
readers of one tensor in one phase share a *group*: the collectives between its layouts, and its
*sources*, the decisions that produce the tensor.

A reader c has a potential π[c,l] per layout l: the worth of l to it. The potential is added to the
costs of its strategies that read l, and subtracted from the costs of all sources that supply l.
Over a collective a from one layout to another, the potentials of all readers together rise by at
most its cost:

    Σ_c max(0, π[c,head(a)] − π[c,tail(a)]) ≤ cost(a)

The invariant: each step preserves this, and never decreases the least cost of a decision. So the
bound, which is the sum of these least costs, only increases.

    raise_worth   raise π where all sources have leeway, and at the layouts that collectives lead
                  to from there: the reader's costs rise
    lower_worth   lower π where the reader has leeway, as far as the layouts that collectives
                  lead to from there allow: the sources' costs rise
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_GIVEN = 1e-3  # largest share of the potentials that rounding may lose
_FINEST = 1e-12  # smallest unit of potentials in seconds
Share = Callable[["Decision"], float]
"""Function that returns the share of its leeway that a decision gives."""


@dataclass(eq=False, slots=True)
class Decision:
    """The choice of a strategy, or of no strategy if `optional`.

    Attributes:
        prices: price of each strategy.
        optional: whether no strategy may be chosen.
        place: position in the order of a sweep.
        share: share of the leeway for one reader.
        costs: reduced cost of each strategy at the current potentials.
    """

    prices: Floats
    optional: bool = False
    place: int = 0
    share: float = 1.0
    costs: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.costs = self.prices.copy()

    def reprice(self, more: Floats | float) -> None:
        """Add an amount per strategy to the prices and to the costs."""
        self.prices, self.costs = self.prices + more, self.costs + more

    @property
    def least(self) -> float:
        """The least cost of a strategy; at most 0 if the decision is optional."""
        least = float(self.costs.min())
        return min(least, 0.0) if self.optional else least


@dataclass(eq=False, slots=True)
class Side:
    """The strategies of a decision by the layout in which they produce or read a tensor.

    Attributes:
        decision: the decision.
        at: layout of each strategy.
        times: multiplicity of each strategy's supply; 0 if it supplies nothing.
        layouts: the supplied layouts.
        multiplicities: their multiplicities.
    """

    decision: Decision
    at: Ints
    times: Floats
    layouts: Ints = field(init=False)
    multiplicities: Floats = field(init=False)
    _order: Ints = field(init=False)
    _starts: Ints = field(init=False)

    def __post_init__(self) -> None:
        some = np.flatnonzero(self.times)
        self._order = some[np.argsort(self.at[some], kind="stable")]
        self.layouts, self._starts = np.unique(self.at[self._order], return_index=True)
        self.multiplicities = self.times[self._order[self._starts]]

    def leeway(self) -> Floats:
        """Return the leeway by layout, in the order of `layouts`."""
        least = np.minimum.reduceat(self.decision.costs[self._order], self._starts)
        return (least - self.decision.least) / self.multiplicities


@dataclass(frozen=True, eq=False, slots=True)
class GroupArcs:
    """The collectives of a group, sorted by their heads. Each array has an entry per collective.

    Attributes:
        tails: the layouts from which they lead.
        heads: the layouts to which they lead.
        costs: seconds if memory costs nothing.
        weights: seconds of the bound that are lost per second by which potentials rise too far.
        sizes: bytes of kept versions.
        most_s: largest cost of kept versions: that of storing them on the hosts.
    """

    tails: Ints
    heads: Ints
    costs: Floats
    weights: Floats
    sizes: Floats
    most_s: Floats
    _to: tuple[Ints, Ints]
    _from: tuple[Ints, Ints]
    _by_tail: Ints

    @staticmethod
    def of(
        tails: Ints, heads: Ints, costs: Floats, weights: Floats, sizes: Floats, most_s: Floats
    ) -> GroupArcs:
        """Sort the collectives by their heads.

        Args:
            tails, heads, costs, weights, sizes, most_s: the attributes, in any order.
        """
        order = np.argsort(heads, kind="stable")
        tails, heads = tails[order], heads[order]
        by_tail = np.argsort(tails, kind="stable")
        to, come = (np.unique(ends, return_index=True) for ends in (heads, tails[by_tail]))
        return GroupArcs(
            tails,
            heads,
            costs[order],
            weights[order],
            sizes[order],
            most_s[order],
            to,
            come,
            by_tail,
        )

    def spread(self, least: Floats, costs: Floats) -> Floats:
        """Relax the cost of each layout over the collectives that lead to it, until none changes
        (Bellman and Ford, all collectives at once).

        Args:
            least: cost of each layout, ∞ if it is not available; changed in place.
            costs: seconds of each collective.

        Returns:
            `least`: the least cost at which each layout can be reached.
        """
        to, starts = self._to
        while len(to):
            reached = np.minimum.reduceat(least[self.tails] + costs, starts)
            if not (reached < least[to]).any():
                break
            least[to] = np.minimum(least[to], reached)
        return least

    def draw(self, most: Floats, costs: Floats) -> Floats:
        """Propagate the worth of layouts against the direction of collectives.

        Args:
            most: worth of each layout, −∞ if there is none; changed in place.
            costs: seconds of each collective.

        Returns:
            `most`: for each layout, the largest worth minus the cost of the collectives that lead
                there.
        """
        come, starts = self._from
        heads, costs = self.heads[self._by_tail], costs[self._by_tail]
        while len(come):
            reached = np.maximum.reduceat(most[heads] - costs, starts)
            if not (reached > most[come]).any():
                break
            most[come] = np.maximum(most[come], reached)
        return most


GroupState = tuple[Floats, Floats, Floats, list[tuple[Floats, Floats]]]
"""Prices, costs and rises of a group, and the potentials and rises of each reader."""


@dataclass(eq=False, slots=True)
class ReaderGroup:
    """The readers of a tensor in one phase, and the collectives and sources that they share.

    Attributes:
        variant: number of the variant.
        late: whether the readers are in backward and the tensor is a forward value.
        useful: whether each layout is read, or leads to one that is.
        num: number of layouts, without versions.
        arcs: the collectives.
        sources: the decisions that produce the tensor.
        readers: the readers.
        costs: costs of the collectives at the current price of memory.
        rises: sum over all readers of the rise of π over each collective; maintained if there are
            several readers.
    """

    variant: int
    late: bool
    useful: NDArray[np.bool_]
    num: int
    arcs: GroupArcs
    sources: list[Side] = field(default_factory=list)
    readers: list[PricedReader] = field(default_factory=list)
    costs: Floats = field(init=False)
    rises: Floats = field(init=False)
    _priced: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._priced = self.costs = self.arcs.costs
        self.rises = np.zeros(len(self.costs))

    def begin(self) -> None:
        """Set all potentials to 0. The caller resets the costs of decisions."""
        self.rises[:] = 0.0
        for reader in self.readers:
            reader.worth, reader.risen = np.zeros(len(self.useful)), np.zeros(len(self.costs))

    def state(self) -> GroupState:
        """Return prices, costs and potentials, for `go_back`."""
        return (
            self._priced,
            self.costs,
            self.rises.copy(),
            [(reader.worth, reader.risen) for reader in self.readers],
        )

    def go_back(self, state: GroupState) -> None:
        """Restore a saved state. The costs of decisions are not changed."""
        self._priced, self.costs, self.rises = state[0], state[1], state[2].copy()
        for reader, (worth, risen) in zip(self.readers, state[3], strict=True):
            reader.worth, reader.risen = worth, risen

    def short(self) -> list[Floats]:
        """Return each reader's potentials, rounded to few digits. All are first scaled down by a
        small share, so that rises after rounding do not exceed the costs of collectives."""
        lowest = 0.0 if self.late else min(float(reader.worth.min()) for reader in self.readers)
        worths = [
            np.where(self.useful, reader.worth - lowest, 0.0) * (1.0 - _GIVEN)
            for reader in self.readers
        ]
        unit = (
            _GIVEN
            / len(worths)
            * float(self.costs[(self.costs > 0.0) & (self.arcs.sizes == 0.0)].min(initial=np.inf))
        )
        unit = max(min(unit, _GIVEN * max(float(worth.max()) for worth in worths)), _FINEST)
        per_unit = 10.0 ** math.ceil(-math.log10(unit))
        return self.at_rest([np.floor(worth * per_unit) / per_unit for worth in worths])

    def reprice(self, per_byte: float) -> None:
        """Add seconds per byte to the cost of kept versions, and lower the potentials of versions
        accordingly (`at_rest`)."""
        self._priced = self._priced + per_byte * self.arcs.sizes
        self.costs = np.minimum(self._priced, self.arcs.most_s)
        if self.arcs.sizes.any():
            for reader, worth in zip(
                self.readers, self.at_rest([reader.worth for reader in self.readers]), strict=True
            ):
                reader.set(worth)

    def at_rest(self, worths: Sequence[Floats]) -> list[Floats]:
        """Return the potentials with those of versions lowered as far as the rows allow: Σ_c π[c,l]
        minus the cost of keeping l, divided among the readers in proportion."""
        keeps = self.arcs.tails >= self.num
        if not keeps.any():
            return [*worths]
        to, at = self.arcs.heads[keeps], self.arcs.tails[keeps]
        total = sum(worths, np.zeros(len(self.useful)))[to]
        factor = np.maximum(0.0, total - self.costs[keeps]) / np.where(total > 0.0, total, 1.0)
        lowered = [worth.copy() for worth in worths]
        for worth in lowered:
            worth[at] = worth[to] * factor
        return lowered

    def lost(self) -> float:
        """Return the seconds of the bound that are lost because potentials rise by more than the
        costs of collectives."""
        rises = sum((reader.rise() for reader in self.readers), np.zeros(len(self.costs)))
        return float(self.arcs.weights @ np.maximum(0.0, rises - self.costs))


@dataclass(eq=False, slots=True)
class PricedReader:
    """One reader of a group.

    Attributes:
        group: the group.
        side: the strategies of the reader by layout.
        use: position of the reader among the uses of the variant.
        worth: π, by layout.
        risen: rise of π over each collective; maintained if there are several readers.
    """

    group: ReaderGroup
    side: Side
    use: int
    worth: Floats = field(init=False)
    risen: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.group.readers.append(self)
        self.worth, self.risen = np.zeros(len(self.group.useful)), np.zeros(len(self.group.costs))

    def rise(self) -> Floats:
        """Return the rise of π over each collective; 0 if it falls."""
        arcs = self.group.arcs
        return np.maximum(0.0, self.worth[arcs.heads] - self.worth[arcs.tails])

    def raise_worth(self, share: Share) -> None:
        """Raise π by a share of the leeway of all sources (see the module docstring)."""
        more = np.full(len(self.worth), np.inf)
        for source in self.group.sources:
            more[source.layouts] = np.minimum(
                more[source.layouts], share(source.decision) * source.leeway()
            )
        reached = self.group.arcs.spread(self.worth + more, self._room())
        self.set(np.where(np.isinf(reached), self.worth, reached))

    def lower_worth(self, share: Share) -> None:
        """Lower π by a share of the reader's leeway (see the module docstring)."""
        reached, at = np.full(len(self.worth), -np.inf), self.side.layouts
        reached[at] = self.worth[at] - share(self.side.decision) * self.side.leeway()
        reached = self.group.arcs.draw(reached, self._room())
        floor = 0.0 if self.group.late else float(reached[np.isfinite(reached)].min())
        self.set(
            np.where(np.isinf(reached), np.minimum(self.worth, floor), np.maximum(reached, floor))
        )

    def set(self, worth: Floats) -> None:
        """Set the potentials, and update the costs of decisions and the rises."""
        group, change, self.worth = self.group, worth - self.worth, worth
        self.side.decision.costs += self.side.times * change[self.side.at]
        for source in group.sources:
            source.decision.costs -= source.times * change[source.at]
        if len(group.readers) > 1:
            rise = self.rise()
            group.rises += rise - self.risen
            self.risen = rise

    def _room(self) -> Floats:
        """Return the cost of each collective minus the part that the other readers pay."""
        if len(self.group.readers) == 1:
            return self.group.costs
        return np.maximum(self.group.costs - self.group.rises + self.risen, self.risen)
