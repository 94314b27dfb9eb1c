"""Searches are limited by what they do, and begin with what is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tight_problems import small_problems

from autopar.core.problem import Problem
from autopar.core.solution import Multipliers, Solution
from autopar.solve import Common, branch_and_cut, choices_or_least, solve
from autopar.solve.branch_and_cut import BranchAndCut, SearchRequest
from autopar.solve.highs import Engine, SimplexWork


def searched(
    problem: Problem, *, gap: float = 0.0, shared: Common | None = None, met: Solution | None = None
) -> Solution:
    request = SearchRequest(problem, gap, common=shared or Common(), met=met)
    found = choices_or_least(request, solver="highs", bound_only=True)
    assert isinstance(found, Solution)
    return found


def test_each_run_counts_with_its_columns_and_what_is_left_is_in_steps_of_a_program() -> None:
    work = SimplexWork()
    work.add(10, 500)
    work.add(20, -1)  # a run that HiGHS did not begin
    assert work.spent == 10 * 1500 + 20 * 1000 and not work.is_over
    assert work.steps_left(10) == 2**31 - 1, "as many as HiGHS can be told"
    work.most = work.spent + 40_000
    assert (work.steps_left(10), work.steps_left(100)) == (4000, 1000), "a run may take some steps"
    work.add(10, 3000)
    assert work.is_over


def test_a_problem_takes_the_same_work_each_time_and_searches_that_share_add_theirs() -> None:
    one, other, _ = small_problems()
    alone = [Common(), Common()]
    for shared in alone:
        searched(one, shared=shared)
    assert alone[0].work.spent == alone[1].work.spent > 0.0
    spent = alone[0].work.spent
    looked = BranchAndCut(SearchRequest(one, 0.0, 200))
    for num in (1, 2):
        looked.engine.relax()
        assert looked.engine.work.spent >= num * 1000 * len(looked.engine.names)
    searched(other, shared=alone[0])
    assert alone[0].work.spent > spent


def test_a_search_that_has_a_plan_ends_when_its_work_is_done_with_a_bound_that_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, *_ = small_problems()
    monkeypatch.setattr(branch_and_cut, "SMALL", 0)
    best, whole = solve(problem, gap=0.0), Common()
    searched(problem, shared=whole)
    short = Common()
    short.work.most = 1.0
    found = searched(problem, shared=short, met=best)
    assert short.work.spent < whole.work.spent / 2
    assert found.objective_s == best.objective_s and 0.0 < found.bound_s <= best.objective_s


def test_without_a_plan_it_goes_on_to_the_first_whatever_the_work() -> None:
    problem, *_ = small_problems()
    shared = Common()
    shared.work.most = 1.0
    assert searched(problem, shared=shared).objective_s >= solve(problem, gap=0.0).bound_s * (
        1 - 1e-9
    )


def test_what_is_known_is_the_answer_unless_a_better_one_is_found_and_its_bound_holds_on() -> None:
    problem, *_ = small_problems()
    best = solve(problem, gap=0.0)
    worse = solve(problem, gap=0.5)
    assert searched(problem, met=replace(worse, bound_s=0.0)).objective_s == pytest.approx(
        best.objective_s
    )
    again = searched(problem, gap=0.5, met=best)
    assert again.objective_s == best.objective_s, "a search for less does not lose it"
    assert (
        again.bound_s == pytest.approx(best.bound_s)
        and again.bound_s > solve(problem, gap=0.5).bound_s
    )
    assert (
        again.multipliers is not None
        and best.multipliers is not None
        and again.multipliers.bound_s >= best.multipliers.bound_s
    )


def test_what_does_not_fit_this_problem_is_not_begun_with() -> None:
    problem, *_ = small_problems()
    ample = solve(replace(problem, budget_bytes=2**60), gap=0.0)
    looked = BranchAndCut(SearchRequest(problem, 0.0, 200, met=replace(ample, bound_s=0.0)))
    looked.plans.meet(ample)
    assert looked.plans.best is None
    assert searched(problem, met=replace(ample, bound_s=0.0)).objective_s > ample.objective_s


def test_the_same_columns_under_the_same_rows_are_searched_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, *_ = small_problems()
    looked = BranchAndCut(SearchRequest(problem, 0.0, 200))
    runs = list[int]()
    restricted = Engine.solve_restricted

    def counted(self: Engine, columns: np.ndarray, *args: object, **how: object) -> object:  # type: ignore[type-arg]
        runs.append(int(columns.sum()))
        return restricted(self, columns, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "solve_restricted", counted)
    columns = np.ones(len(looked.engine.names), bool)
    assert looked.climb.over(columns) != [] or looked.plans.best is not None
    assert looked.climb.over(columns.copy()) == [] and len(runs) == 1
    looked.extra.active = [0]
    looked.climb.over(columns)
    fewer = columns.copy()
    fewer[np.flatnonzero(columns)[-1]] = False
    looked.climb.over(fewer)
    assert len(runs) == 3, "other rows or other columns are another search"


def test_multipliers_of_what_is_known_are_those_of_the_bound() -> None:
    problem, *_ = small_problems()
    looked = BranchAndCut(SearchRequest(problem, 0.0, 200))
    looked.proven.take(replace(solve(problem), bound_s=3.0, multipliers=Multipliers(3.0, {}, {})))
    assert looked.proven.bound_s == pytest.approx(3.0) and looked.proven.first is not None
