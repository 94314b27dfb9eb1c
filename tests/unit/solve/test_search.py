"""The rounds of branch and cut: which phases run, and when a round ends."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tight_problems import small_problems

from autopar.core.problem import Problem
from autopar.solve.branch_and_cut import BranchAndCut, Outcome, SearchRequest
from autopar.solve.highs import Relaxation
from autopar.solve.lazy_rows import _VIOLATION

PHASES = (
    "_round_off",
    "_restrict_at_vertex",
    "_dive",
    "_restrict_before_branching",
    "_branch",
    "_restrict",
    "_prove",
)


@cache
def problem() -> Problem:
    return small_problems()[0]


def run_round(
    outcomes: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], Outcome]:
    """Run a round whose phases have these outcomes, and go on by default.

    Returns:
        The phases that ran, and the outcome of the round.
    """
    search, ran = BranchAndCut(SearchRequest(problem(), 0.0, 200)), list[str]()
    relaxation = search.relaxation.solve_free()
    assert relaxation is not None

    def phase(name: str, *given: Relaxation) -> Outcome:
        ran.append(name)
        assert given == ((relaxation,) if name == "_round_off" else ())
        return outcomes.get(name, Outcome())

    for name in PHASES:
        monkeypatch.setattr(search, name, lambda *given, name=name: phase(name, *given))
    outcome = search._run_round(relaxation)
    return ran, outcome


@pytest.mark.parametrize("last", PHASES)
@pytest.mark.parametrize("outcome", [Outcome(rows=(0,)), Outcome(is_final=True)], ids=str)
def test_a_round_ends_at_the_first_phase_that_asks_for_rows_or_ends_the_search(
    last: str, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, found = run_round({last: outcome}, monkeypatch)
    assert ran == [*PHASES[: PHASES.index(last) + 1]] and found is outcome


def test_a_round_runs_all_phases_if_none_of_them_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_round({}, monkeypatch) == ([*PHASES], Outcome())


def test_a_round_ends_if_a_plan_is_close_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.solve.bounds.Incumbent.is_close", lambda _: True)
    assert run_round({}, monkeypatch) == ([PHASES[0]], Outcome())


def test_a_search_without_further_rows_ends_after_one_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds, run = list[Outcome](), BranchAndCut._run_round

    def watched(search: BranchAndCut, relaxation: Relaxation) -> Outcome:
        rounds.append(run(search, relaxation))
        return rounds[-1]

    monkeypatch.setattr(BranchAndCut, "_run_round", watched)
    found = BranchAndCut(SearchRequest(problem(), 0.0, 200)).run()
    assert found is not None and found.stats["budget_rows"] > 0
    assert all(outcome.rows for outcome in rounds[:-1]) and not rounds[-1].rows
    assert len(rounds) > 1, "budget rows came in after the first"


def test_budget_rows_that_the_vertex_of_the_relaxation_violates_raise_its_bound() -> None:
    p = small_problems()[1]
    p = replace(p, budget_bytes=int(0.7 * p.budget_bytes))
    search = BranchAndCut(SearchRequest(p, 0.0, 200))
    relaxation = search.relaxation.solve_free()
    assert relaxation is not None
    first = search._round_off(relaxation).rows
    point = search.relaxation.add_rows(first)
    assert point is not None and set(first) < set(search.extra.budget)
    assert not search.extra.violated(point.values)
    rows = search.extra.matrix([*range(len(search.extra.rows))])
    assert (rows.activities(point.values) <= rows.upper + _VIOLATION).all()
    all_at_once = BranchAndCut(SearchRequest(p, 0.0, 200))
    assert all_at_once.relaxation.solve_free() is not None
    whole = all_at_once.relaxation.add_rows([*range(len(search.extra.rows))])
    assert whole is not None and point.bound == pytest.approx(whole.bound)
