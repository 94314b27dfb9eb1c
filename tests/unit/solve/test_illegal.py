"""A problem without a legal assignment is refused, by whichever way it is found out, and the op
that refuses is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import LayoutGraph
from autopar.core.problem import Problem
from autopar.errors import InfeasibleError
from autopar.solve import branch_and_cut, greedy, restricted, solve
from autopar.solve.dual_ascent import Ascent
from tests.laws.test_solver_oracles import GRADIENT, A, problem

WHOLE, SPLIT = Layout.parse("R"), Layout.parse("S(0)")


def refused() -> Problem:
    """The parameter w adds up its gradient in parts, c makes it whole, and no collectives lead
    there."""
    p = problem(0)
    w, c = p.ops[0], p.ops[-1]
    w = replace(
        w,
        strategies=tuple(
            replace(s, layouts=Strategy((SPLIT,), s.layouts.outputs)) for s in w.strategies
        ),
    )
    c = replace(
        c,
        strategies=tuple(
            replace(s, layouts=Strategy(s.layouts.inputs, (WHOLE,))) for s in c.strategies
        ),
    )
    graph = LayoutGraph((SPLIT, WHOLE), (32, 64), (), {SPLIT: 0, WHOLE: 1})
    values = tuple(
        replace(value, graph=graph) if v == GRADIENT else value for v, value in enumerate(p.values)
    )
    return replace(p, ops=(w, *p.ops[1:-1], c), values=values)


@pytest.mark.parametrize("small", [0, 4000])
@pytest.mark.parametrize("huge", [0, 100_000])
@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_every_way_of_finding_out_names_the_op_that_refuses(
    small: int, huge: int, solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (branch_and_cut, restricted):
        monkeypatch.setattr(module, "SMALL", small)  # from here on dual ascent begins
    monkeypatch.setattr(greedy, "_HUGE", huge)
    with pytest.raises(
        InfeasibleError,
        match=r"exists: w reads c as S\(0\), but no collectives lead to it from R",
    ) as refusal:
        solve(refused(), solver=solver)
    assert "constraints" in refusal.value.remedy


def test_dual_ascent_refuses_by_itself() -> None:
    with pytest.raises(InfeasibleError, match="w reads c"):
        Ascent(refused())


@pytest.mark.parametrize("small", [0, 4000])
def test_an_op_without_a_strategy_is_named(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (branch_and_cut, restricted):
        monkeypatch.setattr(module, "SMALL", small)
    p = problem(0)
    with pytest.raises(InfeasibleError, match="b has no strategy"):
        solve(replace(p, ops=(*p.ops[:3], replace(p.ops[3], strategies=()), *p.ops[4:])))


def test_what_nothing_is_kept_for_does_not_run_again_and_is_no_refusal() -> None:
    """b reads a, which backward has no version of: it is not kept, and does not run again."""
    p = problem(0)
    uses = tuple(use for use in p.variants[A].uses if use.phase == "forward")
    variants = (*p.variants[:A], replace(p.variants[A], uses=uses), *p.variants[A + 1 :])
    values = (*p.values[:A], replace(p.values[A], keepable=frozenset()), *p.values[A + 1 :])
    ops = (*p.ops[:A], replace(p.ops[A], recomputable=False), *p.ops[A + 1 :])
    b, c = ops[A + 1], ops[A + 2]
    assert b.recomputable and not c.recomputable
    ascent = Ascent(replace(p, ops=ops, values=values, variants=variants))
    ascent.sweep()
    assert ascent.bound_s > 0.0
