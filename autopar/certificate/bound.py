"""The lower bound by weak duality, from the multipliers in the plan, by arithmetic alone.

The problem is relaxed to a linear program; names are those of the plan: op n, strategy s, tensor v (all instances with the same
readers, `count` of them), reader c, layout l, collective a from tail(a) to head(a). All variables lie in [0, 1].

A step takes max(C + s·P, P) + K seconds in forward, and so in backward: C is compute, slices included, P is communication beside which
it may run, each second of which costs it s, K all else. For every λ in [0, 1], one per phase, λ(C + s·P) + (1 − λ)P + K is no more than
that. So a second of C has the weight λ, one of P λ·s + 1 − λ, one of K 1; `time` is meant times its weight. P is what moves

    a tensor that rests, in the phase that makes it and in backward
    in backward, what an op of forward made that backward may not run again
    what only parameters read in the phase that makes it: their gradients

    minimise Σ count·time·x[n,s] + Σ count·time·rc[n,s] + Σ count·time(a)·r[a]
    (1) Σ_s x[n,s] = 1                                                     (5) Σ_s rc[n,s] ≤ 1
    (2) r[a] ≥ f[c,a]
    (3) supply(l) + Σ_{head(a)=l} f[c,a] − Σ_{tail(a)=l} f[c,a] ≥ demand(c,l)         per reader c, phase and layout l
        supply: strategies that make l; in backward of what forward made k[v,l], strategies with which it is made again, and,
        of what rests anyway, those that make l. demand: strategies of c that read l
    (4) k[v,l] ≤ strategies that make l + strategies of forward readers that read l; only in layouts in which v may be kept
    (10) Σ_g h[g,a] ≤ r[a]      (11) Σ_a h[g,a] ≤ strategies of g     kernel g does collective a beside its product: −count·saved·h[g,a]
    (6) Σ bytes of everything that certainly lives at a point of the step ≤ budget    (`autopar.certificate.moments`)

Every multiplier of the right sign proves a bound: the right sides, times their multipliers, and each variable's reduced cost
where that is negative. Stored are π[c,l] ≥ 0 of (3) and λ ≥ 0 of (6). With Δ[c,a] = π[c,head(a)] − π[c,tail(a)] the best of the
others given these are max(0, Δ[c,a]) for (2), κ[l] = max(0, Σ_c π[c,l] − what λ asks for keeping l) for (4), and for (1) and (5)
the least reduced cost of the strategies, so that

    bound = Σ_n min_s d[x] + Σ_n min(0, min_s d[rc]) + Σ_a min(0, count·time(a) − Σ_c max(0, Δ[c,a])) − Σ λ

    d[x] = count·time + Σ π of what it reads − Σ π of what it supplies − Σ κ of what it makes or reads + λ's share of its bytes
           − Σ_g max_a max(0, count·saved(g,a) − max(0, count·time(a) − Σ_c max(0, Δ[c,a])))

and d[rc] likewise without κ; the last term is of kernels that the strategy can run in, whose savings, like compute, weigh λ: what a
collective costs beyond its worth is the multiplier of (10), what a kernel saves beyond that the one of (11).
Collectives whose tail nothing leads to carry nothing and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.problem import Problem
from autopar.redistribute import LayoutGraph

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Prices = Mapping[tuple[int, int, bool], Mapping[int, float]]
"""By (tensor, position of the reader in `uses`, whether in backward of what forward made): layout → π."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Row (6) at one point: instances kept per variant, bytes per strategy of some ops beside what rests; and its λ."""

    held: Mapping[int, int]
    live: Mapping[int, Sequence[int]]
    worth_s: float


@dataclass
class _Dual:
    """Reduced costs while the multipliers come in."""

    problem: Problem
    balance: tuple[float, float]
    x: list[Floats] = field(default_factory=list)
    again: dict[int, Floats] = field(default_factory=dict)
    total: float = 0.0

    def __post_init__(self) -> None:
        in_forward, in_backward = self.balance
        for n, op in enumerate(self.problem.ops):
            time_s = np.array([op.count * s.time_s for s in op.strategies])
            beside = op.kind == "compute"
            self.x.append(time_s * ((in_forward if op.phase == "forward" else in_backward) if beside else 1.0))
            if op.recomputable:
                self.again[n] = time_s * (in_backward if beside else 1.0)

    def weights(self, v: int, *, later: bool) -> Floats:
        """Per collective of a tensor, the weight of its seconds; `later`: in backward, of what forward made."""
        variant, ops = self.problem.variants[v], self.problem.ops
        value = self.problem.values[variant.value]
        maker = ops[value.op]
        if later:
            early = value.resident or (maker.kind == "compute" and not maker.recomputable)
        else:
            early = value.resident or {ops[u.op].kind for u in variant.uses if u.phase == value.phase} <= {"parameter"}
        share = self.balance[1 if later or value.phase == "backward" else 0]
        sent = share * self.problem.overlap_slowdown + 1.0 - share if early else 1.0
        return np.array([share if arc.collective.kind == "slice" else sent for arc in value.graph.arcs])


