"""A huge program is not solved where the plan that has every tensor whole will do, and has an
answer where time runs out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import zoo_small

from autopar.capture import capture
from autopar.certificate.bound import lower_bound
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.core.problem import Problem
from autopar.cost.price import price
from autopar.sharding import classes_of
from autopar.solve import evaluate, greedy, solve
from autopar.solve.branch_and_cut import SearchRelaxation
from autopar.solve.highs import Engine, Relaxation, proof

H100 = HardwareProfile.load("h100-sxm")


@cache
def problem(budget_bytes: int = 2**36) -> Problem:
    """Of a model so small that a launch takes longer than what it launches."""
    model, batch = zoo_small.gpt2(dtype=torch.bfloat16)
    trace, mesh = capture(model, (), batch), Mesh(2)
    return price(
        trace, classes_of(trace, mesh.shape), mesh, H100, budget_bytes=budget_bytes
    ).problem


def whole(p: Problem) -> tuple[int, ...]:
    found = []
    for op in p.ops:
        layouts = [(*s.layouts.inputs, *s.layouts.outputs) for s in op.strategies]
        found.append(
            next(i for i, each in enumerate(layouts) if all(x.is_replicated for x in each))
        )
    return tuple(found)


@pytest.fixture
def huge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "_HUGE", 0)


@pytest.mark.usefixtures("huge")
def test_where_it_is_close_to_the_quickest_of_every_op_no_relaxation_is_solved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        SearchRelaxation, "solve_free", lambda self: pytest.fail("it is close enough")
    )
    p = problem()
    found = solve(p, gap=0.2)
    assert found.strategies == whole(p)
    assert found.objective_s == pytest.approx(evaluate(p, whole(p)).objective_s)
    assert found.multipliers is not None and found.multipliers.bound_s == pytest.approx(
        lower_bound(p, {}, [])
    )
    assert found.bound_s == pytest.approx(found.multipliers.bound_s) and 0.0 < found.gap <= 0.2


@pytest.mark.usefixtures("huge")
def test_where_it_is_not_the_search_goes_on_and_ends_as_it_would_have() -> None:
    """On a slow device work is worth sharing."""
    p = problem()
    rows = [tuple(replace(s, time_s=s.time_s * work(s)) for s in op.strategies) for op in p.ops]
    slow = replace(
        p, ops=tuple(replace(op, strategies=row) for op, row in zip(p.ops, rows, strict=True))
    )
    found = solve(slow, gap=0.0)
    assert found.objective_s < evaluate(slow, whole(slow)).objective_s
    greedy._HUGE = 10**9
    assert found.objective_s == pytest.approx(solve(slow, gap=0.0).objective_s, rel=1e-9)


def work(strategy: object) -> float:
    """As if what is whole took a thousand times as long."""
    layouts = (*strategy.layouts.inputs, *strategy.layouts.outputs)  # type: ignore[attr-defined]
    return 1000.0 if all(x.is_replicated for x in layouts) else 1.0


@pytest.mark.usefixtures("huge")
def test_where_time_runs_out_it_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relaxation then gives neither values nor duals."""

    def relax(self: Engine, *_: object, **__: object) -> Relaxation:
        self.limit.timed_out = True
        none = np.zeros(len(self.rows.lower))
        bound, reduced, duals = proof(self.cost, self.rows, none)
        return Relaxation(bound, reduced, duals, np.zeros(len(self.cost)), False)

    monkeypatch.setattr(Engine, "relax", relax)
    p = problem()
    found = solve(p, gap=0.0, time_limit_s=0.0)
    assert found.stats["timed_out"] == 1.0
    assert found.objective_s <= evaluate(p, whole(p)).objective_s * (1 + 1e-12)
    assert 0.0 < found.bound_s <= found.objective_s


@pytest.mark.usefixtures("huge")
def test_where_it_does_not_fit_it_is_no_answer() -> None:
    tight = problem(120_000)
    e = evaluate(tight, whole(tight))
    assert max(e.resting_bytes) > tight.budget_bytes
    found = solve(tight, gap=0.05)
    assert found.strategies != whole(tight)
    assert (
        max(evaluate(tight, found.strategies, found.recomputed, found.kept).resting_bytes)
        <= tight.budget_bytes
    )
