"""What searches for one problem share, whatever its moments."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import zoo_small

from autopar.choices import Choices
from autopar.cost.moments import Liveness
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.problem import Problem
from autopar.solve import Common, choices_or_least, common, evaluated, search, solve

sys.path.insert(0, str(Path(__file__).parents[3]))
from benchmarks.random_plans import prepare

NUM_LAYERS = 1


def problems() -> list[Problem]:
    """One that memory binds, with some of its moments, then others, and the first again."""
    model, batch = zoo_small.llama(num_layers=NUM_LAYERS)
    ready = prepare(model, batch, Mesh.parse("2"), HardwareProfile.load("h100-sxm"))
    free = ready.priced.problem
    ample = evaluated(free, solve(free))
    moments = Liveness(ready.trace, ready.priced).certain()
    tight = replace(free, budget_bytes=int(0.8 * max(ample.resting_bytes)))
    return [replace(tight, moments=some) for some in (moments[::3], moments, moments[::3])]


def answer(problem: Problem, shared: Common) -> Choices:
    found = choices_or_least(problem, gap=0.02, time_limit_s=math.inf, solver="highs", bound_only=True, common=shared)
    assert isinstance(found, Choices)
    return found


@pytest.mark.parametrize("is_large", [False, True])
def test_a_search_that_begins_with_what_another_has_found_answers_as_it_does_alone(is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_large:  # prices of memory are then sought by dual ascent, from the potentials behind the first relaxation
        monkeypatch.setattr(search, "SMALL", 0)
        monkeypatch.setattr(search, "LARGE", 0)
    several, shared = problems(), Common()
    written, formulation = list[Problem](), common.Formulation
    monkeypatch.setattr(common, "Formulation", lambda problem: written.append(problem) or formulation(problem))
    found = [answer(problem, shared) for problem in several]
    assert len(written) == 1
    assert found == [answer(problem, Common()) for problem in several]
    assert len(written) == 1 + len(several)
    assert found[0].stats["budget_rows"] > 0 and found[0].objective_s > solve(replace(several[0], budget_bytes=2**60)).objective_s


def test_problems_that_differ_in_more_than_moments_share_nothing() -> None:
    one, *_ = problems()
    shared = Common()
    answer(one, shared)
    assert shared.of(replace(one, moments=())) is not None
    changes = {"budget_bytes": one.budget_bytes + 1}, {"overlap_slowdown": 0.9}, {"ops": tuple(reversed(one.ops))}
    for other in (replace(one, **change) for change in changes):
        assert shared.of(other) is None
