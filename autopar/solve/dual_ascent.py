"""A lower bound of huge programs without a solver, by dual ascent over tensors.

If the relaxation (`autopar.solve.formulation`) has some hundred thousand columns, no method of
HiGHS finishes in time. Its dual is a sum over decisions. Let π[c,l] ≥ 0 be the potentials of rows
(3), the only multipliers that do not follow from the others (`autopar.solve.multipliers`), such
that they rise over no collective by more than its cost. Then

    bound = Σ_n min_s d[x[n,s]] + Σ_n min(0, min_s d[rc[n,s]])

    d[x]  = price + Σ π of the strategy's operands − Σ π of its supply, including the supply of
          backward if a version may be kept
    d[rc] = likewise, for an op that backward recomputes

A *sweep* visits all decisions in order, and then in reverse order. Each decision gives its leeway
to the later readers of its results and the later sources of its operands
(`autopar.solve.potentials`), in as many equal shares as there are neighbours on the side with more.
This is sequential tree-reweighted message passing (Kolmogorov, 2006) with strategies as labels and
trees of collectives as pairwise terms. The bound never decreases. It does not converge to that of
the relaxation, but some sweeps of a few hundredths of a second each bring it within one per cent.

A kernel lowers the cost of a collective by its largest saving (rows 10 and 11), which proves less
than the relaxation does. Budgets are ignored unless memory has a price.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.core.layout_graph import LayoutGraph
from autopar.core.problem import Phase, Problem, Value, at_best
from autopar.core.solution import Multipliers
from autopar.core.streams import COMPUTE_BOUND, Load, OverlapWeights
from autopar.solve.memory_rows import budget_rows
from autopar.solve.paths import refusal, useful_arcs, worth_recomputing
from autopar.solve.potentials import (
    Decision,
    Floats,
    GroupArcs,
    GroupState,
    Ints,
    PricedReader,
    ReaderGroup,
    Share,
    Side,
)
from autopar.solve.prices import arc_loads, away_load, op_load, saved_load

# --------------------------------------------------------------------------------------------------
# Budget rows at prices: the Lagrangian relaxation of memory.
#
# With λ[r] ≥ 0 seconds per byte of row r, rows (6) to (8) of `autopar.solve.memory_rows` become
# costs of the choices that take bytes, minus the worth of the budget itself:
#
# Σ_r λ[r] · (static·x + held·bytes(l)·k + live·x + again·rc + reserve − budget)


@dataclass
class MemoryPrices:
    """The prices of bytes in a problem.

    Attributes:
        worths_s: budget row → the worth of the whole budget.
        of_ops, of_again: seconds by strategy of each op, and of each recomputed op, for all
            instances together.
        of_kept: per variant, seconds per byte of the version of one instance.
        given_s: the worth of the budget, minus that of the reserves.
        reserved_s: the worth of the reserves.
    """

    problem: Problem
    worths_s: Mapping[str, float] = field(default_factory=dict)
    of_ops: list[Floats] = field(init=False)
    of_again: dict[int, Floats] = field(default_factory=dict)
    of_kept: Floats = field(init=False)
    given_s: float = 0.0
    reserved_s: float = 0.0

    def __post_init__(self) -> None:
        ops = self.problem.ops
        self.of_ops, self.of_kept = (
            [np.zeros(len(op.strategies)) for op in ops],
            np.zeros(len(self.problem.variants)),
        )
        rows = [row for row in budget_rows(self.problem) if self.worths_s.get(row.name, 0.0) > 0.0]
        for row in rows:
            per_byte = self.worths_s[row.name] / max(self.problem.budget_bytes, 1)
            self.reserved_s += per_byte * row.reserve_bytes
            for v, num in row.kept:
                self.of_kept[v] += per_byte * num
            for n, sizes in row.live:
                self.of_ops[n] += per_byte * np.array(sizes, float)
            for n, sizes in row.recomputed:
                self.of_again[n] = self.of_again.get(n, 0.0) + per_byte * np.array(sizes, float)
        memory_s = sum(self.worths_s[row.name] for row in rows)
        per_byte = memory_s / max(self.problem.budget_bytes, 1)
        for n, op in enumerate(ops):
            self.of_ops[n] += (
                per_byte * op.count * np.array([s.static_bytes for s in op.strategies], float)
            )
        self.given_s = memory_s - self.reserved_s


# --------------------------------------------------------------------------------------------------
# The decisions, and the groups of readers between them.

Turn = tuple[PricedReader, bool]
"""A reader whose potentials are raised (True) or lowered (False)."""


@dataclass(frozen=True, slots=True)
class Potentials:
    """A saved state of an ascent: prices and costs of each decision, and the state of each
    group."""

    num_sweeps: int
    decisions: list[tuple[Floats, Floats]]
    groups: list[GroupState]


def _shares_at(visited: Decision, left: float) -> Share:
    """Return the shares at a visit: `left` for the visited decision, and their own shares for all
    others."""
    return lambda other: left if other is visited else other.share


class _GroupBuilder:
    """Builds the decisions of a problem, and the groups of readers of each tensor.

    Attributes:
        x, again, groups: as in `Ascent`.
    """

    def __init__(self, problem: Problem, balance: OverlapWeights) -> None:
        self.problem, self.balance = problem, balance
        useful = worth_recomputing(problem)
        ruled_out = problem.ruled_out()
        # A price at which no choice takes a strategy that is ruled out; any price proves a bound.
        penalty_s = sum(op.count * max(s.time_s for s in op.strategies) for op in problem.ops)
        self.x: list[Decision] = []
        for n in range(len(problem.ops)):
            prices = self._prices(n, again=False)
            for s in ruled_out.get(n, ()):
                prices[s] += penalty_s
            self.x.append(Decision(np.array(prices)))
        self.again = {
            n: Decision(np.array(self._prices(n, again=True)), optional=True)
            for n in range(len(problem.ops))
            if n in useful
        }
        self._known: dict[tuple[int, int, str, int], Ints] = {}
        self.groups: list[ReaderGroup] = []
        for v in range(len(problem.variants)):
            self._variant(v)

    def _price(self, load: Load) -> float:
        return load.priced_s(self.problem.overlap_slowdown, self.balance)

    def _prices(self, n: int, *, again: bool) -> list[float]:
        strategies = range(len(self.problem.ops[n].strategies))
        return [self._price(op_load(self.problem, n, s, again=again)) for s in strategies]

    def _variant(self, v: int) -> None:
        """Add the groups of one variant. Rows (3) and (4) of `autopar.solve.formulation` define
        their supply."""
        variant = self.problem.variants[v]
        value, uses = self.problem.values[variant.value], list(enumerate(variant.uses))
        made_layouts = self._at(value.graph, value.op, "outputs", value.result)
        read = {i: self._at(value.graph, use.op, "inputs", use.operand) for i, use in uses}
        first = [(i, use) for i, use in uses if use.phase == value.phase]
        if first:
            readers = [(i, self.x[use.op], read[i]) for i, use in first]
            self._group(
                v, False, [(self.x[value.op], made_layouts, np.ones(len(made_layouts)))], readers
            )
        later = [(i, self.x[use.op], read[i]) for i, use in uses if use.phase != value.phase]
        later += [
            (i, self.again[use.op], read[i])
            for i, use in first
            if use.read_again and use.op in self.again
        ]
        if not later or value.phase != "forward":
            return
        version = _versions(value, [made_layouts, *(read[i] for i, _ in first)])
        # Versions are separate layouts, from which keeping leads to the layouts in backward.
        num_versions = len(version)
        sources = [(self.x[value.op], made_layouts + num_versions, version[made_layouts])]
        sources += [(self.x[use.op], read[i] + num_versions, version[read[i]]) for i, use in first]
        sources += (
            [(self.x[value.op], made_layouts, np.ones(len(made_layouts)))] if value.resident else []
        )
        sources += (
            [(self.again[value.op], made_layouts, np.ones(len(made_layouts)))]
            if value.op in self.again
            else []
        )
        self._group(v, True, sources, later)

    def _group(
        self,
        v: int,
        late: bool,
        sources: Iterable[tuple[Decision, Ints, Floats]],
        readers: Sequence[tuple[int, Decision, Ints]],
    ) -> None:
        """Add a group. A layout from which no collective leads to a reader has no potential.

        Raises:
            InfeasibleError: if nothing leads to any reader, and some reader is more than an op that
                backward may recompute.
        """
        variant = self.problem.variants[v]
        graph = self.problem.values[variant.value].graph
        num = len(graph.layouts)
        sources = [(decision, at, times) for decision, at, times in sources if times.any()]
        at_hand = {layout for _, at, times in sources for layout in at[times > 0.0].tolist()}
        supplied = {layout % num for layout in at_hand}
        read_layouts = {layout for _, _, at in readers for layout in at.tolist()}
        numbers = useful_arcs(graph, supplied, read_layouts)
        arcs = [graph.arcs[a] for a in numbers]
        load = arc_loads(self.problem, v, late=late, count=variant.count)
        costs, weights = (
            np.array([self._price(load(arc)) for arc in arcs], float),
            np.ones(len(arcs)),
        )
        for arc, (saved_s, often) in self._kernel_savings(v, late).items():
            if arc in numbers:
                costs[numbers.index(arc)] -= saved_s
                weights[numbers.index(arc)] = often
        tails, heads = (
            np.array([getattr(arc, end) for arc in arcs], np.int64) for end in ("src", "dst")
        )
        useful = np.zeros(num * (1 + late), bool)
        useful[[*read_layouts]] = useful[tails] = True
        versions = np.array(
            sorted(layout - num for layout in at_hand if layout >= num and useful[layout - num]),
            np.int64,
        )
        useful[versions + num] = True
        sizes = np.concatenate([np.zeros(len(arcs)), np.array(graph.bytes, float)[versions]])
        tails, heads = np.concatenate([tails, versions + num]), np.concatenate([heads, versions])
        most_s = np.concatenate(
            [np.full(len(arcs), np.inf), [self._away(v, layout) for layout in versions.tolist()]]
        )
        costs, weights = (
            np.concatenate([costs, np.zeros(len(versions))]),
            np.concatenate([weights, np.zeros(len(versions))]),
        )
        arcs_at_hand = GroupArcs.of(tails, heads, costs, weights, sizes, most_s)
        group = ReaderGroup(v, late, useful, num, arcs_at_hand)
        group.sources += [
            Side(decision, at, times * useful[at])
            for decision, at, times in sources
            if (times * useful[at]).any()
        ]
        if not group.sources:
            if all(decision.optional for _, decision, _ in readers):
                return  # its readers are not recomputed; the bound holds without them
            raise refusal(self.problem)
        for i, decision, at in readers:
            PricedReader(group, Side(decision, at, np.ones(len(at))), i)
        self.groups.append(group)

    def _away(self, v: int, layout: int) -> float:
        """Return the cost of keeping a layout on the hosts, in seconds."""
        variant = self.problem.variants[v]
        away_s = self.problem.values[variant.value].away(layout)
        return math.inf if math.isinf(away_s) else self._price(away_load(away_s, variant.count))

    def _kernel_savings(self, v: int, late: bool) -> dict[int, tuple[float, int]]:
        """Return collective → the largest saving of a kernel in seconds, and the number of kernels
        that could run it."""
        savings: dict[int, tuple[float, int]] = {}
        for kernel in self.problem.kernels.get((v, late), ()):
            for hidden in kernel.hides:
                saved_s = -self._price(
                    saved_load(self.problem, v, late=late, saved_s=hidden.saved_s)
                )
                most, num = savings.get(hidden.arc, (0.0, 0))
                savings[hidden.arc] = max(most, saved_s), num + 1
        return savings

    def _at(self, graph: LayoutGraph, n: int, side: str, position: int) -> Ints:
        """Return the layout of one operand or result, by strategy of an op."""
        key = id(graph), n, side, position
        if key not in self._known:
            layouts = (getattr(s.layouts, side)[position] for s in self.problem.ops[n].strategies)
            self._known[key] = np.array([graph.index[layout] for layout in layouts], np.int64)
        return self._known[key]

    def place_decisions(self) -> list[Decision]:
        """Put decisions in order (forward, recomputable ops in backward, backward) and number
        them."""
        phases: tuple[Phase, Phase] = ("forward", "backward")
        forward, backward = (
            [self.x[n] for n, op in enumerate(self.problem.ops) if op.phase == phase]
            for phase in phases
        )
        order = [*forward, *self.again.values(), *backward]
        for place, decision in enumerate(order):
            decision.place = place
        return order


def _versions(value: Value, at_hand: Iterable[Ints]) -> Floats:
    """Return an array over layouts: 1 if a version of the value may be kept in the layout, else 0.

    Args:
        value: the value.
        at_hand: layouts in which forward computes or reads it.
    """
    version = np.zeros(len(value.graph.layouts))
    for at in at_hand:
        version[at] = 1.0
    if value.keepable is not None:
        version[[layout for layout in range(len(version)) if layout not in value.keepable]] = 0.0
    return version


def _find_turns(
    order: Sequence[Decision], groups: Sequence[ReaderGroup]
) -> tuple[list[list[Turn]], list[list[Turn]]]:
    """List the readers whose potentials change at each decision, in order and in reverse
    order; set the share that each decision gives a neighbour.

    A reader that comes after all its sources is raised at the last of them in order, and
    lowered at the reader itself in reverse order.
    """
    there, back = ([list[Turn]() for _ in order] for _ in range(2))
    before, after = ([0] * len(order) for _ in range(2))
    for group in groups:
        for reader in group.readers:
            source, own_place = (
                max(s.decision.place for s in group.sources),
                reader.side.decision.place,
            )
            if source != own_place:
                there[min(source, own_place)].append((reader, source < own_place))
                back[max(source, own_place)].append((reader, source > own_place))
            for side in group.sources:
                first, last = sorted((side.decision.place, own_place))
                after[first] += 1
                before[last] += 1
    for decision in order:
        decision.share = 1.0 / max(after[decision.place], before[decision.place], 1)
    return there, back


class Ascent:
    """The dual of a problem without a budget.

    Attributes:
        x, again: op → decision.
        order: all decisions in the order of a sweep.
        groups: the groups, with all potentials.
        worth: the price of memory.
        num_sweeps: number of sweeps so far.
    """

    def __init__(self, problem: Problem, balance: OverlapWeights = COMPUTE_BOUND) -> None:
        problem = at_best(problem)
        self.problem, self.balance, self.worth = problem, balance, MemoryPrices(problem)
        builder = _GroupBuilder(problem, balance)
        self.x, self.again, self.groups = builder.x, builder.again, builder.groups
        self.order = builder.place_decisions()
        self._turns = _find_turns(self.order, self.groups)
        self.num_sweeps = 0

    @property
    def bound_s(self) -> float:
        """The bound that the potentials prove, in seconds."""
        return sum(decision.least for decision in self.order) - self.worth.given_s

    @property
    def num_strategies(self) -> int:
        """The number of strategies of all decisions."""
        return sum(len(decision.prices) for decision in self.order)

    @property
    def num_flows(self) -> int:
        """The number of collectives times readers, over all groups."""
        return sum(len(group.costs) * len(group.readers) for group in self.groups)

    @property
    def num_potentials(self) -> int:
        """The number of potentials of useful layouts, over all groups."""
        return sum(int(group.useful.sum()) * len(group.readers) for group in self.groups)

    def reprice(self, worths_s: Mapping[str, float]) -> None:
        """Change the prices of memory and keep the potentials.

        Args:
            worths_s: budget row → seconds that the whole budget is worth there.
        """
        before, self.worth = self.worth, MemoryPrices(self.problem, worths_s)
        for n, decision in enumerate(self.x):
            decision.reprice(self.worth.of_ops[n] - before.of_ops[n])
        for n, decision in self.again.items():
            decision.reprice(
                self.worth.of_again.get(n, 0.0)
                - before.of_again.get(n, np.zeros(len(decision.prices)))
            )
        for group in self.groups:
            group.reprice(float(self.worth.of_kept[group.variant] - before.of_kept[group.variant]))

    def potentials(self) -> Potentials:
        """Copy the state of all decisions and groups, for `go_back`."""
        decisions = [(decision.prices, decision.costs.copy()) for decision in self.order]
        return Potentials(self.num_sweeps, decisions, [group.state() for group in self.groups])

    def go_back(self, problem: Problem, potentials: Potentials) -> None:
        """Restore potentials from before memory had a price, for a problem that differs only in
        its moments."""
        self.problem = at_best(problem)
        self.worth, self.num_sweeps = MemoryPrices(self.problem), potentials.num_sweeps
        for decision, (prices, costs) in zip(self.order, potentials.decisions, strict=True):
            decision.prices, decision.costs = prices, costs.copy()
        for group, state in zip(self.groups, potentials.groups, strict=True):
            group.go_back(state)

    def sweep(self) -> None:
        """Visit all decisions in order, then in reverse order, and raise the bound at each."""
        self.num_sweeps += 1
        there, back = self._turns
        for turns, order in ((there, self.order), (back, self.order[::-1])):
            for decision in order:
                for i, (reader, up) in enumerate(turns[decision.place]):
                    share = decision.share / max(
                        1.0 - i * decision.share, decision.share
                    )  # so that all neighbours get the same
                    change = reader.raise_worth if up else reader.lower_worth
                    change(_shares_at(decision, share))

    def multipliers(self) -> Multipliers:
        """Round the potentials to the precision of plans, and return them with their bound.

        Readers give all their leeway first, so that fewer potentials remain.
        """
        for group in self.groups:
            for reader in group.readers:
                reader.lower_worth(lambda _: 1.0)
        for decision in self.order:
            decision.costs = decision.prices.copy()
        potentials: dict[tuple[int, int, int, int], float] = {}
        for group in self.groups:
            worths = group.short()
            group.begin()
            for reader, worth in zip(group.readers, worths, strict=True):
                reader.set(worth)
                key = group.variant, int(group.late), reader.use
                potentials |= {
                    (*key, i): float(worth[i]) for i in np.flatnonzero(worth[: group.num]).tolist()
                }
        bound = self.bound_s - sum(group.lost() for group in self.groups) - self.worth.reserved_s
        penalties = {n: tuple((each.costs - each.least).tolist()) for n, each in enumerate(self.x)}
        return Multipliers(
            max(bound, 0.0),
            potentials,
            self.worth.worths_s,
            self.balance,
            penalties_s=penalties,
        )
