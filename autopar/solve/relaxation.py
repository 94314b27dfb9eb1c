"""The multipliers of a problem without a budget, in which equal ops decide separately; and the
minimum cost of a part of a problem.

The relaxation is that of `autopar.solve.formulation` with rows (9), but an op has a set of
strategies x[n,g,s] for each *group* g of its instances, whose neighbours are equal. A row of a
variant is an average over its tensors: the coefficient of each group is the share of the tensors
that it computes or reads. So the multipliers of a row are those of each of its tensors, as needed
for a bound over instances.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.core.layout_graph import LayoutGraph
from autopar.core.problem import OverlapKernel, Problem, Use, at_best
from autopar.core.solution import Multipliers
from autopar.core.streams import Load
from autopar.solve.branching import BranchingVariables, Tree
from autopar.solve.formulation import AGAIN, CHOOSE, FLOW, SCALE, Formulation
from autopar.solve.highs import Engine, Live
from autopar.solve.lp import AT_MOST, EQUAL, Column, Floats, Terms
from autopar.solve.multipliers import round_value, tighter
from autopar.solve.paths import Demand, merge_terms
from autopar.solve.prices import op_load

_LEAST = 1e-7  # multipliers below this share of the largest cost are dropped
Shares = Mapping[int, float]
"""Group of an op → its share."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The instances of a problem in groups.

    Attributes:
        times: per op and group, the multiplicity of its time.
        made_shares: per variant, the share of its tensors that each group of the producer computes.
        read_shares: per variant and use, the share that each group of the reader reads.
        separate: variants without rows for readers in backward of values from forward.
    """

    times: tuple[tuple[float, ...], ...]
    made_shares: tuple[Shares, ...]
    read_shares: tuple[tuple[Shares, ...], ...]
    separate: frozenset[int]

    @staticmethod
    def one_group_per_op(problem: Problem) -> Spread:
        """Make one group per op."""
        times = tuple((float(op.count),) for op in problem.ops)
        read = tuple(tuple({0: 1.0} for _ in v.uses) for v in problem.variants)
        return Spread(times, tuple({0: 1.0} for _ in problem.variants), read, frozenset())


@dataclass
class _Grouped(Formulation):
    """The program with groups; `x` and `recomputed` of an op have the variables of all groups."""

    spread: Spread = field(kw_only=True)
    _now: int = -1  # the variant whose rows are being added

    def _strategies(self) -> None:
        useful = self._useful_again()
        for n, op in enumerate(self.problem.ops):
            self.x.append([])
            for g, times in enumerate(self.spread.times[n]):
                rows = [[self._binary(f"x{n}_{g}_{s}") for s in range(len(op.strategies))]]
                self._row((CHOOSE, n, g), [(v, 1) for v in rows[0]], EQUAL, 1)
                self.x[n] += rows[0]
                if n in useful:
                    rows.append([self._binary(f"rc{n}_{g}_{s}") for s in range(len(op.strategies))])
                    self._row((AGAIN, n, g), [(v, 1) for v in rows[1]], AT_MOST, 1)
                    self.recomputed.setdefault(n, []).extend(rows[1])
                for row, again in zip(rows, (False, True), strict=False):
                    shares = enumerate(row) if times else ()
                    loads = (
                        (x, op_load(self.problem, n, s, again=again).scale(times / op.count))
                        for s, x in shares
                    )
                    self.loads += [(x, load) for x, load in loads if load.serial_s]

    def _variant(self, v: int) -> None:
        self._now = v
        super()._variant(v)

    def _has_later(self, v: int) -> bool:
        return v not in self.spread.separate

    def _demand(self, use: Use, graph: LayoutGraph, variables: list[Column]) -> Demand:
        position = self.problem.variants[self._now].uses.index(use)
        shares = self.spread.read_shares[self._now][position]
        strategies = self.problem.ops[use.op].strategies
        return _by_layout(
            shares, variables, [graph.index[s.layouts.inputs[use.operand]] for s in strategies]
        )

    def _supply(self, v: int, variables: list[Column]) -> Demand:
        value = self.problem.values[self.problem.variants[v].value]
        strategies = self.problem.ops[value.op].strategies
        return _by_layout(
            self.spread.made_shares[v],
            variables,
            [value.graph.index[s.layouts.outputs[value.result]] for s in strategies],
        )

    def _products(self, v: int, kernel: OverlapKernel, variables: list[Column]) -> Terms:
        uses = enumerate(self.problem.variants[v].uses)
        shares = [self.spread.read_shares[v][i] for i, use in uses if use.op == kernel.op]
        shares += (
            [self.spread.made_shares[v]]
            if self.problem.values[self.problem.variants[v].value].op == kernel.op
            else []
        )
        num = len(self.problem.ops[kernel.op].strategies)
        return merge_terms(
            [
                (variables[group * num + s], share)
                for each in shares
                for group, share in each.items()
                for s in kernel.strategies
            ]
        )

    def _addends(self, kernel: OverlapKernel) -> list[Column]:
        return []  # no certificate has multipliers of these rows

    def _also(self, kernel: OverlapKernel) -> Iterator[tuple[int, list[Column]]]:
        yield from ()  # nor multipliers of these

    def _host(self) -> None:
        """Omit row (19), since a certificate has no multiplier for it."""

    def _ways(self) -> None:
        """Omit rows (15), since instances of a product may be divided in different ways."""


def _by_layout(shares: Shares, variables: list[Column], layouts: list[int]) -> Demand:
    terms: dict[int, Terms] = {}
    for group, share in shares.items():
        for s, layout in enumerate(layouts):
            terms.setdefault(layout, []).append((variables[group * len(layouts) + s], share))
    return terms


def relax_problem(
    problem: Problem, time_limit_s: float = math.inf, spread: Spread | None = None
) -> Multipliers:
    """Return the multipliers of rows (3) and of the first of rows (9), rounded to a few digits, and
    the relaxation's value. Those of the other rows follow from these.

    Args:
        problem: the problem.
        time_limit_s: time limit in seconds. If it is exceeded, the multipliers prove nothing.
        spread: groups of instances; by default equal ops share one decision.
    """
    problem = at_best(problem)
    values = tuple(
        replace(value, away_s=()) for value in problem.values
    )  # nothing is stored on the hosts if memory is free
    problem = replace(problem, values=values)
    program = _Grouped(problem, spread=spread or Spread.one_group_per_op(problem))
    engine = Engine(program.model, time_limit_s)
    relaxation = engine.relax(tighter(program, engine) if program.tighter else None)
    if relaxation is None:
        return Multipliers(0.0, {}, {})
    least = _LEAST * float(np.abs(engine.cost).max(initial=0.0))
    num = len(program.keys)
    flows = zip(program.keys, relaxation.duals[:num].tolist(), strict=True)
    potentials = {
        key[1:]: round_value(y / SCALE) for key, y in flows if key[0] == FLOW and y > least
    }
    rows = zip(program.tighter_keys, relaxation.duals[num:].tolist(), strict=True)
    versions = {
        (v, layout): round_value(-y / SCALE)
        for (v, layout, which), y in rows
        if not which and -y > least
    }
    return Multipliers(
        max(relaxation.bound / SCALE, 0.0),
        potentials,  # type: ignore[arg-type]  # four indices
        {},
        versions_s=versions,
    )


# --------------------------------------------------------------------------------------------------
# The minimum cost of a part of a problem whose rows to the rest are relaxed: a tree over its own
# rows and decisions.
#
# If a Lagrangian relaxes all rows, each op may choose any of several strategies of equal cost,
# although they suit none of its neighbours. Within the part no row is relaxed, and no op mixes
# strategies, so its minimum is closer to the cost of the part in a plan.


@dataclass(frozen=True, slots=True)
class PricedPart:
    """Some ops, each with one instance, and the tensors that only these ops make and read.

    Attributes:
        problem: the problem of these ops.
        recomputable: the ops that backward may recompute, regardless of the problem.
        further: per op, the cost of each strategy in addition to its time, in seconds, and that of
            its recomputation.
    """

    problem: Problem
    recomputable: frozenset[int]
    further: tuple[tuple[Floats, Floats], ...]


@dataclass
class _PartProgram(Formulation):
    part: PricedPart = field(kw_only=True)

    def _strategies(self) -> None:
        super()._strategies()
        loads = dict(self.loads)
        for n, (first, again) in enumerate(self.part.further):
            for variables, costs in ((self.x[n], first), (self.recomputed.get(n, []), again)):
                for variable, cost in zip(variables, costs, strict=False):
                    loads[variable] = loads.get(variable, Load()) + Load(float(cost))
        self.loads = list(loads.items())

    def _useful_again(self) -> set[int]:
        return set(self.part.recomputable)


def least_of(
    part: PricedPart, target_s: float, max_relaxations: int, time_limit_s: float = math.inf
) -> tuple[float, int]:
    """Return a lower bound of the cost of the part in seconds, and the number of solved
    relaxations.

    Args:
        part: the part of a problem.
        target_s: bound at which the search ends.
        max_relaxations: limit of relaxations after a first dive.
        time_limit_s: time limit in seconds.
    """
    program = _PartProgram(part.problem, part=part)
    engine = Engine(program.model, time_limit_s)
    if engine.relax() is None:
        return math.inf, 1
    live = Live(engine, tighter(program, engine))
    target = target_s * SCALE
    variables = BranchingVariables.of(program, engine, np.zeros(len(engine.names)))
    tree = Tree(variables, live, lambda _: (), lambda: target, 0.0, max_relaxations)
    bound = tree.dive().bound
    if bound < target:
        bound = max(bound, tree.branch().bound)
    return bound / SCALE, tree.num_relaxations
