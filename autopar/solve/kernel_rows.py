"""The rows of the program for overlap kernels (`autopar.cost.kernel_offers`) and for routes
(`autopar.cost.expert_routes`).

Indices and variables are those of `autopar.solve.formulation`; g is a kernel, b a region of memory
that ranks share.

    h[g,a] ∈ [0,1]    kernel g, a product with one of some strategies, also computes arc a
    Σ_g h[g,a] ≤ r[a]                                    one kernel per arc                     (10)
    Σ_a h[g,a] ≤ Σ_{s of g} x[n,s], or rc                one arc of a variant per product       (11)
    Σ_g h[g,a] + y ≤ supply(tail(a))                     a result that a product scatters never
                                                         exists as a whole                      (12)
        y: r of another arc from there, a reader's demand for it, or the kept version k
    z[b] ∈ {0,1}      region b is allocated, through which some kernels reach their peers; every
                      budget row contains its bytes
    Σ_{a through b} h[g,a] ≤ z[b]                        once for all its users                 (13)
    Σ_a h[g,a] ≤ Σ_{s of m} x[m,s]    m computes the last addend of the sum n of (11)           (14)
    Σ_a h[g,a] + Σ_a h[e,a] ≤ 1       a product is cut one way: g gathers, e scatters           (15)
    Σ_a h[g,a] ≤ Σ_{s of m} x[m,s]    m adds or norms the result that g scatters; g does both   (16)
    h[g,a] + k ≤ 1                    and the scattered result alone cannot be kept             (18)
    t[n,s] ∈ [0,1]    op n with strategy s sends by its route; likewise for its recomputation
    t[n,s] ≤ x[n,s], or rc            and t[n,s] ≤ z[b] for all regions b of the route          (17)

No certificate has multipliers of rows (12) to (18).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.core.problem import OverlapKernel, Problem
from autopar.core.streams import Load
from autopar.solve.lp import AT_MOST, Column, Model, Terms
from autopar.solve.paths import Demand, merge_terms
from autopar.solve.prices import routed_load, saved_load

ARC, PRODUCT, WHOLE, REGION, ADDEND, WAY, ALSO, ROUTE, UNSEEN = 10, 11, 12, 13, 14, 15, 16, 17, 18
RowKey = tuple[int, ...]
"""Number of the formula and its indices. It identifies a row regardless of its position."""


@dataclass(frozen=True, slots=True)
class KernelTerms:
    """Terms of kernels, collected for rows of several variants.

    Attributes:
        scattered: (variant, layout) → kernels that scatter it, by collective.
        unseen: the same for kernels that also run the reader.
        ways: product → kind of collective → kernels that run one.
    """

    scattered: dict[tuple[int, int], list[Terms]] = field(default_factory=dict)
    unseen: dict[tuple[int, int], list[Terms]] = field(default_factory=dict)
    ways: dict[tuple[int, bool], dict[str, list[Terms]]] = field(default_factory=dict)


@dataclass
class KernelRows:
    """The part of a program with the rows of kernels and routes.

    Attributes:
        loads: the load of each variable that takes time.
        kernel_terms: terms of rows (12), (15) and (18).
    """

    problem: Problem
    model: Model = field(default_factory=Model, init=False)
    x: list[list[Column]] = field(default_factory=list)
    recomputed: dict[int, list[Column]] = field(default_factory=dict)
    regions: dict[int, Column] = field(default_factory=dict)
    keys: list[RowKey] = field(default_factory=list)
    loads: list[tuple[Column, Load]] = field(default_factory=list)
    kernel_terms: KernelTerms = field(default_factory=KernelTerms)
    _count: int = 0

    def _binary(self, name: str) -> Column:
        return self.model.add_column(name, integer=True)

    def _flow(self, load: Load | None = None) -> Column:
        self._count += 1
        variable = self.model.add_column(f"f{self._count}")
        if load is not None and load.serial_s:
            self.loads.append((variable, load))
        return variable

    def _row(self, key: RowKey, terms: Terms, sense: str, right: float) -> None:
        self.keys.append(key)
        self.model.add_row(terms, sense, right)

    def _kernels(
        self,
        group: RowKey,
        arcs: Sequence[int],
        paid: Sequence[Sequence[Column]],
        supply: Demand,
        demands: Mapping[int, Demand],
    ) -> None:
        """Add rows (10) to (16) of the kernels that run a collective of variant `group[0]`, and
        their terms of rows (18). `paid` has, for each arc, the columns that `_flows` pays."""
        v, late = group[0], bool(group[1])
        doing: dict[int, Terms] = {}
        for i, kernel in enumerate(self.problem.kernels.get((v, late), ())):
            product = self.recomputed.get(kernel.op) if kernel.recomputed else self.x[kernel.op]
            if not product:
                continue
            terms = self._kernel_flows((*group, i), kernel, arcs, doing)
            if terms:
                self._product_rows((*group, i), kernel, product, terms)
        for a, terms in doing.items():
            at = arcs.index(a)
            self._row((ARC, *group, a), [*((flow[at], -1) for flow in paid), *terms], AT_MOST, 0)
            self._scatter_rows(group, a, terms, arcs, paid, supply, demands)

    def _kernel_flows(
        self, key: RowKey, kernel: OverlapKernel, arcs: Sequence[int], doing: dict[int, Terms]
    ) -> Terms:
        """Add the columns h[g,a] of a kernel to `doing` by arc, and rows (13)."""
        v, late = key[0], bool(key[1])
        terms: Terms = []
        through: dict[int, Terms] = {}
        for hidden in kernel.hides:
            if hidden.arc in arcs:
                saved = saved_load(self.problem, v, late=late, saved_s=hidden.saved_s)
                terms.append((self._flow(saved), 1))
                doing.setdefault(hidden.arc, []).append(terms[-1])
                if hidden.region is not None:
                    through.setdefault(hidden.region, []).append(terms[-1])
        for region, users in through.items():
            self._row((REGION, *key, region), [*users, (self._region(region), -1)], AT_MOST, 0)
        return terms

    def _product_rows(
        self, key: RowKey, kernel: OverlapKernel, product: list[Column], terms: Terms
    ) -> None:
        """Add rows (11), (14) and (16) of a kernel, and its terms of rows (15) and (18)."""
        v = key[0]
        graph = self.problem.values[self.problem.variants[v].value].graph
        first = graph.arcs[kernel.hides[0].arc]
        ways = self.kernel_terms.ways.setdefault((kernel.product[0], kernel.recomputed), {})
        ways.setdefault(first.collective.kind, []).append(terms)
        strategies = self._products(v, kernel, product)
        self._row((PRODUCT, *key), [*terms, *((x, -c) for x, c in strategies)], AT_MOST, 0)
        if addends := self._addends(kernel):
            self._row((ADDEND, *key), [*terms, *((x, -1) for x in addends)], AT_MOST, 0)
        if kernel.also:
            self.kernel_terms.unseen.setdefault((v, first.dst), []).append(terms)
        for op, readers in self._also(kernel):
            self._row((ALSO, *key, op), [*terms, *((x, -1) for x in readers)], AT_MOST, 0)

    def _scatter_rows(
        self,
        group: RowKey,
        a: int,
        terms: Terms,
        arcs: Sequence[int],
        paid: Sequence[Sequence[Column]],
        supply: Demand,
        demands: Mapping[int, Demand],
    ) -> None:
        """Add rows (12) of the other arcs and readers of the result that a kernel scatters, if arc
        `a` is a reduce-scatter. Collect the terms of the rows of kept versions."""
        v, late = group[0], bool(group[1])
        graph = self.problem.values[self.problem.variants[v].value].graph
        if graph.arcs[a].collective.kind != "reduce_scatter":
            return
        source = graph.arcs[a].src
        others = [i for i, b in enumerate(arcs) if b != a and graph.arcs[b].src == source]
        uses = [[(flow[i], 1.0) for flow in paid] for i in others] + [
            d[source] for d in demands.values() if source in d
        ]
        for i, use in enumerate(uses):
            self._add_full_tensor_row((*group, a, i), [*terms, *use], supply[source])
        if not late:
            self.kernel_terms.scattered.setdefault((v, source), []).append(terms)

    def _products(self, v: int, kernel: OverlapKernel, variables: list[Column]) -> Terms:
        """Return the strategies with which an op's product can run in a kernel, per tensor of
        variant v."""
        return [(variables[s], 1) for s in kernel.strategies]

    def _ways(self) -> None:
        """Add rows (15), after the rows of all variants."""
        for product, ways in self.kernel_terms.ways.items():
            for i, (a, b) in enumerate(itertools.product(*ways.values()) if len(ways) == 2 else ()):
                self._row((WAY, *product, i), [*a, *b], AT_MOST, 1)

    def _addends(self, kernel: OverlapKernel) -> list[Column]:
        """Return the strategies with which the last addend of a kernel's sum can run in the kernel;
        none if there is no sum."""
        op, strategies = kernel.product
        return [self.x[op][s] for s in strategies if kernel.added]

    def _also(self, kernel: OverlapKernel) -> Iterator[tuple[int, list[Column]]]:
        """Generate the ops that a kernel runs in addition to its product, with the strategies that
        allow it."""
        yield from ((op, [self.x[op][s] for s in strategies]) for op, strategies in kernel.also)

    def _routes(self) -> None:
        """Add rows (17)."""
        for (n, s), route in self.problem.routes.items():
            for again, variables in ((False, self.x[n]), (True, self.recomputed.get(n))):
                if variables:
                    route_flow = self._flow(
                        routed_load(self.problem, n, route.saved_s, again=again)
                    )
                    needed = variables[s], *(self._region(region) for region in route.regions)
                    for i, variable in enumerate(needed):
                        self._row(
                            (ROUTE, n, s, int(again), i),
                            [(route_flow, 1), (variable, -1)],
                            AT_MOST,
                            0,
                        )

    def _region(self, region: int) -> Column:
        if region not in self.regions:
            self.regions[region] = self._binary(f"z{region}")
        return self.regions[region]

    def _add_full_tensor_row(self, key: RowKey, terms: Terms, supply: Terms) -> None:
        """Add a row (12)."""
        self._row(
            (WHOLE, *key),
            merge_terms([*terms, *((variable, -c) for variable, c in supply)]),
            AT_MOST,
            0,
        )
