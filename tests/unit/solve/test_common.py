"""What searches for one problem share, whatever its moments."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tight_problems import problems

from autopar.core.problem import Problem
from autopar.core.solution import Solution
from autopar.solve import Common, branch_and_cut, choices_or_least, common, solve


def answer(problem: Problem, shared: Common) -> Solution:
    found = choices_or_least(
        problem, gap=0.02, time_limit_s=math.inf, solver="highs", bound_only=True, common=shared
    )
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
