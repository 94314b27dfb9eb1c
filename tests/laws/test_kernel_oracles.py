"""Kernels in the integer program, compared with brute force over all layouts, sets of collectives
and uses of kernels, on small problems."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from autopar.certificate.bound import lower_bound
from autopar.core.layout_graph import Arc, LayoutGraph
from autopar.core.problem import OverlapKernel, OverlapOption, Problem
from autopar.core.solution import Multipliers
from autopar.solve import evaluate, solve
from tests.laws.test_certified_bound import changed, proven
from tests.laws.test_solver_oracles import LINE, A, B, BruteForce, problem, runs_beside

SEEDS = (0, 3)  # brute force takes seconds for each
FURTHER = [pytest.param(seed, False, marks=pytest.mark.slow) for seed in (1, 2, 4)]
MANY = range(30)


def with_kernels(
    seed: int, *, slowdown: float = 1.0, summed: bool = False, normed: bool = False
) -> Problem:
    """Return a `problem` in which b and c can perform a gather of their operands, and a the
    reduce-scatter of its result, in forward or in recomputation. Each kernel saves most of the time
    of the shorter one of product and collective.

    Args:
        summed: the result of a is a sum of partial sums only, as if the product were that of b, the
            slowest op.
        normed: b, the slowest op, may be part of the kernel that scatters the result of a, which
            saves more.
    """
    p, rng = problem(seed, LINE, slowdown=slowdown), random.Random(seed)
    if summed:
        p = replace(
            p, ops=(*p.ops[:2], replace(p.ops[2], strategies=p.ops[2].strategies[-1:]), *p.ops[3:])
        )
    found: dict[tuple[int, bool], list[OverlapKernel]] = {}

    def offer(
        v: int, late: bool, op: int, again: bool, layouts: Sequence[int], ends: str, kind: str
    ) -> None:
        graph = p.values[p.variants[v].value].graph
        for layout in sorted(set(layouts)):
            strategies = tuple(s for s, at in enumerate(layouts) if at == layout)
            least = (
                p.ops[op].count
                * min(p.ops[op].strategies[s].time_s for s in strategies)
                / p.variants[v].count
            )
            arcs = [
                (a, arc)
                for a, arc in enumerate(graph.arcs)
                if arc.collective.kind == kind and getattr(arc, ends) == layout
            ]
            least = math.inf if summed and kind == "reduce_scatter" else least
            hides = tuple(
                OverlapOption(a, rng.uniform(0.3, 0.99) * min(arc.time_s, least), 1)
                for a, arc in arcs
            )
            if hides:
                found.setdefault((v, late), []).append(OverlapKernel(op, again, strategies, hides))

    for v, late, op, operand, again in (
        (A, False, 3, 0, False),
        (A, True, 4, 0, False),
        (A, True, 3, 0, True),
        (B, True, 4, 1, False),
    ):
        if (again and not p.ops[op].recomputable) or runs_beside(p, v, late):
            continue
        graph = p.values[p.variants[v].value].graph
        offer(
            v,
            late,
            op,
            again,
            [graph.index[s.layouts.inputs[operand]] for s in p.ops[op].strategies],
            "dst",
            "all_gather",
        )
    for late in (False, True):
        graph = p.values[A].graph
        offer(
            A,
            late,
            2,
            late,
            [graph.index[s.layouts.outputs[0]] for s in p.ops[2].strategies],
            "src",
            "reduce_scatter",
        )
    if summed:
        slowest = max(range(len(p.ops[3].strategies)), key=lambda s: p.ops[3].strategies[s].time_s)
        for where, kernels in found.items():
            found[where] = [
                replace(k, added=(3, (slowest,))) if k.op == 2 else k
                for k in kernels
                if not (k.op == 2 and k.recomputed)
            ]
    for (v, late), kernels in found.items() if normed else ():
        graph = p.values[p.variants[v].value].graph
        reads = [graph.index[s.layouts.inputs[0]] for s in p.ops[3].strategies]
        for kernel, h in [(k, h) for k in kernels for h in k.hides if k.op == 2 and not late]:
            time_s = {
                s: p.ops[3].strategies[s].time_s
                for s, at in enumerate(reads)
                if at == graph.arcs[h.arc].dst
            }
            readers = (max(time_s, key=time_s.__getitem__),) if time_s else ()
            more = replace(h, saved_s=(h.saved_s + graph.arcs[h.arc].time_s) / 2)
            kernels += [replace(kernel, hides=(more,), also=((3, readers),))] if readers else []
    return replace(p, kernels={where: tuple(kernels) for where, kernels in found.items()})


@dataclass
class Brute:
    """The shortest step over all choices."""

    p: Problem
    _moves: dict[
        tuple[object, ...], list[tuple[float, frozenset[tuple[tuple[int, bool], str]]]]
    ] = field(default_factory=dict)

    def best_s(self) -> float:
        ops = self.p.ops
        again = [n for n, op in enumerate(ops) if op.recomputable]
        best = math.inf
        for strategies in itertools.product(*(range(len(op.strategies)) for op in ops)):
            for picked in itertools.product(
                *([None, *range(len(ops[n].strategies))] for n in again)
            ):
                recomputed = {n: s for n, s in zip(again, picked, strict=True) if s is not None}
                best = min(best, self._step_s(strategies, recomputed))
        return best

    def _step_s(self, strategies: Sequence[int], recomputed: Mapping[int, int]) -> float:
        ops = self.p.ops
        own = sum(
            ops[n].count * ops[n].strategies[s].time_s
            for n, s in [*enumerate(strategies), *recomputed.items()]
        )
        fronts = [self._variant(v, strategies, recomputed) for v in range(len(self.p.variants))]
        best = math.inf
        for moves in itertools.product(*fronts):
            if self._one_way(product for _, products in moves for product in products):
                best = min(best, own + sum(time_s for time_s, _ in moves))
        return best

    @staticmethod
    def _one_way(products: Iterable[tuple[tuple[int, bool], str]]) -> bool:
        ways: dict[tuple[int, bool], str] = {}
        return all(ways.setdefault(product, way) == way for product, way in products)

    def _variant(
        self, v: int, strategies: Sequence[int], recomputed: Mapping[int, int]
    ) -> list[tuple[float, frozenset[object]]]:
        """Return (seconds of all instances, products with a kernel and its kind) of all ways to
        communicate a variant in both phases."""
        variant = self.p.variants[v]
        touching = (variant.value, *(use.op for use in variant.uses))
        key = (v, *((n, strategies[n], recomputed.get(n)) for n in touching))
        if key not in self._moves:
            self._moves[key] = _front(self._ways(v, strategies, recomputed))
        return self._moves[key]

    def _ways(
        self, v: int, strategies: Sequence[int], recomputed: Mapping[int, int]
    ) -> Iterator[tuple[float, frozenset[object]]]:
        return (
            (time_s, products)
            for _, time_s, products in self.ways_by_kept(v, strategies, recomputed)
        )

    def ways_by_kept(
        self, v: int, strategies: Sequence[int], recomputed: Mapping[int, int]
    ) -> Iterator[tuple[tuple[int, ...], float, frozenset[object]]]:
        """Return the ways, with the layouts that are kept for backward."""
        p, variant = self.p, self.p.variants[v]
        value = p.values[variant.value]
        graph = value.graph

        def read(op: int, operand: int, s: int) -> int:
            return graph.index[p.ops[op].strategies[s].layouts.inputs[operand]]

        made = graph.index[p.ops[value.op].strategies[strategies[value.op]].layouts.outputs[0]]
        now = {
            read(u.op, u.operand, strategies[u.op]) for u in variant.uses if u.phase == value.phase
        }
        later = {
            read(u.op, u.operand, strategies[u.op]) for u in variant.uses if u.phase != value.phase
        }
        later |= {
            read(u.op, u.operand, recomputed[u.op])
            for u in variant.uses
            if u.phase == value.phase and u.op in recomputed
        }
        rests = {made} if value.resident else set[int]()
        if value.op in recomputed:
            rests.add(
                graph.index[p.ops[value.op].strategies[recomputed[value.op]].layouts.outputs[0]]
            )
        hiding = self._kernels(v, True, strategies, recomputed)
        after = cache(lambda kept: list(_trees(graph, {*kept, *rests}, later, hiding)))
        for time_s, doing, first in _trees(
            graph, {made}, now, self._kernels(v, False, strategies, recomputed)
        ):
            alone = frozenset(first)  # layouts that do not exist as a separate tensor
            if not later:
                yield (), variant.count * time_s, doing
                continue
            sources = {made, *now} - alone
            for kept in itertools.chain.from_iterable(
                itertools.combinations(sorted(sources), k) for k in range(len(sources) + 1)
            ):
                for more_s, also, _ in after(kept):
                    yield kept, variant.count * (time_s + more_s), doing | also

    def _kernels(
        self, v: int, late: bool, strategies: Sequence[int], recomputed: Mapping[int, int]
    ) -> list[OverlapKernel]:
        kernels = self.p.kernels.get((v, late), ())
        runs = [
            k
            for k in kernels
            if (recomputed.get(k.op) if k.recomputed else strategies[k.op]) in k.strategies
        ]
        further = {id(k): [*((k.added,) if k.added else ()), *k.also] for k in runs}
        return [k for k in runs if all(strategies[op] in some for op, some in further[id(k)])]


def _front(
    ways: Iterable[tuple[float, frozenset[object]]],
) -> list[tuple[float, frozenset[object]]]:
    best: dict[frozenset[object], float] = {}
    for time_s, products in ways:
        best[products] = min(time_s, best.get(products, math.inf))
    return [(time_s, products) for products, time_s in best.items()]


def _trees(
    graph: LayoutGraph, sources: set[int], wanted: set[int], kernels: Sequence[OverlapKernel]
) -> Iterator[tuple[float, frozenset[tuple[tuple[int, bool], str]], list[int]]]:
    """Return all sets of collectives that give the wanted layouts, with all uses of kernels:
    (seconds, products with a kernel and its kind, layouts that are scattered at once or that a
    kernel computes further)."""
    arcs = list(enumerate(graph.arcs))
    for num in range(len(wanted - sources) + 2):
        for some in itertools.combinations(arcs, num):
            targets = [arc.dst for _, arc in some]
            if len(set(targets)) < num or not wanted <= _reached(sources, [arc for _, arc in some]):
                continue
            yield from _uses(graph, some, wanted, kernels)


def _reached(sources: set[int], arcs: Sequence[Arc]) -> set[int]:
    found = set(sources)
    for _ in arcs:
        found |= {arc.dst for arc in arcs if arc.src in found}
    return found


def _uses(
    graph: LayoutGraph,
    some: Sequence[tuple[int, Arc]],
    wanted: set[int],
    kernels: Sequence[OverlapKernel],
) -> Iterator[tuple[float, frozenset[tuple[tuple[int, bool], str]], list[int]]]:
    options: list[list[tuple[OverlapKernel, OverlapOption] | None]] = []
    for a, arc in some:
        whole = arc.collective.kind != "reduce_scatter" or (
            arc.src not in wanted and sum(o.src == arc.src for _, o in some) == 1
        )
        options.append([None, *((k, h) for k in kernels for h in k.hides if h.arc == a and whole)])
    for picked in itertools.product(*options):
        taken = [each for each in picked if each is not None]
        products = [(k.op if k.added is None else k.added[0], k.recomputed) for k, _ in taken]
        if len(set(products)) == len(products):
            time_s = sum(arc.time_s for _, arc in some) - sum(h.saved_s for _, h in taken)
            kinds = [graph.arcs[h.arc].collective.kind for _, h in taken]
            alone = [
                graph.arcs[h.arc].src
                for _, h in taken
                if graph.arcs[h.arc].collective.kind == "reduce_scatter"
            ]
            alone += [graph.arcs[h.arc].dst for k, h in taken if k.also]
            yield time_s, frozenset(zip(products, kinds, strict=True)), alone


@cache
def best_s(seed: int, *, summed: bool = False, normed: bool = False) -> float:
    return Brute(with_kernels(seed, summed=summed, normed=normed)).best_s()


@pytest.mark.parametrize(
    ("seed", "summed"),
    [*((s, False) for s in SEEDS), *FURTHER, *((s, True) for s in (1, 24, 25, 32))],
)
def test_the_program_with_kernels_finds_the_brute_force_optimum(seed: int, summed: bool) -> None:
    p = with_kernels(seed, summed=summed)
    found = solve(p, gap=0.0)
    assert found.bound_s <= best_s(seed, summed=summed) * (1 + 1e-9)
    assert found.objective_s == pytest.approx(best_s(seed, summed=summed), rel=1e-9)


def normed(seed: int, *, read_later: bool = False) -> Problem:
    """Return a problem like `with_kernels`. Backward does not read the result of a unless
    `read_later` is set."""
    p = with_kernels(seed, normed=True)
    if read_later:
        return p
    variants = [
        replace(v, uses=tuple(u for u in v.uses if u.phase == "forward")) if i == A else v
        for i, v in enumerate(p.variants)
    ]
    return replace(
        p,
        variants=tuple(variants),
        kernels={where: kernels for where, kernels in p.kernels.items() if where != (A, True)},
    )


@pytest.mark.parametrize(
    ("seed", "read_later"),
    [(3, False), (25, False), (3, True), pytest.param(25, True, marks=pytest.mark.slow)],
)
def test_the_program_finds_the_optimum_if_a_kernel_runs_the_op_of_a_reader(
    seed: int, read_later: bool
) -> None:
    """The operand of the kernel does not exist as a separate tensor, so that it cannot be kept for
    backward."""
    p = normed(seed, read_later=read_later)
    found, best = solve(p, gap=0.0), Brute(p).best_s()
    assert found.bound_s <= best * (1 + 1e-9)
    assert found.objective_s == pytest.approx(best, rel=1e-9)


def test_a_kernel_saves_the_op_of_a_reader_only_if_the_reader_uses_it() -> None:
    taken, refused = 0, 0
    for seed in (3, 5, 25):
        p = normed(seed)
        found = solve(p, gap=0.0)
        e = evaluate(p, found.strategies, found.recomputed, found.kept)
        norms = any(t.norms for r in e.forward.values() for t in r.kernels.values())
        bare = replace(
            p,
            kernels={
                where: tuple(k for k in kernels if not k.also)
                for where, kernels in p.kernels.items()
            },
        )
        careless = replace(
            p,
            kernels={
                where: tuple(replace(k, also=()) for k in kernels)
                for where, kernels in p.kernels.items()
            },
        )
        assert norms == (found.objective_s < solve(bare, gap=0.0).objective_s * (1 - 1e-9))
        taken += norms
        refused += solve(careless, gap=0.0).objective_s < found.objective_s * (1 - 1e-9)
    assert (taken, refused) == (2, 1)


@pytest.mark.parametrize("summed", [False, True])
def test_kernels_change_the_optimal_layouts(summed: bool) -> None:
    """Without kernels, most of these problems cost more, and some have other optimal layouts."""
    cheaper, otherwise = 0, 0
    for seed in MANY:
        p = with_kernels(seed, summed=summed)
        plain, found = solve(replace(p, kernels={}), gap=0.0), solve(p, gap=0.0)
        assert found.objective_s <= plain.objective_s * (1 + 1e-9)
        cheaper += found.objective_s < plain.objective_s * (1 - 1e-6)
        otherwise += found.strategies != plain.strategies
    assert cheaper > len(MANY) // 3 and otherwise > 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_without_kernels_both_brute_forces_agree(seed: int) -> None:
    plain = replace(with_kernels(seed), kernels={})
    assert Brute(plain).best_s() == pytest.approx(BruteForce(plain).front()[-1][1], rel=1e-9)


@pytest.mark.parametrize("seed", [0, 1])
def test_cbc_finds_the_same_optimum_with_kernels(seed: int) -> None:
    assert solve(with_kernels(seed), gap=0.0, solver="cbc").objective_s == pytest.approx(
        best_s(seed), rel=1e-6
    )


def test_the_savings_of_kernels_are_the_difference_for_the_same_choices() -> None:
    for seed in MANY:
        p = with_kernels(seed)
        e = evaluate(p, solve(p, gap=0.0).strategies)
        taken = [
            (v, t)
            for phase in (e.forward, e.backward)
            for v, r in phase.items()
            for t in r.kernels.values()
        ]
        assert e.saved_s == pytest.approx(
            sum(p.variants[v].count * t.hidden.saved_s for v, t in taken)
        )
        assert e.objective_s == pytest.approx(e.compute_s + e.communication_s - e.saved_s)


@pytest.mark.slow
@examples(120)
@given(
    seed=st.sampled_from(SEEDS),
    number=st.integers(0, 2**32),
    size=st.sampled_from((0.0, 0.02, 0.3, 3.0)),
    share=st.sampled_from((0.0, 0.1, 1.0)),
    shift=st.sampled_from((0.0, 0.3)),
    further=st.sampled_from(("", "summed", "normed")),
)
def test_no_plan_with_kernels_is_below_the_bound_for_any_multipliers(
    seed: int, number: int, size: float, share: float, shift: float, further: str
) -> None:
    kind = {further: True} if further else {}
    p = with_kernels(seed, **kind)
    multipliers = changed(p, known(seed, **kind), random.Random(number), size, share, shift)
    assert lower_bound(p, multipliers, []) <= best_s(seed, **kind) * (1 + 1e-9)


@cache
def known(seed: int, *, summed: bool = False, normed: bool = False) -> Multipliers:
    found = solve(with_kernels(seed, summed=summed, normed=normed), gap=0.5).multipliers
    assert found is not None
    return found


def test_the_multipliers_prove_nearly_the_relaxation_with_kernels() -> None:
    """For most problems, they prove all of it. The difference is due to costs of single flows, of
    which the certificate knows only the sum."""
    shares = []
    for seed in SEEDS:
        p, m = with_kernels(seed), known(seed)
        assert m.bound_s <= proven(p, m) * (1 + 1e-12) <= best_s(seed) * (1 + 2e-9)
        shares.append(proven(p, m) / best_s(seed))
    assert min(shares) > 0.8 and sum(share > 0.97 for share in shares) > len(SEEDS) // 2


@pytest.mark.parametrize("slowdown", [0.0, 0.4])
def test_with_overlap_the_bound_is_at_most_the_plan(slowdown: float) -> None:
    """If communication takes longer than compute, the search may end before the gap is closed, with
    and without kernels."""
    dearer = 0
    for seed in MANY:
        p = with_kernels(seed, slowdown=slowdown)
        found = solve(p, gap=0.0)
        assert found.multipliers is not None
        assert proven(p, found.multipliers) <= found.objective_s * (1 + 1e-9)
        assert found.bound_s <= found.objective_s
        dearer += found.objective_s > solve(replace(p, kernels={}), gap=0.0).objective_s * (
            1 + 1e-9
        )
    assert dearer <= 1
