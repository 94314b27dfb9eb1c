"""A lower bound of huge programs without a solver: by dual ascent, tensor by tensor.

Where the relaxation (`autopar.solve.formulation`) has some hundred thousand columns, no method of HiGHS ends in time. Its dual is a sum
over decisions: with the potentials π[c,l] ≥ 0 of rows (3), the one kind of multiplier that is not implied by the others
(`autopar.solve.multipliers`), and no collective over which they rise by more than it costs,

    bound = Σ_n min_s d[x[n,s]] + Σ_n min(0, min_s d[rc[n,s]])

    d[x]  = price + Σ π of what the strategy reads − Σ π of what it supplies, to backward too where a version may be kept so
    d[rc] = likewise, of an op that backward runs again

A *sweep* goes over all decisions, and back: each gives its leeway to the readers of what it supplies that come after it, and to the
sources of what it reads that do (`autopar.solve.potentials`), in as many equal shares as there are neighbours on the side that has more:
sequential tree-reweighted message passing (Kolmogorov, 2006), of which strategies are the labels and trees of collectives the pairwise
terms. Neither does the bound ever fall nor is it the relaxation's in the end, but some sweeps of a few hundredths of a second each
bring it within a per cent.

A kernel makes a collective cheaper by what it saves at most (rows 10 and 11), which proves less than the relaxation does. Budgets
play no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from autopar.problem import Multipliers, Phase, Problem
from autopar.redistribute import LayoutGraph
from autopar.solve.paths import useful_arcs
from autopar.solve.potentials import Decision, Floats, Group, Ints, Reader, Side
from autopar.solve.prices import arc_loads, op_load, saved_load
from autopar.solve.terms import worth_recomputing
from autopar.streams import ON_COMPUTE, Balance, Load

Turn = tuple[Reader, bool]
"""A reader whose potentials are to be raised, or else lowered."""


class Ascent:
    """The dual of a problem without a budget.

    Attributes:
        x, again: decisions by op. groups: with all potentials.
    """

    def __init__(self, problem: Problem, balance: Balance = ON_COMPUTE) -> None:
        self.problem, self.balance = problem, balance
        useful = worth_recomputing(problem)
        self.x = [self._decision(n, again=False) for n in range(len(problem.ops))]
        self.again = {n: self._decision(n, again=True) for n in range(len(problem.ops)) if n in useful}
        self._known: dict[tuple[int, int, str, int], Ints] = {}
        self.groups: list[Group] = []
        for v in range(len(problem.variants)):
            self._variant(v)
        self.order = self._ordered()
        self._there, self._back = self._turns()

    @property
    def bound_s(self) -> float:
        """What the potentials prove."""
        return sum(decision.least for decision in self.order)

    @property
    def num_strategies(self) -> int:
        return sum(len(decision.prices) for decision in self.order)

    @property
    def num_flows(self) -> int:
        return sum(len(group.costs) * len(group.readers) for group in self.groups)

    @property
    def num_potentials(self) -> int:
        return sum(int(group.useful.sum()) * len(group.readers) for group in self.groups)

    def sweep(self) -> None:
        """Once over all decisions, and back."""
        for turns, order in ((self._there, self.order), (self._back, self.order[::-1])):
            for decision in order:
                for i, (reader, up) in enumerate(turns[decision.place]):
                    left = decision.share / max(1.0 - i * decision.share, decision.share)  # so that all get the same

                    def share(other: Decision, here: Decision = decision, left: float = left) -> float:
                        return left if other is here else other.share

                    (reader.raised if up else reader.lowered)(share)

    def multipliers(self) -> Multipliers:
        """The potentials, from here on as short as a plan keeps them, and what they prove.

        Readers give all their leeway first, so that fewer potentials are left.
        """
        for group in self.groups:
            for reader in group.readers:
                reader.lowered(lambda _: 1.0)
        for decision in self.order:
            decision.costs = decision.prices.copy()
        potentials: dict[tuple[int, int, int, int], float] = {}
        for group in self.groups:
            worths = group.short()
            group.begin()
            for reader, worth in zip(group.readers, worths, strict=True):
                reader.set(worth)
                key = group.variant, int(group.late), reader.use
                potentials |= {(*key, i): float(worth[i]) for i in np.flatnonzero(worth).tolist()}
        bound = self.bound_s - sum(group.lost() for group in self.groups)
        return Multipliers(max(bound, 0.0), potentials, {}, self.balance)

    def _price(self, load: Load) -> float:
        return load.priced_s(self.problem.overlap_slowdown, self.balance)

    def _decision(self, n: int, *, again: bool) -> Decision:
        strategies = range(len(self.problem.ops[n].strategies))
        return Decision(np.array([self._price(op_load(self.problem, n, s, again=again)) for s in strategies]), optional=again)

    def _variant(self, v: int) -> None:
        """The groups of one variant: see rows (3) and (4) of `autopar.solve.formulation` for what supplies what."""
        variant = self.problem.variants[v]
        value, uses = self.problem.values[variant.value], list(enumerate(variant.uses))
        made = self._at(value.graph, value.op, "outputs", value.result)
        read = {i: self._at(value.graph, use.op, "inputs", use.operand) for i, use in uses}
        first = [(i, use) for i, use in uses if use.phase == value.phase]
        if first:
            readers = [(i, self.x[use.op], read[i]) for i, use in first]
            self._group(v, False, [(self.x[value.op], made, np.ones(len(made)))], readers)
        later = [(i, self.x[use.op], read[i]) for i, use in uses if use.phase != value.phase]
        later += [(i, self.again[use.op], read[i]) for i, use in first if use.op in self.again]
        if not later or value.phase != "forward":
            return
        version = np.zeros(len(value.graph.layouts))
        for at in (made, *(read[i] for i, _ in first)):
            version[at] = 1.0
        if value.keepable is not None:
            version[[layout for layout in range(len(version)) if layout not in value.keepable]] = 0.0
        sources = [(self.x[value.op], made, version[made] + float(value.resident))]
        sources += [(self.x[use.op], read[i], version[read[i]]) for i, use in first]
        sources += [(self.again[value.op], made, np.ones(len(made)))] if value.op in self.again else []
        self._group(v, True, sources, later)

    def _group(
        self, v: int, late: bool, sources: Iterable[tuple[Decision, Ints, Floats]], readers: Sequence[tuple[int, Decision, Ints]]
    ) -> None:
        """A group; what no collective leads to a reader from has no potential."""
        variant = self.problem.variants[v]
        graph = self.problem.values[variant.value].graph
        sources = [(decision, at, times) for decision, at, times in sources if times.any()]
        supplied = {layout for _, at, times in sources for layout in at[times > 0.0].tolist()}
        wanted = {layout for _, _, at in readers for layout in at.tolist()}
        numbers = useful_arcs(graph, supplied, wanted)
        arcs = [graph.arcs[a] for a in numbers]
        load = arc_loads(self.problem, v, late=late, count=variant.count)
        costs, weights = np.array([self._price(load(arc)) for arc in arcs], float), np.ones(len(arcs))
        for arc, (saved_s, num) in self._saved(v, late).items():
            if arc in numbers:
                costs[numbers.index(arc)] -= saved_s
                weights[numbers.index(arc)] = num
        tails, heads = (np.array([getattr(arc, end) for arc in arcs], np.int64) for end in ("src", "dst"))
        useful = np.zeros(len(graph.layouts), bool)
        useful[[*wanted]] = useful[tails] = True
        group = Group(v, late, useful, tails, heads, costs, weights)
        group.sources += [Side(decision, at, times * useful[at]) for decision, at, times in sources if (times * useful[at]).any()]
        for i, decision, at in readers:
            Reader(group, Side(decision, at, np.ones(len(at))), i)
        self.groups.append(group)

    def _saved(self, v: int, late: bool) -> dict[int, tuple[float, int]]:
        """Collective → the most that a kernel saves of it, and how many could."""
        found: dict[int, tuple[float, int]] = {}
        for kernel in self.problem.kernels.get((v, late), ()):
            for hidden in kernel.hides:
                saved_s = -self._price(saved_load(self.problem, v, late=late, saved_s=hidden.saved_s))
                most, num = found.get(hidden.arc, (0.0, 0))
                found[hidden.arc] = max(most, saved_s), num + 1
        return found

    def _at(self, graph: LayoutGraph, n: int, side: str, position: int) -> Ints:
        """Per strategy of an op, the layout of one operand or result."""
        key = id(graph), n, side, position
        if key not in self._known:
            layouts = (getattr(s.layouts, side)[position] for s in self.problem.ops[n].strategies)
            self._known[key] = np.array([graph.index[layout] for layout in layouts], np.int64)
        return self._known[key]

    def _ordered(self) -> list[Decision]:
        """Forward, what backward may run again, and backward."""
        phases: tuple[Phase, Phase] = ("forward", "backward")
        forward, backward = ([self.x[n] for n, op in enumerate(self.problem.ops) if op.phase == phase] for phase in phases)
        order = [*forward, *self.again.values(), *backward]
        for place, decision in enumerate(order):
            decision.place = place
        return order

    def _turns(self) -> tuple[list[list[Turn]], list[list[Turn]]]:
        """Whose potentials change at a decision's place, on the way there and back. And the share of each neighbour.

        What all sources come before is raised at the last of them on the way there, and lowered at the reader on the way back.
        """
        there, back = ([list[Turn]() for _ in self.order] for _ in range(2))
        before, after = ([0] * len(self.order) for _ in range(2))
        for group in self.groups:
            for reader in group.readers:
                source, own = max(s.decision.place for s in group.sources), reader.side.decision.place
                if source != own:
                    there[min(source, own)].append((reader, source < own))
                    back[max(source, own)].append((reader, source > own))
                for side in group.sources:
                    first, last = sorted((side.decision.place, own))
                    after[first] += 1
                    before[last] += 1
        for decision in self.order:
            decision.share = 1.0 / max(after[decision.place], before[decision.place], 1)
        return there, back
