"""`explain`, `report` and `diff` take every plan of a small model, and what they tell adds up to the plan's numbers.

The model is planned in the ways that a step has: free and named, in stages and microbatches, for inference, on one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zoo_small

import autopar
from autopar import constraints
from autopar.explanation import Diff, Explanation, StagedExplanation, diff, explain
from autopar.plans import Plan
from autopar.report import report

LINE, SQUARE = {"gpu": 2}, {"data": 2, "tensor": 2}
ZOO = ("gpt2",)
PLANS: Mapping[str, tuple[Mapping[str, int], Mapping[str, Any]]] = {
    "free": (SQUARE, {}),
    "ddp": (LINE, {"constraints": (constraints.ddp(),)}),
    "fsdp": (LINE, {"constraints": (constraints.fsdp(),)}),
    "stages": (SQUARE, {"constraints": (constraints.pipeline("data", microbatches=2),)}),
    "interleaved": (
        SQUARE,
        {
            "constraints": (
                constraints.pipeline("data", microbatches=2, schedule="interleaved_1f1b"),
            )
        },
    ),
    "microbatches": (LINE, {"num_microbatches": 2}),
    "inference": (SQUARE, {"inference": True}),
    "alone": ({"gpu": 1}, {}),
}


@cache
def built(kind: str) -> tuple[Any, Any]:
    model, batch = getattr(zoo_small, kind)()
    return model, batch


@cache
def planned(kind: str, name: str) -> Plan:
    model, batch = built(kind)
    mesh, options = PLANS[name]
    return autopar.plan(model, mesh, example_inputs=batch, hardware="h100-sxm", **options)


FAST = [("gpt2", name) for name in ("free", "fsdp", "microbatches", "inference")]
EVERY = [(kind, name) for kind in ZOO for name in PLANS]
CASES = [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in EVERY]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_plan_is_explained_whole_and_by_each_of_its_modules(
    kind: str, name: str, tmp_path: Path
) -> None:
    plan = planned(kind, name)
    found = explain(plan)
    assert isinstance(found, StagedExplanation if plan.pipeline else Explanation)
    assert found.parts and all(part.module in str(found) for part in found.parts)
    assert "nan" not in str(found).split() and "<pre" in found._repr_html_()
    for module in {part.module for part in found.parts if part.module}:
        narrow = explain(plan, module=module)
        assert all(part.matches(module) for part in narrow.parts)
        assert f"Decisions of {module}" in str(narrow)
    plan.save(tmp_path / "plan.json")
    assert str(explain(tmp_path / "plan.json")) == str(found), "the file says all that is explained"


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_plan_is_drawn_and_shown(kind: str, name: str, tmp_path: Path) -> None:
    plan = planned(kind, name)
    page = report(plan, tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "data:image/png" in page and all(part.module in page for part in explain(plan).parts)
    assert report(plan, tmp_path / "plan.svg").stat().st_size
    assert "<" in plan._repr_html_() and "nan" not in plan._repr_html_().split()


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_plan_is_compared_with_every_other_of_its_model(kind: str, name: str) -> None:
    plan = planned(kind, name)
    itself = diff(plan, plan)
    assert not itself.changes and itself.num_equal
    every = [name for _, name in FAST] if (kind, name) in FAST else list(PLANS)
    for other in every:
        if other != name:
            _compare(plan, planned(kind, other))


def _compare(first: Plan, second: Plan) -> None:
    """What is told of two plans adds up to what they take."""
    there, back = diff(first, second), diff(second, first)
    assert str(there) and "<pre" in there._repr_html_()
    assert {change.module for change in there.changes} == {change.module for change in back.changes}
    assert there.num_equal == back.num_equal
    for found, plans in ((there, (first, second)), (back, (second, first))):
        if found.beside:
            for which, plan in enumerate(plans):
                assert math.isclose(_told_s(found, which), plan.prediction.step_s, rel_tol=1e-9)
        if not any(plan.pipeline for plan in plans):
            _adds_up(found)


def _adds_up(found: Diff) -> None:
    """Modules told as the same may differ by a ten-thousandth of the step, in compute or in communication."""
    before, after = found.first.prediction, found.second.prediction
    untold_s = 1e-4 * max(before.step_s, after.step_s) * (found.num_equal + 1e-3)
    for of in ("compute_s", "communication_s"):
        told_s = sum(getattr(change, of) for change in found.changes)
        assert abs(told_s - (getattr(after, of) - getattr(before, of))) <= untold_s


def _told_s(found: Diff, which: int) -> float:
    shares = [change.shares[which] for change in found.changes if change.shares]
    return sum(share.time_s for share in shares if share) + sum(
        row[1 + which] for row in found.beside
    )
