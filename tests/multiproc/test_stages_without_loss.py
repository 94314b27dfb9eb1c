"""Stages of a model without a loss on several processes train with an outer loss as the plain
model, in the predicted memory, and run only forward if no gradient is needed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from harness import run_processes
from worker_stages_without_loss import FURTHER, PLANS

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_stages_without_loss.py")


@pytest.fixture(
    scope="module",
    params=[*PLANS, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)],
)
def facts(request: pytest.FixtureRequest) -> list[tuple[str, dict[str, Any]]]:
    _, axes, _ = (PLANS | FURTHER)[request.param]
    return [
        pair
        for told in run_processes(math.prod(axes.values()), WORKER, "run", [request.param])
        for pair in told.items()
    ]


@pytest.mark.slow
def test_training_stages_with_an_outer_loss_follows_the_plain_model(
    facts: list[tuple[str, dict[str, Any]]],
) -> None:
    for name, told in facts:
        tolerance = 1e-6 if "tied" in name else 1e-12  # parts of the model compute in float32
        wanted, found = told["losses"]
        assert found == pytest.approx(wanted, rel=tolerance)
        assert told["parameters"] < tolerance and abs(told["moved"]) > 1e-4 and told["held"]


def test_evaluation_is_planned_for_inference_with_the_same_stages(
    facts: list[tuple[str, dict[str, Any]]],
) -> None:
    for name, told in facts:
        assert told["evaluated"] < (1e-6 if "tied" in name else 1e-12) and told["forward alone"]


def test_second_derivatives_are_refused_on_every_rank(
    facts: list[tuple[str, dict[str, Any]]],
) -> None:
    assert all("computes first derivatives only" in told["second"] for _, told in facts)


def test_a_step_of_stages_has_the_predicted_memory(facts: list[tuple[str, dict[str, Any]]]) -> None:
    for _, told in facts:
        measured, predicted = told["peak"]
        assert measured == predicted


def test_partial_losses_and_shared_backwards_match_and_misuse_is_refused() -> None:
    first, second = run_processes(2, WORKER, "parts")
    assert first["nothing trained here"] and not second["nothing trained here"]
    for told in (first, second):
        assert all(told[which] < 1e-12 for which in ("logits", "size", "two calls"))
        assert "backward ran a second time for one call" in told["twice"]
    assert (
        "was changed in place after the call" in second["changed"]
    )  # backward of the first stage reads no changed tensor


def test_a_frozen_stage_takes_part_in_backward() -> None:
    first, second = run_processes(2, WORKER, "frozen")
    assert first[0] and not second[0] and first[1] < 1e-12 and second[1] < 1e-12


def test_a_changed_output_is_refused_on_all_ranks() -> None:
    assert all(
        "output 'early' was changed in place" in said
        for said in run_processes(2, WORKER, "changed")
    )


def test_different_outer_losses_of_stages_are_refused() -> None:
    first, second = run_processes(2, WORKER, "apart")
    said = "a different loss from the same outputs than rank 0: the gradients of logits"
    assert first == second and said in first


def test_infinite_derivatives_of_unused_outputs_do_not_reach_gradients() -> None:
    assert all(error < 1e-12 for errors in run_processes(2, WORKER, "unused") for error in errors)


@pytest.mark.slow
def test_several_stages_per_rank_are_evaluated_with_an_inference_plan() -> None:
    for gradients, evaluated, alone in run_processes(2, WORKER, "interleaved"):
        assert gradients < 1e-12 and evaluated < 1e-12 and alone


def test_outputs_of_stages_are_stored_once() -> None:
    for measured, predicted in run_processes(2, WORKER, "large"):
        assert measured == predicted
