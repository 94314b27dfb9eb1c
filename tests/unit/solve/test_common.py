"""What searches for one problem share, whatever its moments."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tight_problems import problems

from autopar.core.problem import Problem
from autopar.core.solution import Solution
from autopar.solve import (
    Common,
    Least,
    SearchRequest,
    SmallerProblem,
    branch_and_cut,
    choices_or_least,
    common,
    solve,
)


def answer(problem: Problem, shared: Common) -> Solution:
    request = SearchRequest(problem, gap=0.02, common=shared)
    found = choices_or_least(request, solver="highs", bound_only=True)
    assert isinstance(found, Solution)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_large", [False, True])
def test_a_search_that_begins_with_what_another_has_found_answers_as_it_does_alone(
    is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # prices of memory are then sought by dual ascent, from the potentials behind the first
    # relaxation
    if is_large:
        monkeypatch.setattr(branch_and_cut, "SMALL", 0)
        monkeypatch.setattr(branch_and_cut, "LARGE", 0)
    several, shared = problems(), Common()
    written, formulation = list[Problem](), common.Formulation
    monkeypatch.setattr(
        common, "Formulation", lambda problem: written.append(problem) or formulation(problem)
    )
    found = [answer(problem, shared) for problem in several]
    assert len(written) == 1
    assert found == [answer(problem, Common()) for problem in several]
    assert len(written) == 1 + len(several)
    assert (
        found[0].stats["budget_rows"] > 0
        and found[0].objective_s > solve(replace(several[0], budget_bytes=2**60)).objective_s
    )


def test_problems_that_differ_in_more_than_moments_share_nothing() -> None:
    one, *_ = problems()
    shared = Common()
    answer(one, shared)
    assert shared.of(replace(one, moments=())) is not None
    changes = (
        {"budget_bytes": one.budget_bytes + 1},
        {"overlap_slowdown": 0.9},
        {"ops": tuple(reversed(one.ops))},
    )
    for other in (replace(one, **change) for change in changes):
        assert shared.of(other) is None


def test_a_smaller_problem_takes_over_moments_and_shares_the_rest() -> None:
    one, other, *_ = problems()
    excluded = {n: frozenset({0}) for n, op in enumerate(one.ops) if len(op.strategies) > 1}
    smaller, shared = SmallerProblem.of(one, excluded), Common()
    found = smaller.at_moments(other)
    assert excluded and found == SmallerProblem.of(other, excluded) != smaller
    choices_or_least(SearchRequest(smaller.problem, gap=0.02, common=shared), solver="highs")
    assert shared.of(found.problem) is not None
    assert shared.of(SmallerProblem.of(other, excluded).problem) is None


@pytest.mark.slow
def test_once_a_plan_is_known_all_rows_at_once_are_solved_only_if_no_plan_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(branch_and_cut, "SMALL", 0)
    solved, lightest = list[Problem](), branch_and_cut.Lightest
    monkeypatch.setattr(
        branch_and_cut,
        "Lightest",
        lambda problem, limit: solved.append(problem) or lightest(problem, limit),
    )
    one, other, *_ = problems()
    shared = Common()
    answer(one, shared)
    answer(other, shared)
    assert solved == [one]
    nowhere = replace(other, budget_bytes=1)
    found = [
        choices_or_least(
            SearchRequest(nowhere, gap=0.02, common=Common(has_plan=known)),
            solver="highs",
            bound_only=True,
        )
        for known in (False, True)
    ]
    assert solved == [one, nowhere, nowhere]
    assert isinstance(found[0], Least) and found[0] == found[1]
