"""The solver compared with brute force, on small generated problems with real layout graphs and
random prices."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from autopar.core.collective import Collective
from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import all_layouts, layout_graph, local_bytes
from autopar.core.problem import (
    MemoryPoint,
    Op,
    OpKind,
    OpStrategy,
    Phase,
    Problem,
    Use,
    Value,
    Variant,
)
from autopar.core.solution import Solution
from autopar.errors import InfeasibleError
from autopar.solve import (
    Least,
    Lightest,
    branch_and_cut,
    choices_or_least,
    evaluate,
    least_budget,
    restricted,
    solve,
)
from autopar.solve import branching as tree
from autopar.solve.branch_and_cut import SearchRequest
from autopar.solve.formulation import SCALE

SHAPE, LINE, SQUARE = (4, 4), (2,), (2, 2)
PARTIALS = {LINE: "P", SQUARE: "R P"}
NUM_LAYOUTS = 3  # number of result layouts of an op; on a line, these are all layouts
AMPLE = 2**40
W, X, A, B, GRADIENT = range(5)  # variants; A and B are results of forward
Point = tuple[int, float]  # bytes, seconds
Held = tuple[
    int, int, "Seconds"
]  # kept bytes of one instance, its bytes on the hosts, communication of all instances
Seconds = tuple[
    float, float, float, float, float
]  # alone; compute in forward, in backward; overlapped communication in forward, in backward
Chosen = tuple[int, ...]


def problem(
    seed: int,
    mesh: tuple[int, ...] = LINE,
    *,
    moments: bool = False,
    slowdown: float = 1.0,
    hosts: float | None = None,
    unasked: bool = False,
) -> Problem:
    """Return the problem of x → a → b, where c in backward reads a and b and returns the gradient
    of the parameter that a reads. a and c have two instances each.

    With overlap, slices take time, and in every other problem b may not be recomputed, so that its
    kept layouts exist when backward starts.

    Args:
        hosts: share of the results of forward that fits into host memory; None for no hosts.
        unasked: whether a recomputation of a does not read x.
    """
    rng = random.Random(seed)
    possible = all_layouts(SHAPE, mesh)
    prices: dict[Collective, float] = {}

    def price(c: Collective) -> float:
        if slowdown < 1.0 and c.kind == "slice":
            return 0.05
        return prices.setdefault(c, 0.0 if c.kind == "slice" else rng.uniform(0.1, 2.0))

    def compute(key: str, phase: Phase, reads: int, count: int = 1, *, partial: bool = False) -> Op:
        outputs = rng.sample(possible, NUM_LAYOUTS) + (
            [Layout.parse(PARTIALS[mesh])] if partial else []
        )
        rows = [
            OpStrategy(
                Strategy(tuple(rng.choices(possible, k=reads)), (out,)), rng.uniform(0.0, 3.0)
            )
            for out in outputs
        ]
        return Op(key, "compute", phase, count, (), tuple(rows), phase == "forward")

    def border(key: str, kind: OpKind, gradient: bool) -> Op:
        rows = []
        for at in rng.sample(possible, NUM_LAYOUTS):
            layouts = Strategy((at,) if gradient else (), (at,))
            size = local_bytes(SHAPE, torch.float32, at, mesh)
            rows.append(
                OpStrategy(layouts, rng.uniform(0, 0.2), size, size // 4 if gradient else 0)
            )
        return Op(key, kind, "forward", 1, (), tuple(rows))

    ops = (
        border("w", "parameter", True),
        border("x", "input", False),
        compute("a", "forward", 2, 2, partial=True),
        compute("b", "forward", 1),
        compute("c", "backward", 2, 2, partial=True),
    )
    if slowdown < 1.0 and seed % 2:
        ops = (*ops[:B], replace(ops[B], recomputable=False), *ops[B + 1 :])
    uses = {
        0: (Use(2, 0, "forward"),),
        1: (Use(2, 1, "forward", read_again=not unasked),),
        2: (Use(3, 0, "forward"), Use(4, 0, "backward")),
        3: (Use(4, 1, "backward"),),
        4: (Use(0, 0, "backward"),),
    }
    values, variants = [], []
    for op, readers in uses.items():
        made = [s.layouts.outputs[0] for s in ops[op].strategies]
        wanted = [s.layouts.inputs[u.operand] for u in readers for s in ops[u.op].strategies]
        graph = layout_graph(SHAPE, torch.float32, mesh, made, wanted, price)
        away_s = (
            tuple(_to_host(rng, at) for at in graph.layouts)
            if hosts is not None and op in (A, B)
            else ()
        )
        values.append(Value(ops[op].key, op, 0, ops[op].phase, graph, op < 2, away_s=away_s))
        variants.append(Variant(op, ops[op].count, readers))
    seen = tuple(_moment(ops, rng, stored=hosts is not None) for _ in range(3)) if moments else ()
    most = sum(
        x.count * local_bytes(SHAPE, torch.float32, Layout.replicated(len(mesh)), mesh)
        for x in (variants[A], variants[B])
    )
    budget = int((hosts or 0.0) * most)
    return Problem(
        ops,
        tuple(values),
        tuple(variants),
        AMPLE,
        seen,
        overlap_slowdown=slowdown,
        host_budget_bytes=budget,
    )


def _to_host(rng: random.Random, layout: Layout) -> float:
    return math.inf if layout.has_partial or rng.random() < 0.2 else rng.uniform(0.05, 0.8)


def seconds_of(p: Problem, phase: str, time_s: float, how: str) -> Seconds:
    """Return the seconds of one piece of work: ``compute``, ``beside`` or ``alone``."""
    late = phase == "backward"
    if how == "alone":
        return (time_s, 0.0, 0.0, 0.0, 0.0)
    return (
        0.0,
        *(
            time_s if (h, at) == (how, late) else 0.0
            for h in ("compute", "beside")
            for at in (False, True)
        ),
    )  # type: ignore[return-value]


def step_s(p: Problem, parts: Iterable[Seconds]) -> float:
    """Return the seconds of a step. Overlapped communication takes a share s of its time from
    compute, and the step is not shorter than the communication."""
    alone, *rest = map(sum, zip((0.0,) * 5, *parts, strict=True))
    forward, backward, sent_forward, sent_backward = rest
    s = p.overlap_slowdown
    return (
        alone
        + max(forward + s * sent_forward, sent_forward)
        + max(backward + s * sent_backward, sent_backward)
    )


def runs_beside(p: Problem, v: int, late: bool) -> bool:
    """Return whether the collectives of a variant overlap. w and x are stored; only w reads its
    gradient; b is kept if it may not be recomputed."""
    return (
        v in (W, X)
        or (v == GRADIENT and not late)
        or (v == B and late and not p.ops[B].recomputable)
    )


def _moment(ops: tuple[Op, ...], rng: random.Random, *, stored: bool = False) -> MemoryPoint:
    """Return a moment of the step at which one op runs and some instances of the results of forward
    are kept."""
    running = rng.choice((2, 3, 4))
    sizes = tuple(rng.choice((16, 32, 64, 96)) for _ in ops[running].strategies)
    again = tuple(
        (n, tuple(rng.choice((8, 16)) for _ in op.strategies))
        for n, op in enumerate(ops)
        if op.recomputable
    )
    held, reserve = ((A, rng.choice((1, 2))), (B, 1)), rng.choice((0, 8))
    back = tuple((v, rng.choice((0, 1))) for v in (A, B)) if stored else ()
    return MemoryPoint(ops[running].key, held, ((running, sizes),), reserve, again, back)


def peak_of(
    p: Problem,
    strategies: Chosen,
    recomputed: dict[int, int],
    kept: list[int],
    stored: list[int] | None = None,
) -> int:
    """Return the largest memory at the start of backward, at its end, or at a moment. `kept` is
    bytes per instance of each variant, `stored` the bytes on the hosts."""
    rows = [(op.count, op.strategies[s]) for op, s in zip(p.ops, strategies, strict=True)]
    static, gradient = (
        sum(n * getattr(s, name) for n, s in rows) for name in ("static_bytes", "gradient_bytes")
    )
    sizes = [static + sum(x.count * size for x, size in zip(p.variants, kept, strict=True))]
    sizes.append(static + gradient)
    for m in p.moments:
        live = sum(size[strategies[op]] for op, size in m.live) + sum(
            size[recomputed[op]] for op, size in m.recomputed if op in recomputed
        )
        back = sum(num * stored[v] for v, num in m.fetched) if stored else 0
        sizes.append(
            static + sum(num * kept[v] for v, num in m.kept) + back + live + m.reserve_bytes
        )
    return max(sizes)


@dataclass
class BruteForce:
    """All choices. Given strategies and recomputation, the kept versions of each variant are chosen
    independently, so that the options of each variant are computed once for all choices of the ops
    that use it."""

    p: Problem
    _known: dict[tuple[object, ...], list[Held]] = field(default_factory=dict)
    _found: dict[tuple[object, ...], list[Seconds]] = field(default_factory=dict)

    def front(self) -> tuple[Point, ...]:
        """Return the cheapest plan of each peak that is cheaper than all plans with smaller peaks,
        in ascending order of the peak."""
        best: dict[int, float] = {}
        again = [n for n, op in enumerate(self.p.ops) if op.recomputable]
        for strategies in itertools.product(*(range(len(op.strategies)) for op in self.p.ops)):
            for picked in itertools.product(
                *([None, *range(len(self.p.ops[n].strategies))] for n in again)
            ):
                recomputed = {n: s for n, s in zip(again, picked, strict=True) if s is not None}
                for peak, objective in self._outcomes(strategies, recomputed):
                    best[peak] = min(objective, best.get(peak, math.inf))
        return _undercut(best.items())

    def _outcomes(self, strategies: Chosen, recomputed: dict[int, int]) -> Iterator[Point]:
        ops = self.p.ops
        runs = [(n, s, ops[n].phase) for n, s in enumerate(strategies)] + [
            (n, s, "backward") for n, s in recomputed.items()
        ]
        kinds = ["compute" if ops[n].kind == "compute" else "alone" for n, _, _ in runs]
        timed = [(phase, ops[n].count, ops[n].strategies[s]) for n, s, phase in runs]
        compute = [
            seconds_of(self.p, phase, count * (s.time_s - s.communication_s), kind)
            for (phase, count, s), kind in zip(timed, kinds, strict=True)
        ]
        own = [
            seconds_of(self.p, phase, count * s.communication_s, "alone")
            for phase, count, s in timed
        ]
        done = tuple(map(sum, zip(*compute, *own, strict=True)))
        options = [self._variant(v, strategies, recomputed) for v in range(len(self.p.variants))]
        for held in itertools.product(*options):
            there = sum(
                x.count * size for x, (_, size, _) in zip(self.p.variants, held, strict=True)
            )
            if there <= self.p.host_budget_bytes:
                peak = peak_of(
                    self.p,
                    strategies,
                    recomputed,
                    [size for size, _, _ in held],
                    [size for _, size, _ in held],
                )
                yield peak, step_s(self.p, (done, *(t for _, _, t in held)))  # type: ignore[arg-type]

    def _variant(self, v: int, strategies: Chosen, recomputed: dict[int, int]) -> list[Held]:
        """Return the options for each set of kept versions."""
        variant = self.p.variants[v]
        touching = (
            variant.value,
            *(use.op for use in variant.uses),
        )  # value v is the result of op v
        key = (v, *((n, strategies[n], recomputed.get(n)) for n in touching))
        if key not in self._known:
            self._known[key] = _least(self._held(v, strategies, recomputed))
        return self._known[key]

    def _held(self, v: int, strategies: Chosen, recomputed: dict[int, int]) -> Iterator[Held]:
        variant = self.p.variants[v]
        value = self.p.values[variant.value]
        layouts, ops = value.graph.index, self.p.ops
        made = layouts[ops[value.op].strategies[strategies[value.op]].layouts.outputs[0]]
        now = {
            layouts[ops[u.op].strategies[strategies[u.op]].layouts.inputs[u.operand]]
            for u in variant.uses
            if u.phase == value.phase
        }
        later = {
            layouts[ops[u.op].strategies[strategies[u.op]].layouts.inputs[u.operand]]
            for u in variant.uses
            if u.phase != value.phase
        }
        again = [
            u
            for u in variant.uses
            if u.phase == value.phase and u.read_again and u.op in recomputed
        ]
        later |= {
            layouts[ops[u.op].strategies[recomputed[u.op]].layouts.inputs[u.operand]] for u in again
        }
        first = self._trees(v, {made}, now, late=False)
        versions = (
            [n for n in sorted({made, *now}) if value.keepable is None or n in value.keepable]
            if later
            else []
        )
        versions += [value.stored_version(n) for n in versions if value.away(n) < math.inf]
        free = {made} if value.resident else set[int]()
        if value.op in recomputed:
            free.add(layouts[ops[value.op].strategies[recomputed[value.op]].layouts.outputs[0]])
        for kept in itertools.chain.from_iterable(
            itertools.combinations(versions, k) for k in range(len(versions) + 1)
        ):
            sources = free | {n % len(layouts) for n in kept}
            sizes = [
                sum(size(n) for n in kept if not (value.resident and n == made))
                for size in (value.bytes, value.host_bytes)
            ]
            away_s = variant.count * sum(
                value.away(n - len(layouts)) for n in kept if value.on_host(n)
            )
            copies = [
                seconds_of(self.p, phase, away_s, "beside") for phase in ("forward", "backward")
            ]
            for moves in itertools.product(first, self._trees(v, sources, later, late=True)):
                yield sizes[0], sizes[1], tuple(map(sum, zip(*moves, *copies, strict=True)))  # type: ignore[misc]

    def _trees(self, v: int, sources: set[int], wanted: set[int], *, late: bool) -> list[Seconds]:
        """Return the undominated times of all sets of collectives that give the wanted layouts."""
        variant = self.p.variants[v]
        value, key = self.p.values[variant.value], (v, frozenset(sources), frozenset(wanted), late)
        if key not in self._found:
            phase, how = (
                "backward" if late else value.phase,
                "beside" if runs_beside(self.p, v, late) else "alone",
            )
            kinds = {
                arc: "compute" if arc.collective.kind == "slice" else how
                for arc in value.graph.arcs
            }
            arcs = [
                (
                    arc.src,
                    arc.dst,
                    seconds_of(self.p, phase, variant.count * arc.time_s, kinds[arc]),
                )
                for arc in value.graph.arcs
            ]
            if self.p.overlap_slowdown == 1.0:
                arcs = [
                    (src, dst, (sum(seconds), 0.0, 0.0, 0.0, 0.0)) for src, dst, seconds in arcs
                ]
            self._found[key] = trees(arcs, sources, wanted)
        return self._found[key]


def trees(
    arcs: Sequence[tuple[int, int, Seconds]], sources: set[int], wanted: set[int]
) -> list[Seconds]:
    """Return the undominated seconds of trees from any source to all wanted layouts; empty if there
    are none.

    The times are computed by the set of wanted layouts and the start of a tree, from smaller sets
    and from one additional arc, until nothing changes.
    """
    targets = sorted(wanted - sources)
    nothing: Seconds = (0.0,) * 5
    arcs = [
        (-1 if a in sources else a, b, seconds) for a, b, seconds in arcs if b not in sources
    ]  # all sources count as one
    nodes = {-1, *targets, *(b for _, b, _ in arcs)}
    best: dict[int, dict[int, list[Seconds]]] = {0: {at: [nothing] for at in nodes}}
    for some in range(1, 1 << len(targets)):
        parts = [part for part in range(1, some) if part & some == part]
        best[some] = here = {
            at: _least(
                _plus(a, b) for part in parts for a in best[part][at] for b in best[some ^ part][at]
            )
            for at in nodes
        }
        for n, target in enumerate(targets):
            here[target] = [nothing] if some == 1 << n else here[target]
        grows = True
        while grows:
            grows = False
            for a, b, seconds in arcs:
                further = (
                    _least([*here[a], *(_plus(seconds, each) for each in here[b])])
                    if a in nodes
                    else []
                )
                if a in nodes and further != here[a]:
                    here[a], grows = further, True
    return best[(1 << len(targets)) - 1][-1]


def _plus(a: Seconds, b: Seconds) -> Seconds:
    return tuple(round(x + y, 12) for x, y in zip(a, b, strict=True))  # type: ignore[return-value]


T = TypeVar("T", bound=tuple[Any, ...])


def _least(found: Iterable[T]) -> list[T]:
    """Return the undominated points in order."""
    left: list[T] = []
    for each in sorted(dict.fromkeys(found), key=_flat):
        if not any(_no_more(_flat(other), _flat(each)) for other in left):
            left.append(each)
    return left


def _flat(each: tuple[Any, ...]) -> tuple[float, ...]:
    return (*each[:-1], *each[-1]) if isinstance(each[-1], tuple) else each


def _no_more(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x <= y for x, y in zip(a, b, strict=True))


def _undercut(points: Iterable[Point]) -> tuple[Point, ...]:
    kept: list[Point] = []
    for size, cost in sorted(points):
        if not kept or cost < kept[-1][1]:
            kept.append((size, cost))
    return tuple(kept)


@dataclass(frozen=True)
class Case:
    seed: int
    mesh: tuple[int, ...] = LINE
    moments: bool = False
    slowdown: float = 1.0
    hosts: float | None = None
    unasked: bool = False

    def __str__(self) -> str:
        beside = f" beside {self.slowdown}" if self.slowdown < 1.0 else ""
        hosts = "" if self.hosts is None else f" hosts {self.hosts}"
        unasked = " unasked" if self.unasked else ""
        return (
            f"{self.seed}"
            f" {'line' if self.mesh == LINE else 'square'}{' moments' if self.moments else ''}{beside}{hosts}{unasked}"  # noqa: E501
        )

    def problem(self, budget: int = AMPLE) -> Problem:
        found = problem(
            self.seed,
            self.mesh,
            moments=self.moments,
            slowdown=self.slowdown,
            hosts=self.hosts,
            unasked=self.unasked,
        )
        return replace(found, budget_bytes=budget)


@cache
def front(case: Case) -> tuple[Point, ...]:
    return BruteForce(case.problem()).front()


def needs(p: Problem, found: Solution) -> int:
    """Return the peak of a plan, counted as in brute force."""
    return peak_of(
        p, found.strategies, dict(found.recomputed), kept_of(p, found), stored_of(p, found)
    )


def kept_of(p: Problem, found: Solution) -> list[int]:
    """Return the kept bytes of an instance of each variant."""
    sizes = []
    for v, variant in enumerate(p.variants):
        value = p.values[variant.value]
        own = value.graph.index[
            p.ops[value.op].strategies[found.strategies[value.op]].layouts.outputs[0]
        ]
        kept = [n for n in found.kept.get(v, ()) if not (value.resident and n == own)]
        sizes.append(sum(value.bytes(n) for n in kept))
    return sizes


def stored_of(p: Problem, found: Solution) -> list[int]:
    """Return the bytes of an instance of each variant on the hosts."""
    return [
        sum(map(p.values[x.value].host_bytes, found.kept.get(v, ())))
        for v, x in enumerate(p.variants)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_collectives_within_ops_are_not_overlapped(seed: int) -> None:
    """The collectives inside an op take up to all of its time. If the remaining compute cannot hide
    the other communication, the bound may be lower."""
    shares, p = random.Random(seed), problem(seed, LINE, slowdown=0.4)
    ops = [
        (
            replace(
                op,
                strategies=tuple(
                    replace(s, communication_s=s.time_s * shares.random()) for s in op.strategies
                ),
            )
            if op.kind == "compute"
            else op
        )
        for op in p.ops
    ]
    p = replace(p, ops=tuple(ops))
    best = BruteForce(p).front()[-1][1]
    found = solve(p, gap=0.0)
    assert found.objective_s == pytest.approx(best) and found.bound_s <= best * (1 + 1e-6)
    assert found.objective_s == pytest.approx(
        evaluate(p, found.strategies, found.recomputed, found.kept).objective_s
    )
    hidden = evaluate(
        replace(p, ops=problem(seed, LINE, slowdown=0.4).ops),
        found.strategies,
        found.recomputed,
        found.kept,
    )
    assert hidden.objective_s <= found.objective_s + 1e-9, (
        "the same as compute, beside which communication may run, takes no longer"
    )


FAST = [
    Case(seed, mesh, m)
    for mesh, num in ((LINE, 3), (SQUARE, 2))
    for seed in range(num)
    for m in (False, True)
]
BESIDE = [
    Case(0, LINE, slowdown=0.4),
    Case(1, LINE, slowdown=0.4),
    Case(1, SQUARE, True, 0.4),
    Case(2, LINE, True, slowdown=0.0),
]
HOSTED = [
    Case(0, hosts=1.0),
    Case(1, LINE, True, 0.4, hosts=1.0),
    Case(1, SQUARE, True, hosts=1.0),
    Case(2, LINE, True, hosts=0.3),
]
OFTEN_HOSTED = [
    Case(seed, mesh, True, s, hosts=room)
    for seed in range(3, 15)
    for mesh in (LINE, SQUARE)
    for s in (1.0, 0.4)
    for room in (1.0, 0.3)
]
OFTEN_BESIDE = [
    Case(seed, mesh, mesh == SQUARE, slowdown)
    for seed in range(3, 20)
    for mesh in (LINE, SQUARE)
    for slowdown in (0.4, 0.0)
]
HALVED = Case(6, LINE, slowdown=0.0)  # a mixture of two trees would cost less than either
SLOW = [
    Case(seed, mesh, m) for mesh in (LINE, SQUARE) for seed in range(3, 40) for m in (False, True)
]
every_case = pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)], ids=str
)


@every_case
def test_under_every_budget_the_plan_fits_and_is_within_the_requested_gap(
    case: Case,
) -> None:
    for budget, best in (*front(case), (AMPLE, front(case)[-1][1])):
        for gap in (0.0, 0.05):
            p = case.problem(budget)
            found = solve(p, gap=gap)
            assert needs(p, found) <= budget
            assert found.objective_s == pytest.approx(
                evaluate(p, found.strategies, found.recomputed, found.kept).objective_s
            )
            assert found.bound_s <= best * (1 + 1e-6) and best <= found.objective_s * (1 + 1e-6)
            assert found.objective_s * (1 - gap) <= best * (1 + 1e-6)
            assert found.gap <= gap + 1e-6


@pytest.mark.slow
def test_operands_that_recompute_does_not_read_cost_nothing_there() -> None:
    cheaper = 0
    for case in (Case(1, moments=True, unasked=True), Case(4, unasked=True)):
        for budget, best in front(case):
            p = case.problem(budget)
            found = solve(p, gap=0.0)
            assert (
                needs(p, found) <= budget
                and found.objective_s == pytest.approx(best)
                and found.gap <= 1e-6
            )
            taken = evaluate(p, found.strategies, found.recomputed, found.kept)
            assert (
                taken.objective_s == pytest.approx(best)
                and not taken.backward[X].arcs
                and not taken.kept[X]
            )
            with_it = [step for size, step in front(replace(case, unasked=False)) if size <= budget]
            cheaper += not with_it or best < min(with_it) * (1 - 1e-6)
    assert cheaper, "some of the best plans run a again, and would move x for it"


@pytest.mark.parametrize(
    "case",
    [
        *BESIDE,
        *(c if c == HALVED else pytest.param(c, marks=pytest.mark.slow) for c in OFTEN_BESIDE),
    ],
    ids=str,
)
def test_with_overlap_the_step_and_the_bound_enclose_the_optimum(
    case: Case,
) -> None:
    for budget, best in (*front(case), (AMPLE, front(case)[-1][1])):
        p = case.problem(budget)
        found = solve(p, gap=0.0)
        taken = evaluate(p, found.strategies, found.recomputed, found.kept)
        assert needs(p, found) <= budget and found.objective_s == pytest.approx(taken.objective_s)
        assert found.bound_s <= best * (1 + 1e-6)
        assert found.objective_s == pytest.approx(best) and found.gap <= 1e-6


@pytest.mark.parametrize(
    "case",
    [Case(4, LINE, slowdown=0.0), *(Case(seed, SQUARE, True, 0.0) for seed in (4, 9))],
    ids=str,
)
def test_given_choices_use_the_trees_with_the_shortest_step(
    case: Case,
) -> None:
    p, rng, outlasted = case.problem(), random.Random(0), 0
    brute = BruteForce(p)
    for n in range(60):
        strategies = (
            tuple(rng.randrange(len(op.strategies)) for op in p.ops) if n else (1, 2, 2, 1, 1)
        )
        again = {
            m: rng.randrange(len(op.strategies))
            for m, op in enumerate(p.ops)
            if n and op.recomputable and rng.random() < 0.3
        }
        outcomes = [step for _, step in brute._outcomes(strategies, again)]
        if outcomes:
            found = evaluate(p, strategies, again)
            assert found.objective_s == pytest.approx(min(outcomes))
            assert evaluate(p, strategies, again, found.kept).objective_s == found.objective_s, (
                "from what is kept the same again"
            )
            outlasted += found.outlasted
    assert outlasted


@pytest.mark.parametrize(
    "case", [*HOSTED, *(pytest.param(c, marks=pytest.mark.slow) for c in OFTEN_HOSTED)], ids=str
)
def test_with_host_memory_the_step_and_the_bound_enclose_the_optimum(
    case: Case,
) -> None:
    """If host memory is the limit, the bound may be lower, since no multiplier represents it."""
    stored = 0
    for budget, best in (*front(case), (AMPLE, front(case)[-1][1])):
        p = case.problem(budget)
        found = solve(p, gap=0.0)
        taken = evaluate(p, found.strategies, found.recomputed, found.kept)
        assert needs(p, found) <= budget and found.objective_s == pytest.approx(taken.objective_s)
        there = sum(x.count * size for x, size in zip(p.variants, stored_of(p, found), strict=True))
        assert there == taken.host_bytes <= p.host_budget_bytes
        assert found.bound_s <= best * (1 + 1e-6) and found.objective_s == pytest.approx(best)
        assert found.multipliers is None or found.multipliers.bound_s <= best * (1 + 1e-6)
        assert found.gap <= 1e-6 or case.hosts != 1.0
        stored += there
    assert stored or case not in HOSTED, (
        "under some budget the best has something wait on the hosts"
    )


@pytest.mark.slow
@pytest.mark.parametrize("sifted_from", [0, 50_000])
@pytest.mark.parametrize("likely", [(0.3, 0.7), (0.0, 0.0)])
def test_a_search_finds_and_proves_the_same_from_any_start(
    likely: tuple[float, float], sifted_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (branch_and_cut, restricted):
        monkeypatch.setattr(module, "LARGE", sifted_from)
    outlasted = 0
    for p in [replace(case.problem(front(case)[0][0]), moments=()) for case in BESIDE]:
        plain, begun = (
            branch_and_cut.BranchAndCut(SearchRequest(p, 0.0, 200, 60.0, likely=balance))
            for balance in ((1.0, 1.0), likely)
        )
        first, second = plain.run(), begun.run()
        assert first is not None and second is not None
        assert second.objective_s == pytest.approx(
            first.objective_s
        ) and second.bound_s == pytest.approx(first.bound_s)
        outlasted += bool(begun.extra.phases)
    assert outlasted, "some memory binds, so that excess came in with its row"


@pytest.mark.slow
def test_a_balance_found_by_sifting_proves_the_bound_of_all_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outlasted = 0
    for p in [
        replace(case.problem(budget), moments=())
        for case in BESIDE
        for budget in (AMPLE, front(case)[0][0])
    ]:
        within = branch_and_cut.BranchAndCut(SearchRequest(p, 0.0, 200, 60.0))
        within.run()
        with monkeypatch.context() as patch:
            for module in (branch_and_cut, restricted):
                patch.setattr(module, "LARGE", 0)
            sifted = branch_and_cut.BranchAndCut(SearchRequest(p, 0.0, 200, 60.0))
            found = sifted.run()
        assert found is not None and within.plans.best is not None
        assert found.objective_s == pytest.approx(
            within.plans.best.objective_s
        ) and found.bound_s <= found.objective_s * (1 + 1e-9)
        if within.extra.phases and {*within.extra.active} == {*sifted.extra.active}:
            outlasted += 1
            assert sifted.proven.relaxed.bound == pytest.approx(
                within.proven.relaxed.bound, rel=3e-3
            ), "relaxations, before any branching"
            ours, theirs = sifted.proven.multipliers(), within.proven.multipliers()
            assert (
                ours is not None
                and theirs is not None
                and ours.bound_s == pytest.approx(theirs.bound_s, rel=1e-2)
            )
    assert outlasted


def test_the_tested_problems_include_compute_bound_and_communication_bound_ones() -> None:
    found = [solve(case.problem(budget), gap=0.0) for case in BESIDE for budget, _ in front(case)]
    assert {choices.stats["outlasted"] > 0 for choices in found} == {False, True}
    assert any(c.multipliers is not None and min(c.multipliers.balance) < 1.0 for c in found)


@examples(60)
@given(seed=st.integers(0, 2**16), choice=st.integers(0, 2**32), line=st.booleans())
def test_overlapped_communication_has_slack_for_all_choices(
    seed: int, choice: int, line: bool
) -> None:
    p, rng = problem(seed, LINE if line else SQUARE, slowdown=0.5), random.Random(choice)
    again = [n for n, op in enumerate(p.ops) if op.recomputable and rng.random() < 0.5]
    recomputed = {n: rng.randrange(len(p.ops[n].strategies)) for n in again}
    e = evaluate(p, [rng.randrange(len(op.strategies)) for op in p.ops], recomputed)
    for late, phase in ((False, e.forward), (True, e.backward)):
        for v, moves in phase.items():
            assert moves.early == runs_beside(p, v, late) or not moves.arcs
            assert not moves.early or "critical" not in moves.slacks


@every_case
def test_a_budget_is_refused_exactly_if_no_plan_fits_with_valid_figures(
    case: Case,
) -> None:
    least = front(case)[0][0]
    with pytest.raises(
        InfeasibleError,
        match=f"no plan fits into {least - 1} bytes .* at least .* is needed, .* is sufficient",
    ):
        solve(case.problem(least - 1))
    found = least_budget(case.problem(1))
    assert (
        0
        < least_budget(case.problem(1), bound_only=True).bound_bytes
        <= found.bound_bytes
        <= least
        <= found.size_bytes
    )
    assert found.size_bytes <= least * 1.01, "a budget that would do, and not much more than that"
    enough = solve(case.problem(found.size_bytes), gap=0.0)
    assert needs(case.problem(), enough) <= found.size_bytes


@every_case
def test_a_plan_only_search_encloses_the_optimum_and_refuses_infeasible_budgets(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (branch_and_cut, restricted):
        monkeypatch.setattr(module, "SMALL", 0)
    least = front(case)[0][0]
    assert Lightest(case.problem(1), 60.0).bound_bytes <= least
    for budget, best_s in front(case):
        found = plan_only(case.problem(budget))
        assert isinstance(found, Solution) and needs(case.problem(), found) <= budget
        assert found.bound_s <= best_s * (1 + 1e-6) and best_s <= found.objective_s * (1 + 1e-6)
        assert found.unfinished or found.gap <= 1e-6
    refused = plan_only(case.problem(least - 1))
    assert isinstance(refused, Least) and 0 < refused.bound_bytes <= least


def plan_only(p: Problem) -> Solution | Least:
    request = SearchRequest(p, gap=0.0, time_limit_s=60.0, only_plan=True)
    found = choices_or_least(request, solver="highs", bound_only=True)
    assert isinstance(found, Solution | Least)
    return found


@pytest.mark.slow
def test_some_plan_only_searches_end_early_and_some_refuse_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (branch_and_cut, restricted):
        monkeypatch.setattr(module, "SMALL", 0)
    found = [plan_only(case.problem(budget)) for case in FAST for budget, _ in front(case)]
    assert any(isinstance(each, Solution) and each.unfinished for each in found)
    monkeypatch.setattr(
        branch_and_cut.SearchRelaxation,
        "add_rows",
        lambda *_: pytest.fail("rows came in one after another"),
    )
    refused = [plan_only(case.problem(int(front(case)[0][0] * 0.5))) for case in FAST]
    assert all(isinstance(each, Least) for each in refused)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_keepable", [0, 1, 2])
def test_the_plan_keeps_only_allowed_versions_and_is_optimal_among_those(
    seed: int, num_keepable: int
) -> None:
    free = Case(seed).problem()
    allowed = frozenset(range(num_keepable))
    few = replace(
        free,
        values=tuple(
            replace(value, keepable=allowed) if i in (A, B) else value
            for i, value in enumerate(free.values)
        ),
    )
    for budget, best in BruteForce(few).front():
        p = replace(few, budget_bytes=budget)
        found = solve(p, gap=0.0)
        assert found.objective_s == pytest.approx(best) and needs(p, found) <= budget
        assert {n for v in (A, B) for n in found.kept.get(v, ())} <= allowed
        assert num_keepable or set(found.recomputed) == {
            A,
            B,
        }, "what may not be kept at all runs again"
    assert solve(few).objective_s >= solve(free).bound_s


@pytest.mark.parametrize("case", FAST[::2], ids=str)
@pytest.mark.parametrize("tree", [0, 5, 10**6], ids=["no tree", "short", "long"])
def test_a_search_over_parts_encloses_the_optimum_and_refuses_no_feasible_budget(
    case: Case, tree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (branch_and_cut, restricted):
        monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr(branch_and_cut, "_RELAXATIONS", tree / 200)
    monkeypatch.setattr(restricted, "_RUNGS", (30, 60))
    for budget, best in front(case):
        p = case.problem(budget)
        found = solve(p, gap=0.05)
        assert needs(p, found) <= budget
        assert found.bound_s <= best * (1 + 1e-6) and best <= found.objective_s * (1 + 1e-6)
        assert tree < 100 or found.gap <= 0.05 + 1e-6
    with pytest.raises(InfeasibleError):
        solve(case.problem(front(case)[0][0] - 1))


@every_case
def test_branch_and_bound_alone_finds_and_proves_the_optimum(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_other(self: restricted.Climb, *_: object, **__: object) -> list[int]:
        return []

    for name in ("up", "from_vertex", "over", "prove"):
        monkeypatch.setattr(restricted.Climb, name, no_other)
    for budget, best in front(case):
        found = solve(case.problem(budget), gap=0.0, max_nodes=10**4)
        assert needs(case.problem(budget), found) <= budget
        assert found.objective_s == pytest.approx(best) and found.bound_s <= best * (1 + 1e-6)
        assert found.gap <= 0.02, (
            "collectives shared by several readers are relaxed, all else is whole"
        )


def test_if_relaxations_run_out_of_steps_the_bound_is_that_of_the_enclosing_box(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[float] = []

    class Short(tree.Tree):
        def _at(self, *box: Any) -> Any:
            node = super()._at(*box)
            if node is not None and not len(node.point.values):
                ended.append(node.point.bound - box[2])
            return node

    monkeypatch.setattr(tree, "_FEWEST", 1)
    monkeypatch.setattr(tree, "_PER_ROW", 0.0)
    monkeypatch.setattr(tree, "_STEPS", 1000)
    monkeypatch.setattr(branch_and_cut, "Tree", Short)
    for case in FAST[:2]:
        for budget, best in front(case)[:2]:
            found = choices_or_least(SearchRequest(case.problem(budget), 0.0, 10), solver="highs")
            assert isinstance(found, Solution | Least)
            assert (
                found.bound_s <= best * (1 + 1e-6)
                if isinstance(found, Solution)
                else found.bound_bytes <= budget
            )
            assert not isinstance(found, Solution) or needs(case.problem(budget), found) <= budget
    assert ended and min(ended) >= 0.0


@every_case
def test_rows_against_mixtures_cut_off_no_choices(case: Case) -> None:
    for budget, best in front(case):
        looked = branch_and_cut.BranchAndCut(SearchRequest(case.problem(budget), 0.0, 200, 60.0))
        plain = looked.relaxation.solve_free()
        tight = looked.relaxation.add_rows(list(range(len(looked.extra.rows))))
        assert plain is not None and tight is not None
        assert tight.bound <= best * SCALE * (1 + 1e-6) and plain.bound <= best * SCALE * (1 + 1e-6)


def test_if_the_search_finds_nothing_a_plan_of_least_memory_is_used_if_it_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(0)
    monkeypatch.setattr(branch_and_cut.BranchAndCut, "run", lambda self: None)
    found = solve(case.problem(front(case)[0][0]))
    assert needs(case.problem(), found) == front(case)[0][0]
    assert found.bound_s <= front(case)[0][1]


@pytest.mark.parametrize("case", [*FAST[:3], *BESIDE[:2]], ids=str)
def test_the_fallback_solver_finds_the_same_optimum(case: Case) -> None:
    points = front(case)
    for budget in (AMPLE, points[len(points) // 2][0], points[0][0]):
        p = case.problem(budget)
        ours, theirs = solve(p, gap=0.0), solve(p, gap=0.0, solver="cbc")
        assert theirs.objective_s == pytest.approx(ours.objective_s, rel=1e-6)
        assert theirs.solver == "cbc" and ours.solver == "highs"
    with pytest.raises(InfeasibleError, match="no plan fits"):
        solve(case.problem(points[0][0] - 1), solver="cbc")


SAME = """
import time
import zoo_small
from test_solver_oracles import Case
from autopar.capture import capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.planner import PlanOptions, make_plan
from autopar.solve import solve
print([solve(Case(seed).problem(budget), gap=gap) for seed in (0, 1) for budget in (150, 2**40) for gap in (0.0, 0.05)])
model, batch = zoo_small.gpt2(num_layers=1)
trace, mesh, hardware = capture(model, (), batch), Mesh(4), HardwareProfile.load("cpu-gloo")
clock = time.monotonic
time.monotonic = lambda: clock() * 1e6  # work is limited, not time
ample = make_plan(trace, mesh, hardware, PlanOptions()).plan
budget = int(0.9 * ample.prediction.peak_bytes)
tight = make_plan(trace, mesh, hardware, PlanOptions(memory_bytes=budget)).plan
print("memory binds:", tight.prediction.peak_bytes <= budget)
print(tight.dumps())
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.multiproc
def test_choices_and_plans_are_deterministic_across_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new process, whose sets have another order, gives the same results as this process, which
    has planned much before."""
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1",
    }
    code = (
        "import sys; sys.path[:0] ="
        f" {[str(here), str(here.parent), str(here.parent / 'support')]!r}{SAME}"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    monkeypatch.setattr(
        time, "monotonic", time.monotonic
    )  # restored after the test, since the code changes it
    exec(compile(SAME, "same", "exec"), {})
    assert "memory binds: True" in there and '"entries"' in there
    assert capsys.readouterr().out == there
