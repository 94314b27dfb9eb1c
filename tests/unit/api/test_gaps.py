"""A gap that is wider than was asked for is said."""

from __future__ import annotations

from typing import Any

import pytest
import zoo_small

import autopar
from autopar.constraints import pipeline

HOW: dict[str, Any] = {"hardware": "h100-sxm"}
MESH = {"stage": 2, "data": 2}


def test_a_pipeline_that_is_proven_less_closely_says_so_and_what_accepts_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batch = zoo_small.gpt2()
    asked = (pipeline("stage", microbatches=2),)
    plan = autopar.plan(model, MESH, example_inputs=batch, constraints=asked, gap=1e-5, **HOW)
    assert plan.proof.gap > 1e-5
    (said,) = [r.getMessage() for r in caplog.records if "is not excluded" in r.getMessage()]
    assert "gap=1e-05" in said and "gap=0.00093 accepts this plan" in said
    assert "was requested" in str(autopar.explain(plan))

    caplog.clear()
    accepted = autopar.plan(
        model, MESH, example_inputs=batch, constraints=asked, gap=0.00094, **HOW
    )
    assert accepted.proof.gap <= 0.00094 and not [
        r for r in caplog.records if "gap=" in r.getMessage()
    ]


def test_one_that_is_proven_as_closely_as_asked_for_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batch = zoo_small.gpt2()
    asked = (pipeline("stage", microbatches=2),)
    plan = autopar.plan(model, MESH, example_inputs=batch, constraints=asked, gap=0.05, **HOW)
    assert plan.proof.gap <= 0.05
    assert not [r for r in caplog.records if "is not excluded" in r.getMessage()]
    assert "was requested" not in str(autopar.explain(plan))
