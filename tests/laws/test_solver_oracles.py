"""The solver against brute force, on generated small problems with real layout graphs and random prices."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from autopar.collective import Collective
from autopar.errors import InfeasibleError, LayoutError
from autopar.layout import Layout, Strategy
from autopar.problem import Op, OpKind, OpStrategy, Phase, Problem, Use, Value, Variant
from autopar.redistribute import all_layouts, layout_graph
from autopar.solve import Evaluation, evaluate, solve

MESH, SHAPE = (2,), (4, 4)
LAYOUTS = all_layouts(SHAPE, MESH)
PARTIAL = Layout.parse("P")


def problem(seed: int, budget: int = 2**40) -> Problem:
    """x → a → b; backward c reads a and b and makes the gradient of the parameter that a reads; b and c stand for two each."""
    rng = random.Random(seed)
    prices: dict[Collective, float] = {}

    def price(c: Collective) -> float:
        return prices.setdefault(c, 0.0 if c.kind == "slice" else rng.uniform(0.1, 2.0))

    def compute(key: str, phase: Phase, reads: int, count: int = 1, *, partial: bool = False) -> Op:
        outputs = [*LAYOUTS, PARTIAL] if partial else LAYOUTS
        rows = [OpStrategy(Strategy(tuple(rng.choices(LAYOUTS, k=reads)), (out,)), rng.uniform(0.0, 3.0)) for out in outputs]
        return Op(key, "compute", phase, count, (), tuple(rows), phase == "forward")

    def border(key: str, kind: OpKind, gradient: bool) -> Op:
        rows = []
        for at in LAYOUTS:
            layouts = Strategy((at,) if gradient else (), (at,))
            rows.append(OpStrategy(layouts, rng.uniform(0, 0.2), 64 if at.is_replicated else 32, 16 if gradient else 0))
        return Op(key, kind, "forward", 1, (), tuple(rows))

    ops = (
        border("w", "parameter", True), border("x", "input", False),
        compute("a", "forward", 2, partial=True), compute("b", "forward", 1, 2), compute("c", "backward", 2, 2, partial=True),
    )  # fmt: skip
    uses = {
        0: (Use(2, 0, "forward"),), 1: (Use(2, 1, "forward"),),
        2: (Use(3, 0, "forward"), Use(4, 0, "backward")), 3: (Use(4, 1, "backward"),), 4: (Use(0, 0, "backward"),),
    }  # fmt: skip
    values, variants = [], []
    for op, readers in uses.items():
        made = [s.layouts.outputs[0] for s in ops[op].strategies]
        wanted = [s.layouts.inputs[u.operand] for u in readers for s in ops[u.op].strategies]
        graph = layout_graph(SHAPE, torch.float32, MESH, made, wanted, price)
        values.append(Value(ops[op].key, op, 0, ops[op].phase, graph, op < 2))
        variants.append(Variant(op, ops[op].count, readers))
    return Problem(ops, tuple(values), tuple(variants), budget)


def fitting(p: Problem, e: Evaluation) -> bool:
    return e.static_bytes + max(e.kept_bytes, e.gradient_bytes) <= p.budget_bytes


def by_hand(p: Problem, *, tight: bool) -> float:
    """The cheapest of all choices that fits, by trying every one."""
    best = float("inf")
    again = [n for n, op in enumerate(p.ops) if op.recomputable] if tight else []
    options = [[None, *range(len(p.ops[n].strategies))] for n in again]
    for strategies in itertools.product(*(range(len(op.strategies)) for op in p.ops)):
        for picked in itertools.product(*options):
            recomputed = {n: s for n, s in zip(again, picked, strict=True) if s is not None}
            for kept in _keeping(p, tight=tight):
                try:
                    e = evaluate(p, strategies, recomputed, kept)
                except LayoutError:  # backward wants what is neither kept nor made again
                    continue
                if fitting(p, e):
                    best = min(best, e.objective_s)
    return best


def _keeping(p: Problem, *, tight: bool) -> list[dict[int, tuple[int, ...]] | None]:
    """Everything, or (where memory is tight) each value's versions kept all or not at all."""
    everything = {v: tuple(range(len(p.values[x.value].graph.layouts))) for v, x in enumerate(p.variants)}
    if not tight:
        return [None]
    return [{**everything, **dict.fromkeys(dropped, ())} for dropped in ((), (2,), (3,), (2, 3))]


@pytest.mark.parametrize("seed", range(40))
def test_with_ample_memory_the_solver_finds_what_brute_force_finds(seed: int) -> None:
    p = problem(seed)
    found = solve(p, gap=0.0)
    assert found.objective_s == pytest.approx(by_hand(p, tight=False), rel=1e-6)
    assert found.bound_s <= found.objective_s * (1 + 1e-9)
    assert found.bound_s == pytest.approx(found.objective_s, rel=1e-4)
    again = evaluate(p, found.strategies, found.recomputed, found.kept)
    assert again.objective_s == pytest.approx(found.objective_s)


@pytest.mark.parametrize("seed", range(3))
def test_with_tight_memory_the_plan_fits_and_bound_and_plan_enclose_the_optimum(seed: int) -> None:
    ample = problem(seed)
    free = solve(ample, gap=0.0)
    e = evaluate(ample, free.strategies)
    p = replace(ample, budget_bytes=e.static_bytes + max(e.kept_bytes, e.gradient_bytes) - 1)
    try:
        found = solve(p, gap=0.0)
    except InfeasibleError:
        assert by_hand(p, tight=True) == float("inf")
        return
    assert fitting(p, evaluate(p, found.strategies, found.recomputed, found.kept))
    best = by_hand(p, tight=True)
    assert found.bound_s <= best * (1 + 1e-6)
    assert found.objective_s >= free.objective_s * (1 - 1e-9)
    assert found.objective_s <= best * 1.5, "the priced search lost too much"


@pytest.mark.parametrize("seed", range(3))
def test_the_fallback_solver_agrees_and_the_same_problem_gives_the_same_choices(seed: int) -> None:
    p = problem(seed)
    first, second, other = solve(p, gap=0.0), solve(p, gap=0.0), solve(p, gap=0.0, solver="cbc")
    assert (first.strategies, first.kept) == (second.strategies, second.kept)
    assert other.objective_s == pytest.approx(first.objective_s, rel=1e-6)
