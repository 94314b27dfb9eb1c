"""The program, formula by formula.

Indices: n op, s strategy, v variant of a value, l layout of the value, a arc (one collective), c reader (op and operand).
All variables are multiplied in the objective by the number of instances they stand for (`count`), so that repeated
layers cost one block of variables.

    x[n,s] ∈ {0,1}    op n runs with strategy s                                        Σ_s x[n,s] = 1              (1)
    f[c,a] ≥ 0        reader c gets the value over arc a
    r[a]   ≥ f[c,a]   arc a is paid once for all readers c of the same phase                                       (2)
    supply(l) + Σ_{a into l} f[c,a] − Σ_{a from l} f[c,a] ≥ demand(c,l)                for every reader c, layout l (3)
        demand(c,l) = Σ_{s: s reads the operand in l} x[c,s]
        supply(l)   = Σ_{s: s makes the value in l} x[producer,s]                      readers of the same phase
        supply(l)   = k[v,l] + Σ_s rc[producer,s: makes l]                             backward readers of forward values
                      (+ the producer's own layout where the value is resident: parameters, inputs)
    k[v,l] ∈ {0,1}    version l is kept for backward     k[v,l] ≤ supply(l) + Σ_{c forward} demand(c,l)           (4)
    rc[n,s] ∈ {0,1}   backward runs n again with s       Σ_s rc[n,s] ≤ 1; its operands are backward readers        (5)
    Σ static·x + Σ count·bytes(l)·k[v,l] + reserve ≤ budget                                                        (6)
    Σ (static + gradient)·x + reserve ≤ budget                                                                     (7)

    minimise Σ count·time·x + Σ count·time·rc + Σ count·time(a)·r[a]

The flow form (3) has the same relaxation value as a table of layout pairs with far fewer variables, and finds chains of
collectives by itself. Versions (4, 5) replace a keep bit per op: keeping the sharded tensor and gathering it again in
backward is one of the choices, and so are ZeRO-3 and its mixtures, since parameters are values like others.
`bounded=False` leaves rows (6) and (7) out, for asking how small a budget could be.
Where memory is ample, rc is left out and k is free (`with_memory=False`): a relaxation of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pulp

from autopar.problem import Problem, Use
from autopar.redistribute import LayoutGraph

SCALE = 1e6  # objective in microseconds: keeps coefficients near 1 for the solver's tolerances
KEPT_ROW, GRADIENT_ROW = "budget_kept", "budget_gradients"
Terms = list[tuple[pulp.LpVariable, float]]


@dataclass
class Formulation:
    """The PuLP model of a problem, and its variables by index."""

    problem: Problem
    with_memory: bool
    relaxed: bool = False
    bounded: bool = True
    model: pulp.LpProblem = field(init=False)
    x: list[list[pulp.LpVariable]] = field(init=False)
    again: dict[int, list[pulp.LpVariable]] = field(default_factory=dict)
    keep: dict[tuple[int, int], pulp.LpVariable] = field(default_factory=dict)
    _objective: Terms = field(default_factory=list)
    _count: int = 0

    def __post_init__(self) -> None:
        self.model = pulp.LpProblem("autopar", pulp.LpMinimize)
        self._strategies()
        for v in range(len(self.problem.variants)):
            self._variant(v)
        if self.with_memory and self.bounded:
            unit = 1.0 / max(self.problem.budget_bytes, 1)
            room = (self.problem.budget_bytes - self.problem.reserve_bytes) * unit
            for name, terms in self.resting(unit).items():
                self._row(terms, pulp.LpConstraintLE, room, name)
        self.model += pulp.LpAffineExpression(self._objective)

    @property
    def num_variables(self) -> int:
        return self.model.numVariables()

    @property
    def num_constraints(self) -> int:
        return self.model.numConstraints()

    def _binary(self, name: str) -> pulp.LpVariable:
        return self.model.add_variable(name, 0, 1, pulp.LpContinuous if self.relaxed else pulp.LpBinary)

    def _flow(self, cost_s: float) -> pulp.LpVariable:
        self._count += 1
        variable = self.model.add_variable(f"f{self._count}", 0)
        if cost_s:
            self._objective.append((variable, cost_s * SCALE))
        return variable

    def _row(self, terms: Terms, sense: int, right: float, name: str | None = None) -> None:
        self.model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, name, right))

    def _strategies(self) -> None:
        """Rows (1) and (5)."""
        self.x = []
        for n, op in enumerate(self.problem.ops):
            row = [self._binary(f"x{n}_{s}") for s in range(len(op.strategies))]
            self.x.append(row)
            self._row([(v, 1) for v in row], pulp.LpConstraintEQ, 1)
            self._objective += [(v, op.count * s.time_s * SCALE) for v, s in zip(row, op.strategies, strict=True)]
            if self.with_memory and op.recomputable:
                self.again[n] = [self._binary(f"rc{n}_{s}") for s in range(len(op.strategies))]
                self._row([(v, 1) for v in self.again[n]], pulp.LpConstraintLE, 1)
                self._objective += [
                    (v, op.count * s.time_s * SCALE) for v, s in zip(self.again[n], op.strategies, strict=True)
                ]

    def _demand(self, use: Use, graph: LayoutGraph, variables: list[pulp.LpVariable]) -> dict[int, Terms]:
        """layout → the strategies that read the operand in it."""
        result: dict[int, Terms] = {}
        for variable, strategy in zip(variables, self.problem.ops[use.op].strategies, strict=True):
            result.setdefault(graph.index[strategy.layouts.inputs[use.operand]], []).append((variable, 1))
        return result

    def _supply(self, v: int, variables: list[pulp.LpVariable]) -> dict[int, Terms]:
        """layout → the strategies that make the value in it."""
        value = self.problem.values[self.problem.variants[v].value]
        result: dict[int, Terms] = {}
        for variable, strategy in zip(variables, self.problem.ops[value.op].strategies, strict=True):
            result.setdefault(value.graph.index[strategy.layouts.outputs[value.result]], []).append((variable, 1))
        return result

    def _variant(self, v: int) -> None:
        variant = self.problem.variants[v]
        value = self.problem.values[variant.value]
        graph = value.graph
        supply = self._supply(v, self.x[value.op])
        now = [self._demand(u, graph, self.x[u.op]) for u in variant.uses if u.phase == value.phase]
        later = [self._demand(u, graph, self.x[u.op]) for u in variant.uses if u.phase != value.phase]
        again = [u for u in variant.uses if u.phase == value.phase and u.op in self.again]
        later += [self._demand(u, graph, self.again[u.op]) for u in again]
        self._flows(graph, variant.count, supply, now)
        if later:
            self._flows(graph, variant.count, self._later_supply(v, supply, now), later)

    def _later_supply(self, v: int, supply: dict[int, Terms], now: list[dict[int, Terms]]) -> dict[int, Terms]:
        """Row (4), and what backward finds."""
        variant = self.problem.variants[v]
        value = self.problem.values[variant.value]
        versions = sorted({*supply, *(layout for demand in now for layout in demand)})
        found: dict[int, Terms] = {}
        for layout in versions:
            free = value.resident and layout in supply
            made = supply.get(layout, []) + [t for demand in now for t in demand.get(layout, [])]
            keep = self._binary(f"k{v}_{layout}") if self.with_memory else self.model.add_variable(f"k{v}_{layout}", 0, 1)
            self.keep[v, layout] = keep
            self._row([(keep, 1), *((variable, -c) for variable, c in made)], pulp.LpConstraintLE, 0)
            found[layout] = [(keep, 1), *(supply[layout] if free else [])]
        if value.op in self.again:
            for layout, terms in self._supply(v, self.again[value.op]).items():
                found[layout] = found.get(layout, []) + terms
        return found

    def _flows(self, graph: LayoutGraph, count: int, supply: dict[int, Terms], demands: list[dict[int, Terms]]) -> None:
        """Rows (2) and (3) for all readers of one phase."""
        arcs = _useful(graph, supply.keys(), {layout for demand in demands for layout in demand})
        shared = len(demands) > 1
        paid = [self._flow(count * graph.arcs[a].time_s) for a in arcs] if shared else []
        for demand in demands:
            flows = [self._flow(0.0 if shared else count * graph.arcs[a].time_s) for a in arcs]
            balance: dict[int, Terms] = {layout: list(supply.get(layout, [])) for layout in range(len(graph.layouts))}
            for flow, a in zip(flows, arcs, strict=True):
                balance[graph.arcs[a].dst].append((flow, 1))
                balance[graph.arcs[a].src].append((flow, -1))
            for layout, terms in balance.items():
                terms += [(variable, -c) for variable, c in demand.get(layout, [])]
                if any(c < 0 for _, c in terms):
                    self._row(_merged(terms), pulp.LpConstraintGE, 0)
            for pay, flow in zip(paid, flows, strict=False):
                self._row([(pay, 1), (flow, -1)], pulp.LpConstraintGE, 0)

    def resting(self, unit: float) -> dict[str, Terms]:
        """Left sides of rows (6) and (7) without the reserve, in bytes times `unit`, by row name."""
        problem = self.problem
        static: Terms = []
        gradients: Terms = []
        for op, row in zip(problem.ops, self.x, strict=True):
            for variable, s in zip(row, op.strategies, strict=True):
                static.append((variable, op.count * s.static_bytes * unit))
                gradients.append((variable, op.count * (s.static_bytes + s.gradient_bytes) * unit))
        kept = [
            (variable, problem.variants[v].count * problem.values[problem.variants[v].value].graph.bytes[layout] * unit)
            for (v, layout), variable in self.keep.items()
        ]
        rows = {KEPT_ROW: [*static, *kept], GRADIENT_ROW: gradients}
        return {name: [(variable, c) for variable, c in terms if c] for name, terms in rows.items()}


def _merged(terms: Terms) -> Terms:
    """Terms with each variable once (a strategy may both make and read a layout)."""
    total: dict[pulp.LpVariable, float] = {}
    for variable, coefficient in terms:
        total[variable] = total.get(variable, 0.0) + coefficient
    return [(variable, c) for variable, c in total.items() if c]


def _useful(graph: LayoutGraph, supplied: Iterable[int], wanted: Iterable[int]) -> list[int]:
    """Arcs that lie on some path from a supplied to a wanted layout."""
    forward = _reach(graph, supplied, backwards=False)
    backward = _reach(graph, wanted, backwards=True)
    return [a for a, arc in enumerate(graph.arcs) if arc.src in forward and arc.dst in backward]


def _reach(graph: LayoutGraph, start: Iterable[int], *, backwards: bool) -> set[int]:
    seen, stack = set(start), list(start)
    steps: dict[int, list[int]] = {}
    for arc in graph.arcs:
        a, b = (arc.dst, arc.src) if backwards else (arc.src, arc.dst)
        steps.setdefault(a, []).append(b)
    while stack:
        for after in steps.get(stack.pop(), []):
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return seen
