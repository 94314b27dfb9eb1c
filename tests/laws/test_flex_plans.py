"""Models with flex attention are planned and validated, and match the plain model under every
kind of plan."""

from __future__ import annotations

from typing import Any

import pytest
from flex import batch_of, model_of

import autopar
from autopar.constraints import ddp, fsdp, megatron

PLANS: dict[str, list[Any]] = {
    "ddp": [ddp()],
    "fsdp": [fsdp()],
    "heads": [megatron(tp=2)],
    "queries": [megatron(cp=2)],
    "stages": [megatron(pp=2, microbatches=2)],
}
SHORT = (
    ("documents", "heads"),
    ("alibi", "heads"),
    ("relative bias", "queries"),
    ("soft cap", "stages"),
)
LONG = tuple(
    (kind, plan)
    for kind in (
        "causal",
        "sliding window",
        "documents",
        "alibi",
        "soft cap",
        "relative bias",
        "sums",
        "samples that differ",
    )
    for plan in PLANS
    if (kind, plan) not in SHORT and (kind, plan) != ("samples that differ", "stages")
)


def _assert_equal(kind: str, name: str) -> None:
    model, batch = model_of(kind), batch_of()
    plan = autopar.plan(
        model, 2, example_inputs=batch, constraints=PLANS[name], hardware="cpu-gloo"
    )
    assert autopar.verify(plan, model, batch).max_error < 1e-12
    certificate = autopar.check(plan, model, batch)
    assert certificate.ok and certificate.validation is not None
    assert not certificate.validation.unproven
    assert not [key for key in certificate.validation.open if "flex_attention" in key]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), SHORT)
def test_outputs_and_gradients_match_the_plain_model_and_each_op_is_validated(
    kind: str, name: str
) -> None:
    _assert_equal(kind, name)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), LONG)
def test_outputs_and_gradients_match_the_plain_model_under_all_plans(kind: str, name: str) -> None:
    _assert_equal(kind, name)


@pytest.mark.slow
def test_score_functions_that_use_sample_indices_are_refused_in_microbatches() -> None:
    model, batch = model_of("samples that differ"), batch_of()
    with pytest.raises(autopar.errors.CoupledError, match="flex_attention"):
        autopar.plan(
            model, 2, example_inputs=batch, constraints=PLANS["stages"], hardware="cpu-gloo"
        )
