"""The integer program, formula by formula.

Indices: op n, strategy s, variant v of a value, layout l of the value, arc a (one collective),
reader c (op and operand). The objective multiplies each variable by its number of instances
(`count`), so repeated layers share one block of variables.

Variables:

    x[n,s]  ∈ {0,1}   op n runs with strategy s
    f[c,a]  ∈ [0,1]   reader c gets the value over arc a
    r[a]    ∈ [0,1]   arc a is paid once for all readers of the same phase
    k[v,l]  ∈ {0,1}   version l of v is kept on the devices for backward, if it is keepable
    h[v,l]  ∈ {0,1}   version l is stored on the hosts and fetched in backward
    rc[n,s] ∈ {0,1}   backward runs op n again with strategy s

Rows:

    (1)  Σ_s x[n,s] = 1                                        one strategy per op
    (2)  r[a] ≥ f[c,a]                                         a reader's arc is paid
    (3)  supply(l) + Σ_{a into l} f[c,a] − Σ_{a from l} f[c,a] ≥ demand(c,l)
                                                               every demand of reader c is supplied
    (4)  k[v,l] + h[v,l] ≤ supply(l) + Σ_{c forward} demand(c,l)
                                                               a kept version exists in forward
    (5)  Σ_s rc[n,s] ≤ 1                                       an op runs again at most once
    (9)  k[v,l] ≤ supply(l) + Σ_{a into l} paid[a]             a version is made or arrives once
         k[v,l] ≤ Σ_{c forward} demand(c,l)                    if v is stored in any case
    (19) Σ host·x + Σ count·bytes(l)·h[v,l] ≤ host budget      if tensors may be stored on the hosts
    (20) Σ_{s ruled out} x[n,s] ≤ 0                            if constraints restrict op n

with

    demand(c,l) = Σ_{s: s reads the operand in l} x[c,s]
    supply(l)   = Σ_{s: s makes the value in l} x[producer,s]          for readers in the same phase
    supply(l)   = k[v,l] + Σ_{s: s makes l} rc[producer,s]             for backward readers of a
                  (+ the producer's layout if the value is resident)   forward value

In rows (3), (9), (12) and (18), k[v,l] means k[v,l] + h[v,l]. The operands of rc are backward
readers, except those that only ops without a use in backward need (`core.problem.Use.again`).
Budget rows (6), (7) and (8) are in `autopar.solve.memory_rows`. Rows (10) to (18) for overlap
kernels are in `autopar.solve.kernel_rows`.

Objective, with the prices of `autopar.solve.prices`:

    minimise Σ count·price·x + Σ count·price·rc + Σ count·price(a)·r[a] + Σ count·price·h[v,l]
             − the savings of overlap kernels

`autopar.solve.lazy_rows` adds early communication that outlasts the compute which it overlaps.

The flow form (3) has the same relaxation value as a table of layout pairs with far fewer variables,
and covers chains of collectives. Two readers share arcs without rows (2): f[c,a] = g[a] +
h[c,a], paid as g[a] + h[1,a] + h[2,a]. Versions (4, 5) replace one keep bit per op: keeping the
sharded tensor and gathering it again in backward is one of the choices, and so are ZeRO-3 and its
mixtures, since parameters are values like others. An op whose results neither backward nor another
op's recomputation can read has no rc. Budget rows are added on demand; without them the program is
a relaxation.

Rows (9) only cut off fractional solutions. Under (4) alone, several readers together, or a stored
layout next to a gathered one, supply more than one version. They are kept separately
(`Formulation.tighter`), for searches that branch. Their duals are among the multipliers of a proof
(`autopar.certificate.bound`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.core.layout_graph import LayoutGraph
from autopar.core.problem import Use
from autopar.core.streams import COMPUTE_BOUND, OverlapWeights
from autopar.solve.kernel_rows import UNSEEN, KernelRows, RowKey
from autopar.solve.lp import AT_LEAST, AT_MOST, EQUAL, Column, Costs, Terms
from autopar.solve.memory_rows import BudgetRow
from autopar.solve.paths import Demand, arriving_flows, merge_terms, useful_arcs, worth_recomputing
from autopar.solve.prices import arc_loads, away_load, op_load

SCALE = 1e6  # objective in microseconds: keeps coefficients near 1 for the solver's tolerances
Floats = NDArray[np.float64]
Chosen = tuple[tuple[int, ...], dict[int, int], dict[int, tuple[int, ...]], frozenset[int]]
CHOOSE, SHARE, FLOW, KEEP, AGAIN, BUDGET, HOST, RULED_OUT = 1, 2, 3, 4, 5, 6, 19, 20


@dataclass
class Formulation(KernelRows):
    """The model of a problem if compute hides all early communication, with its variables by
    index."""

    keep: dict[tuple[int, int], Column] = field(default_factory=dict)
    tighter: list[Terms] = field(default_factory=list)  # rows (9): each sum ≤ 0
    tighter_keys: list[RowKey] = field(
        default_factory=list
    )  # (variant, layout, which of the two rows) of each
    _parts: tuple[NDArray[np.int32], Floats, Floats, Floats] | None = None

    def __post_init__(self) -> None:
        self._strategies()
        for v in range(len(self.problem.variants)):
            self._variant(v)
        self._ways()
        self._routes()
        self._host()
        self.model.minimise(self.costs(COMPUTE_BOUND))

    def costs(self, balance: OverlapWeights) -> Costs:
        """Return the costs of variables that take time, for overlap weights
        (`autopar.core.streams.Load.priced_s`)."""
        numbers, serial_s, compute_s, early_s = self.parts()
        shares, slowdown = np.array(balance), self.problem.overlap_slowdown
        return (
            numbers,
            (serial_s - (1.0 - slowdown) * early_s @ shares - compute_s @ (1.0 - shares)) * SCALE,
        )

    def parts(self) -> tuple[NDArray[np.int32], Floats, Floats, Floats]:
        """Return all loads as arrays: numbers of the variables, serial seconds, and per phase
        (second dim) the seconds of compute and of early communication."""
        if self._parts is None:
            loads, num = [load for _, load in self.loads], len(self.loads)
            numbers = np.fromiter((variable.number for variable, _ in self.loads), np.int32, num)
            serial_s = np.fromiter((load.serial_s for load in loads), np.float64, num)
            both = [
                np.array([getattr(load, name) for load in loads], float).reshape(num, 2)
                for name in ("compute_s", "early_s")
            ]
            self._parts = (numbers, serial_s, both[0], both[1])
        return self._parts

    @property
    def num_variables(self) -> int:
        """Number of columns of the model."""
        return len(self.model.columns)

    @property
    def num_constraints(self) -> int:
        """Number of rows of the model."""
        return len(self.model.lower)

    def _strategies(self) -> None:
        """Add rows (1), (5) and (20)."""
        useful, ruled_out = self._useful_again(), self.problem.ruled_out()
        for n, op in enumerate(self.problem.ops):
            self.x.append([self._binary(f"x{n}_{s}") for s in range(len(op.strategies))])
            self._row((CHOOSE, n), [(v, 1) for v in self.x[n]], EQUAL, 1)
            if ruled_out.get(n):
                self._row((RULED_OUT, n), [(self.x[n][s], 1) for s in ruled_out[n]], AT_MOST, 0)
            rows = [(self.x[n], False)]
            if n in useful:
                self.recomputed[n] = [self._binary(f"rc{n}_{s}") for s in range(len(op.strategies))]
                self._row((AGAIN, n), [(v, 1) for v in self.recomputed[n]], AT_MOST, 1)
                rows.append((self.recomputed[n], True))
            for row, again in rows:
                self.loads += [
                    (x, op_load(self.problem, n, s, again=again))
                    for s, x in enumerate(row)
                    if op.strategies[s].time_s
                ]

    def _host(self) -> None:
        """Add row (19), in shares of the budget."""
        budget = self.problem.host_budget_bytes
        flying, values = (
            self.problem.num_in_flight,
            [self.problem.values[variant.value] for variant in self.problem.variants],
        )
        terms = [
            (
                variable,
                flying * self.problem.variants[v].count * values[v].host_bytes(version) / budget,
            )
            for (v, version), variable in self.keep.items()
            if budget and values[v].on_host(version)
        ]
        terms += [
            (variable, op.count * s.host_bytes / budget)
            for op, variables in zip(self.problem.ops, self.x, strict=True)
            for s, variable in zip(op.strategies, variables, strict=True)
            if budget and s.host_bytes
        ]
        if terms:
            self._row((HOST,), terms, AT_MOST, 1.0)

    def _useful_again(self) -> set[int]:
        return worth_recomputing(self.problem)

    def _has_later(self, v: int) -> bool:
        """Return whether backward readers of forward values have rows."""
        return True

    def _demand(self, use: Use, graph: LayoutGraph, variables: list[Column]) -> Demand:
        """Return layout → the strategies that read the operand in it."""
        result: Demand = {}
        for variable, strategy in zip(variables, self.problem.ops[use.op].strategies, strict=True):
            result.setdefault(graph.index[strategy.layouts.inputs[use.operand]], []).append(
                (variable, 1)
            )
        return result

    def _supply(self, v: int, variables: list[Column]) -> Demand:
        """Return layout → the strategies that produce the value in it."""
        value = self.problem.values[self.problem.variants[v].value]
        result: Demand = {}
        for variable, strategy in zip(
            variables, self.problem.ops[value.op].strategies, strict=True
        ):
            result.setdefault(value.graph.index[strategy.layouts.outputs[value.result]], []).append(
                (variable, 1)
            )
        return result

    def _variant(self, v: int) -> None:
        variant = self.problem.variants[v]
        value = self.problem.values[variant.value]
        graph = value.graph
        supply = self._supply(v, self.x[value.op])
        uses = list(enumerate(variant.uses))
        now = {i: self._demand(u, graph, self.x[u.op]) for i, u in uses if u.phase == value.phase}
        later = {i: self._demand(u, graph, self.x[u.op]) for i, u in uses if u.phase != value.phase}
        again = [
            (i, u)
            for i, u in uses
            if u.phase == value.phase and u.read_again and u.op in self.recomputed
        ]
        later |= {i: self._demand(u, graph, self.recomputed[u.op]) for i, u in again}
        arriving = self._flows((v, 0), supply, now)
        if later and self._has_later(v):
            self._flows((v, 1), self._later_supply(v, supply, [*now.values()], arriving), later)

    def _later_supply(self, v: int, supply: Demand, now: list[Demand], arriving: Demand) -> Demand:
        """Add rows (4) and (9).

        Returns:
            layout → the variables that supply it to backward.
        """
        variant = self.problem.variants[v]
        value = self.problem.values[variant.value]
        versions = sorted({*supply, *(layout for demand in now for layout in demand)})
        later: Demand = {}
        for layout in versions:
            free = value.resident and layout in supply
            read = [t for demand in now for t in demand.get(layout, [])]
            sources = supply.get(layout, []) + read
            first = [] if value.resident else supply.get(layout, [])
            later[layout] = list(supply[layout]) if free else []
            if value.keepable is None or layout in value.keepable:
                self.keep[v, layout] = keep = self._binary(f"k{v}_{layout}")
                kept_terms: Terms = [(keep, 1), *self._host_terms(v, layout)]
                self._row(
                    (KEEP, v, layout),
                    merge_terms([*kept_terms, *((variable, -c) for variable, c in sources)]),
                    AT_MOST,
                    0,
                )
                self._tighter(
                    (v, layout, 0),
                    [
                        *kept_terms,
                        *((variable, -c) for variable, c in first + arriving.get(layout, [])),
                    ],
                )
                for i, terms in enumerate(self.kernel_terms.scattered.get((v, layout), ())):
                    self._add_full_tensor_row((v, layout, i), [*kept_terms, *terms], supply[layout])
                for i, terms in enumerate(self.kernel_terms.unseen.get((v, layout), ())):
                    self._row((UNSEEN, v, layout, i), [*kept_terms, *terms], AT_MOST, 1)
                if free:
                    self._tighter(
                        (v, layout, 1), [(keep, 1), *((variable, -c) for variable, c in read)]
                    )
                later[layout] += kept_terms
        if value.op in self.recomputed:
            for layout, terms in self._supply(v, self.recomputed[value.op]).items():
                later[layout] = later.get(layout, []) + terms
        return later

    def _host_terms(self, v: int, layout: int) -> Terms:
        """Add h[v,l], if the version can be stored on the hosts."""
        variant = self.problem.variants[v]
        value = self.problem.values[variant.value]
        away_s = value.away(layout)
        if math.isinf(away_s):
            return []
        self.keep[v, value.stored_version(layout)] = stored = self._binary(f"h{v}_{layout}")
        self.loads.append((stored, away_load(away_s, variant.count)))
        return [(stored, 1)]

    def _tighter(self, key: RowKey, terms: Terms) -> None:
        self.tighter_keys.append(key)
        self.tighter.append(merge_terms(terms))

    def _flows(self, group: RowKey, supply: Demand, demands: dict[int, Demand]) -> Demand:
        """Add rows (2) and (3) for the readers of variant `group[0]`: for readers in its own phase,
        or if `group[1]` is 1 for backward readers of a forward value.

        Args:
            group: (number of the variant, 0 or 1).
            supply: layout → variables that supply it.
            demands: position of the reader in `uses` → its demand.

        Returns:
            Layout → the flows that are paid for collectives to it.
        """
        variant = self.problem.variants[group[0]]
        graph = self.problem.values[variant.value].graph
        arcs = useful_arcs(
            graph, supply.keys(), {layout for demand in demands.values() for layout in demand}
        )
        load = arc_loads(self.problem, group[0], late=bool(group[1]), count=variant.count)
        loads = [load(graph.arcs[a]) for a in arcs]
        if len(demands) > 2:
            paid = [self._flow(load) for load in loads]
            for c, demand in demands.items():
                flows = [self._flow() for _ in arcs]
                self._balance((*group, c), arcs, supply, demand, [flows])
                for a, pay, flow in zip(arcs, paid, flows, strict=True):
                    self._row((SHARE, *group, c, a), [(pay, 1), (flow, -1)], AT_LEAST, 0)
            self._kernels(group, arcs, [paid], supply, demands)
            return arriving_flows(graph, arcs, [paid])
        shared = [[self._flow(load) for load in loads]] if len(demands) == 2 else []
        separate = [[self._flow(load) for load in loads] for _ in demands]
        for (c, demand), reader_flows in zip(demands.items(), separate, strict=True):
            self._balance((*group, c), arcs, supply, demand, [*shared, reader_flows])
        self._kernels(group, arcs, [*shared, *separate], supply, demands)
        return arriving_flows(graph, arcs, [*shared, *separate])

    def _balance(
        self,
        reader: RowKey,
        arcs: list[int],
        supply: Demand,
        demand: Demand,
        flows: list[list[Column]],
    ) -> None:
        """Add rows (3) for one reader, whose flow is the sum of `flows`."""
        graph = self.problem.values[self.problem.variants[reader[0]].value].graph
        balance = [list(supply.get(layout, [])) for layout in range(len(graph.layouts))]
        for flow in flows:
            for variable, a in zip(flow, arcs, strict=True):
                balance[graph.arcs[a].dst].append((variable, 1))
                balance[graph.arcs[a].src].append((variable, -1))
        for layout, terms in enumerate(balance):
            terms += [(variable, -c) for variable, c in demand.get(layout, [])]
            if any(c < 0 for _, c in terms):
                self._row((FLOW, *reader, layout), merge_terms(terms), AT_LEAST, 0)

    def budget_terms(self, row: BudgetRow) -> Terms:
        """Return the left side of a budget row without its reserve, in bytes."""
        values = [self.problem.values[variant.value] for variant in self.problem.variants]
        held_factors, fetched = dict(row.kept), dict(row.fetched)
        kept_terms = [
            (
                variable,
                float(
                    held_factors.get(v, 0) * values[v].bytes(version)
                    + fetched.get(v, 0) * values[v].host_bytes(version)
                ),
            )
            for (v, version), variable in self.keep.items()
        ]
        runs_again = (
            (self.recomputed[n], sizes) for n, sizes in row.recomputed if n in self.recomputed
        )
        again = [
            (variable, float(c))
            for variables, sizes in runs_again
            for variable, c in zip(variables, sizes, strict=True)
        ]
        live = [(self.x[n][s], float(size)) for n, s, size in row.strategy_bytes(self.problem)]
        shared = [
            (variable, float(self.problem.regions[region]))
            for region, variable in self.regions.items()
        ]
        return live + [(v, c) for v, c in (*kept_terms, *again, *shared) if c]

    def add_budget(self, row: BudgetRow) -> None:
        """Add a budget row, in shares of the budget."""
        unit = 1.0 / max(self.problem.budget_bytes, 1)
        terms = [(variable, size * unit) for variable, size in self.budget_terms(row)]
        self._row((BUDGET,), terms, AT_MOST, (self.problem.budget_bytes - row.reserve_bytes) * unit)

    def read_choices(self, values: Mapping[str, float]) -> Chosen:
        """Return strategies, recomputation, kept versions and regions from the values of the
        variables.

        Args:
            values: name of a variable → its value.
        """
        strategies = tuple(_largest(row, values) for row in self.x)
        recomputed = {
            n: _largest(row, values)
            for n, row in self.recomputed.items()
            if sum(values[v.name] for v in row) > 0.5
        }
        kept_versions: dict[int, tuple[int, ...]] = {}
        for (v, layout), variable in self.keep.items():
            if values[variable.name] > 0.5:
                kept_versions[v] = (*kept_versions.get(v, ()), layout)
        return (
            strategies,
            recomputed,
            kept_versions,
            frozenset(b for b, variable in self.regions.items() if values[variable.name] > 0.5),
        )


def _largest(row: Sequence[Column], values: Mapping[str, float]) -> int:
    return max(range(len(row)), key=lambda s: (values[row[s].name], -s))