def lower_bound(problem: Problem, prices: Prices, rows: Iterable[MemoryRow], balance: tuple[float, float] = (1.0, 1.0)) -> float:
    """What these multipliers prove, in seconds; those of the wrong sign count as 0.

    Args:
        balance: λ of forward and of backward, each from 0 to 1.
    """
    assert all(0.0 <= share <= 1.0 for share in balance), "any other proves nothing"
    dual, kept = _Dual(problem, balance), np.zeros(len(problem.variants))
    for row in rows:
        _memory(dual, row, kept)
    for v in range(len(problem.variants)):
        _tensor(dual, v, prices, float(kept[v]))
    least = [float(costs.min()) for costs in dual.again.values()]
    return dual.total + sum(float(costs.min()) for costs in dual.x) + sum(min(0.0, cost) for cost in least)


def _memory(dual: _Dual, row: MemoryRow, kept: Floats) -> None:
    worth = max(row.worth_s, 0.0)
    per_byte = worth / max(dual.problem.budget_bytes, 1)
    dual.total -= worth
    for n, op in enumerate(dual.problem.ops):
        dual.x[n] += per_byte * op.count * np.array([s.static_bytes for s in op.strategies], float)
    for n, sizes in row.live.items():
        dual.x[n] += per_byte * np.array(sizes, float)
    for v, num in row.held.items():
        kept[v] += per_byte * num


def _tensor(dual: _Dual, v: int, prices: Prices, per_kept_byte: float) -> None:
    """One tensor: rows (2), (3) and (4)."""
    variant = dual.problem.variants[v]
    value = dual.problem.values[variant.value]
    graph, maker = value.graph, value.op
    made = _layouts(dual.problem, graph, maker, "outputs", value.result)
    reads = {i: _layouts(dual.problem, graph, u.op, "inputs", u.operand) for i, u in enumerate(variant.uses)}
    first = [i for i, u in enumerate(variant.uses) if u.phase == value.phase]
    later = [i for i, u in enumerate(variant.uses) if u.phase != value.phase or u.op in dual.again]
    now = {i: _prices(prices, (v, i, False), graph) for i in first}
    for i, worth in now.items():
        dual.x[variant.uses[i].op] += worth[reads[i]]
        dual.x[maker] -= worth[made]
    _collectives(dual, v, now, made, later=False)
    if not later or value.phase != "forward":
        return
    then = {i: _prices(prices, (v, i, True), graph) for i in later}
    for i, worth in then.items():
        again = variant.uses[i].phase == value.phase
        (dual.again if again else dual.x)[variant.uses[i].op] += worth[reads[i]]
    supplied = sum(then.values(), np.zeros(len(graph.layouts)))
    if value.resident:
        dual.x[maker] -= supplied[made]
    if maker in dual.again:
        dual.again[maker] -= supplied[made]
    versions = np.unique(np.concatenate([made, *(reads[i] for i in first)]))
    if value.keepable is not None:
        versions = np.array([layout for layout in versions if layout in value.keepable], dtype=np.int64)
    kappa = np.zeros(len(graph.layouts))
    kappa[versions] = np.maximum(0.0, supplied - per_kept_byte * np.array(graph.bytes, float))[versions]
    dual.x[maker] -= kappa[made]
    for i in first:
        dual.x[variant.uses[i].op] -= kappa[reads[i]]
    _collectives(dual, v, then, np.concatenate([versions, made]), later=True)


def _collectives(dual: _Dual, v: int, worth: Mapping[int, Floats], supplied: Ints, *, later: bool) -> None:
    """What the collectives' reduced costs take from the bound: nothing where no reader's price rises by more than they cost. And rows (10)
    and (11)."""
    variant = dual.problem.variants[v]
    value = dual.problem.values[variant.value]
    graph = value.graph
    if not graph.arcs or not worth:
        return
    tails, heads = np.array([a.src for a in graph.arcs]), np.array([a.dst for a in graph.arcs])
    costs = variant.count * dual.weights(v, later=later) * np.array([a.time_s for a in graph.arcs])
    rises = sum((np.maximum(0.0, w[heads] - w[tails]) for w in worth.values()), np.zeros(len(costs)))
    left = costs - rises
    if (left < 0.0).any():
        dual.total += float(np.minimum(0.0, left)[_reachable(tails, heads, supplied, len(graph.layouts))[tails]].sum())
    share = dual.balance[1 if later or value.phase == "backward" else 0]
    for kernel in dual.problem.kernels.get((v, later), ()):
        most = max(variant.count * share * hidden.saved_s - max(0.0, float(left[hidden.arc])) for hidden in kernel.hides)
        (dual.again if kernel.again else dual.x)[kernel.op][list(kernel.strategies)] -= max(0.0, most)


def _reachable(tails: Ints, heads: Ints, start: Ints, num: int) -> NDArray[np.bool_]:
    found = np.zeros(num, bool)
    found[start] = True
    while not found[heads[found[tails]]].all():
        found[heads[found[tails]]] = True
    return found


def _prices(prices: Prices, where: tuple[int, int, bool], graph: LayoutGraph) -> Floats:
    worth = np.zeros(len(graph.layouts))
    for layout, value in prices.get(where, {}).items():
        worth[layout] = max(value, 0.0)
    return worth


def _layouts(problem: Problem, graph: LayoutGraph, op: int, side: str, position: int) -> Ints:
    """Per strategy of an op, the layout of one operand or result."""
    return np.array([graph.index[getattr(s.layouts, side)[position]] for s in problem.ops[op].strategies])
