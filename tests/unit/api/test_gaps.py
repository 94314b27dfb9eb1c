"""A warning reports a gap that is wider than requested."""

from __future__ import annotations

from typing import Any

import pytest
import zoo_small

import autopar
from autopar.constraints import pipeline

HOW: dict[str, Any] = {"hardware": "h100-sxm"}
MESH = {"stage": 2, "data": 2}


@pytest.mark.slow
def test_a_pipeline_with_a_wider_gap_than_requested_warns_and_names_the_gap_that_accepts_it(
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


def test_a_pipeline_within_the_requested_gap_does_not_warn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batch = zoo_small.gpt2()
    asked = (pipeline("stage", microbatches=2),)
    plan = autopar.plan(model, MESH, example_inputs=batch, constraints=asked, gap=0.05, **HOW)
    assert plan.proof.gap <= 0.05
    assert not [r for r in caplog.records if "is not excluded" in r.getMessage()]
    assert "was requested" not in str(autopar.explain(plan))
