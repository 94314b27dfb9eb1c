"""The lower bound by weak duality, from the multipliers in the plan, by arithmetic alone.

The problem is relaxed to a linear program. Names are those of the plan: op n, strategy s, tensor v
(all instances with the same readers, `count` of them), reader c, layout l, collective a from
tail(a) to head(a). All variables are in [0, 1].

A step takes max(C + s·P, P) + K seconds in forward, and likewise in backward. C is compute,
including slices. P is communication that may overlap with compute; each of its seconds delays
compute by s. K is all other time, including the collectives inside ops. For every λ in [0, 1], one
per phase, λ(C + s·P) + (1 − λ)P + K is at most this time. So a second of C has the weight λ, a
second of P λ·s + 1 − λ, and a second of K 1. `time` includes its weight. P is the communication of

    a stored tensor, in the phase that computes it and in backward
    a forward result in backward, if backward may not recompute its op
    a tensor whose only readers in its phase are parameters: their gradients
    copies between devices and their hosts

The linear program:

    minimise Σ count·time·x[n,s] + Σ count·time·rc[n,s] + Σ count·time(a)·r[a] + Σ count·(a store
    and a fetch)·h[v,l]
    (1) Σ_s x[n,s] = 1                                                     (5) Σ_s rc[n,s] ≤ 1
    (2) r[a] ≥ f[c,a], r[a] ≤ Σ_c f[c,a]
    (3) supply(l) + Σ_{head(a)=l} f[c,a] − Σ_{tail(a)=l} f[c,a] ≥ demand(c,l)
        per reader c, phase and layout l
        supply: strategies that produce l. In backward of a forward value: k[v,l] + h[v,l],
        strategies of its recomputation, and strategies that produce l if the value is stored.
        demand: strategies of c that read l. In backward of a forward reader: strategies of its
        recomputation, if that reads the operand
    (4) k[v,l] + h[v,l] ≤ strategies that produce l + strategies of forward readers that read l,
        in layouts in which v may be kept; h[v,l] only if it may be stored on the hosts
    (9) k[v,l] + h[v,l] ≤ strategies that produce l, except of stored values, + Σ_{head(a)=l} r[a]
        in v's own phase; if v is stored in l, k[v,l] ≤ strategies of forward readers that read l
    (k) k[v,l] ≤ 1
    (10) Σ_g h[g,a] ≤ r[a]      (11) Σ_a h[g,a] ≤ strategies of g     kernel g computes collective a
                                together with its product: −count·saved·h[g,a]
    (6) Σ bytes of everything that is certainly live at a point of the step ≤ budget
        (`autopar.certificate.multiplier_proof`)

All multipliers with the right signs prove a bound: the sum of the right sides times their
multipliers, and of each variable's reduced cost if that is negative. The plan stores π[c,l] ≥ 0 of
(3), μ[l] and ν[l] ≥ 0 of the two kinds of (9), ω[l] ≥ 0 of (k), and λ ≥ 0 of (6). Let Δ[c,a] =
π[c,head(a)] − π[c,tail(a)]. The best values of the others, given these, are:

- for (4), κ[l] = max(0, Σ_c π[c,l] − μ[l] − m), where m is the lesser of two costs: λ's price for
  keeping l plus ν[l] + ω[l], and the cost of storing and fetching it;
- for (2), ρ[a] = max(0, −max_c Δ[c,a]) and max(0, Δ[c,a] + ρ[a]);
- for (1) and (5), the least reduced cost of the strategies.

So the bound is

    bound = Σ_n min_s d[x] + Σ_n min(0, min_s d[rc]) + Σ_a min(0, left[a]) − Σ ω − Σ λ

    left[a] = count·time(a) − Σ_c max(0, Δ[c,a]) + ρ[a] − μ[head(a)], but μ only in v's own phase
    d[x] = count·time + Σ π of its operands − Σ π of its supply − Σ κ of its results and operands
           − Σ μ of its results − Σ ν of its operands + λ's share of its bytes
           − Σ_g max_a max(0, count·saved(g,a) − max(0, left[a]))

and d[rc] likewise without κ, μ and ν. The last term covers the kernels in which the strategy can
run; like compute, their savings have the weight λ. The multiplier of (10) is the cost of a
collective beyond its worth, and the multiplier of (11) the saving of a kernel beyond that.
Collectives whose tail cannot be reached, or whose head leads to no reader, carry no flow and are
left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.core.layout_graph import LayoutGraph
from autopar.core.problem import Problem, Use, Value

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Prices = Mapping[tuple[int, int, bool], Mapping[int, float]]
"""(tensor, position of the reader in `uses`, whether backward reads a forward value) → layout →
π."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Multipliers of the versions of a tensor: layout → μ, ν and ω (seconds)."""

    made_s: Mapping[int, float]
    read_s: Mapping[int, float]
    once_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Row (6) at one point, with its λ: number of kept instances per variant, and bytes per
    strategy of some ops in addition to the stored ones."""

    kept: Mapping[int, int]
    live: Mapping[int, Sequence[int]]
    worth_s: float


@dataclass
class _Dual:
    """Reduced costs, updated as multipliers are added."""

    problem: Problem
    balance: tuple[float, float]
    versions: Mapping[int, Versions]
    x: list[Floats] = field(default_factory=list)
    recomputed: dict[int, Floats] = field(default_factory=dict)
    total: float = 0.0

    def __post_init__(self) -> None:
        in_forward, in_backward = self.balance
        for n, op in enumerate(self.problem.ops):
            time_s = op.count * np.array([s.time_s for s in op.strategies])
            moved_s = op.count * np.array([s.communication_s for s in op.strategies])
            overlapped_s = time_s - moved_s if op.kind == "compute" else 0.0 * time_s
            share = in_forward if op.phase == "forward" else in_backward
            self.x.append(time_s - overlapped_s * (1.0 - share))
            if op.recomputable:
                self.recomputed[n] = time_s - overlapped_s * (1.0 - in_backward)

    def costs(self, v: int, *, later: bool) -> Floats:
        """Return the weighted seconds of each collective of a tensor. `later` selects backward of a
        forward value."""
        variant, ops = self.problem.variants[v], self.problem.ops
        value = self.problem.values[variant.value]
        maker = ops[value.op]
        if later:
            early = value.is_given or (maker.kind == "compute" and not maker.recomputable)
        else:
            early = value.is_given or {
                ops[u.op].kind for u in variant.uses if u.phase == value.phase
            } <= {"parameter"}
        share = self.balance[1 if later or value.phase == "backward" else 0]
        sent = share * self.problem.overlap_slowdown + 1.0 - share if early else 1.0
        copied = share * self.problem.overlap_slowdown + 1.0 - share
        weights = {"slice": share, "fetch": copied, "store": copied}
        arcs = value.graph.arcs
        return np.array(
            [weights.get(a.collective.kind, sent) * a.seconds(shares=early) for a in arcs]
        )

    def away(self, v: int) -> Floats:
        """Return the cost of storing a tensor on the hosts and fetching it, per layout."""
        variant = self.problem.variants[v]
        away_s = self.problem.values[variant.value].away_s
        weight = variant.count * sum(
            share * self.problem.overlap_slowdown + 1.0 - share for share in self.balance
        )
        return np.array(
            [weight * each if each < np.inf else np.inf for each in away_s or (np.inf,)]
        )


def lower_bound(
    problem: Problem,
    prices: Prices,
    rows: Iterable[MemoryRow],
    balance: tuple[float, float] = (1.0, 1.0),
    versions: Mapping[int, Versions] | None = None,
    ruled_out: Mapping[int, Sequence[int]] | None = None,
) -> float:
    """Return the bound that these multipliers prove, in seconds.

    Multipliers of the wrong sign, and multipliers of rows that do not exist, count as 0.

    Args:
        problem: the optimization problem that is bounded.
        prices: the multipliers π by tensor, reader and layout (seconds).
        rows: the memory rows with their multipliers λ.
        balance: λ of forward and of backward, each from 0 to 1.
        versions: the multipliers μ, ν and ω by tensor.
        ruled_out: by op, the strategies that it does not run with; the bound is then of the other
            choices only, and infinite if there are none. Backward may run an op again with any.
    """
    assert all(0.0 <= share <= 1.0 for share in balance), "balances outside of [0, 1] prove nothing"
    dual, saved_prices = _Dual(problem, balance, versions or {}), np.zeros(len(problem.variants))
    for row in rows:
        _memory(dual, row, saved_prices)
    for v in range(len(problem.variants)):
        _tensor(dual, v, prices, float(saved_prices[v]))
    for n, strategies in (ruled_out or {}).items():
        dual.x[n][list(strategies)] = np.inf
    least = [float(costs.min()) for costs in dual.recomputed.values()]
    return (
        dual.total
        + sum(float(costs.min()) for costs in dual.x)
        + sum(min(0.0, cost) for cost in least)
    )


def _memory(dual: _Dual, row: MemoryRow, kept: Floats) -> None:
    worth = max(row.worth_s, 0.0)
    per_byte = worth / max(dual.problem.budget_bytes, 1)
    dual.total -= worth
    for n, op in enumerate(dual.problem.ops):
        dual.x[n] += per_byte * op.count * np.array([s.static_bytes for s in op.strategies], float)
    for n, sizes in row.live.items():
        dual.x[n] += per_byte * np.array(sizes, float)
    for v, num in row.kept.items():
        kept[v] += per_byte * num


def _tensor(dual: _Dual, v: int, prices: Prices, per_kept_byte: float) -> None:
    """Add one tensor: rows (2), (3), (4) and (9)."""
    tensor = _PricedTensor.of(dual.problem, v)
    graph, maker, maker_layouts, reads = (
        tensor.value.graph,
        tensor.value.op,
        tensor.maker_layouts,
        tensor.reads,
    )
    now = {i: _prices(prices, (v, i, False), graph) for i in tensor.in_own_phase}
    for i, worth in now.items():
        dual.x[tensor.uses[i].op] += worth[reads[i]]
        dual.x[maker] -= worth[maker_layouts]
    later = tensor.in_backward(dual.recomputed)
    is_kept = bool(later) and tensor.value.phase == "forward"
    read_layouts = [reads[i] for i in tensor.in_own_phase]
    versions, worths = _versions(dual, v, maker_layouts, read_layouts if is_kept else None)
    _collectives(dual, v, now, maker_layouts, read_layouts, worths[0], later=False)
    if is_kept:
        then = {i: _prices(prices, (v, i, True), graph) for i in later}
        _kept_tensor(dual, tensor, then, per_kept_byte, versions, worths)


@dataclass(frozen=True, slots=True)
class _PricedTensor:
    """A tensor of the problem and its readers.

    Attributes:
        v: index of its variant.
        value: its value.
        uses: its readers.
        maker_layouts: its layout, by strategy of the op that computes it.
        reads: the layout in which each of `uses` reads it, by strategy of that op.
    """

    v: int
    value: Value
    uses: Sequence[Use]
    maker_layouts: Ints
    reads: Sequence[Ints]

    @staticmethod
    def of(problem: Problem, v: int) -> _PricedTensor:
        """Return the tensor with index `v`."""
        variant = problem.variants[v]
        value = problem.values[variant.value]
        maker_layouts = _layouts(problem, value.graph, value.op, "outputs", value.result)
        reads = [_layouts(problem, value.graph, u.op, "inputs", u.operand) for u in variant.uses]
        return _PricedTensor(v, value, variant.uses, maker_layouts, reads)

    @property
    def in_own_phase(self) -> list[int]:
        """Positions of the readers in the phase that computes the tensor."""
        return [i for i, u in enumerate(self.uses) if u.phase == self.value.phase]

    def in_backward(self, recomputable: Collection[int]) -> list[int]:
        """Return the positions of the readers in the other phase, including those that backward may
        run again."""
        return [
            i
            for i, u in enumerate(self.uses)
            if u.phase != self.value.phase or (u.read_again and u.op in recomputable)
        ]


def _kept_tensor(
    dual: _Dual,
    tensor: _PricedTensor,
    then: Mapping[int, Floats],
    per_kept_byte: float,
    versions: Ints,
    worths: tuple[Floats, Floats, Floats],
) -> None:
    """Add what backward reads of a forward tensor.

    Args:
        dual: the reduced costs.
        tensor: the tensor.
        then: reader in backward → π.
        per_kept_byte: λ per kept byte.
        versions: layouts in which it may be kept.
        worths: μ, ν and ω in these layouts.
    """
    mu, nu, omega = worths
    value, maker_layouts, reads = tensor.value, tensor.maker_layouts, tensor.reads
    graph, maker = value.graph, value.op
    dual.x[maker] -= 0.0 if value.resident else mu[maker_layouts]
    for i, worth in then.items():
        again = tensor.uses[i].phase == value.phase
        (dual.recomputed if again else dual.x)[tensor.uses[i].op] += worth[reads[i]]
    supplied = sum(then.values(), np.zeros(len(graph.layouts)))
    if value.resident:
        dual.x[maker] -= supplied[maker_layouts]
    if maker in dual.recomputed:
        dual.recomputed[maker] -= supplied[maker_layouts]
    kappa = np.zeros(len(graph.layouts))
    away = dual.away(tensor.v)
    keeping = np.minimum(per_kept_byte * np.array(graph.bytes, float) + nu + omega, away)
    kappa[versions] = np.maximum(0.0, supplied - mu - keeping)[versions]
    dual.total -= float(omega.sum())
    dual.x[maker] -= kappa[maker_layouts]
    for i in tensor.in_own_phase:
        dual.x[tensor.uses[i].op] -= kappa[reads[i]] + nu[reads[i]]
    _collectives(
        dual,
        tensor.v,
        then,
        np.concatenate([versions, maker_layouts]),
        [reads[i] for i in then],
        np.zeros(len(graph.layouts)),
        later=True,
    )


def _collectives(
    dual: _Dual,
    v: int,
    worth: Mapping[int, Floats],
    supplied: Ints,
    wanted: Sequence[Ints],
    arriving: Floats,
    *,
    later: bool,
) -> None:
    """Subtract the negative reduced costs of a tensor's collectives from the bound: rows (2), (10)
    and (11).

    A collective takes nothing from the bound if the price of no reader, together with the worth of
    the tensor's arrival, rises by more than the collective costs.
    """
    variant = dual.problem.variants[v]
    value = dual.problem.values[variant.value]
    graph = value.graph
    if not graph.arcs or not worth:
        return
    tails, heads = np.array([a.src for a in graph.arcs]), np.array([a.dst for a in graph.arcs])
    costs = variant.count * dual.costs(v, later=later)
    rises = np.array([w[heads] - w[tails] for w in worth.values()])
    reduced_costs = (
        costs - np.maximum(0.0, rises).sum(0) - np.minimum(0.0, rises.max(0)) - arriving[heads]
    )
    if (reduced_costs < 0.0).any():
        num = len(graph.layouts)
        useful = (
            _reachable(tails, heads, supplied, num)[tails]
            & _reachable(heads, tails, wanted[0], num)[heads]
        )
        dual.total += float(np.minimum(0.0, reduced_costs)[useful].sum())
    share = dual.balance[1 if later or value.phase == "backward" else 0]
    for kernel in dual.problem.kernels.get((v, later), ()):
        most = max(
            variant.count * share * hidden.saved_s - max(0.0, float(reduced_costs[hidden.arc]))
            for hidden in kernel.hides
        )
        (dual.recomputed if kernel.recomputed else dual.x)[kernel.op][list(kernel.strategies)] -= (
            max(0.0, most)
        )


def _reachable(tails: Ints, heads: Ints, start: Ints, num: int) -> NDArray[np.bool_]:
    reached = np.zeros(num, bool)
    reached[start] = True
    while not reached[heads[reached[tails]]].all():
        reached[heads[reached[tails]]] = True
    return reached


def _prices(prices: Prices, where: tuple[int, int, bool], graph: LayoutGraph) -> Floats:
    worth = np.zeros(len(graph.layouts))
    for layout, value in prices.get(where, {}).items():
        worth[layout] = max(value, 0.0)
    return worth


def _versions(
    dual: _Dual, v: int, made: Ints, reads: Sequence[Ints] | None
) -> tuple[Ints, tuple[Floats, Floats, Floats]]:
    """Return the layouts in which a tensor may be kept, and μ, ν and ω in these layouts.

    The layouts follow from the strategies that compute and read the tensor in its own phase. There
    are none if `reads` is None.
    """
    value = dual.problem.values[dual.problem.variants[v].value]
    layouts = np.unique(np.concatenate([made, *reads])) if reads is not None else made[:0]
    if value.keepable is not None:
        layouts = np.array([n for n in layouts if n in value.keepable], dtype=np.int64)
    stored = np.intersect1d(layouts, made) if value.resident else layouts[:0]
    known = dual.versions.get(v, Versions({}, {}, {}))

    def worths(of: Mapping[int, float], where: Ints) -> Floats:
        """Return the multipliers of some layouts, in seconds, and 0 for all other layouts."""
        worth = np.zeros(len(value.graph.layouts))
        worth[where] = [max(of.get(layout, 0.0), 0.0) for layout in where.tolist()]
        return worth

    return layouts, (
        worths(known.made_s, layouts),
        worths(known.read_s, stored),
        worths(known.once_s, layouts),
    )


def _layouts(problem: Problem, graph: LayoutGraph, op: int, side: str, position: int) -> Ints:
    """Return the layout of one operand or result, by strategy of an op."""
    return np.array(
        [graph.index[getattr(s.layouts, side)[position]] for s in problem.ops[op].strategies]
    )
