"""On several processes, stages of a model that returns no loss train with one outside of it as the
plain model does, in the predicted memory, and run forward alone where no gradient is wanted."""

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
def test_training_with_a_loss_outside_follows_the_plain_model(
    facts: list[tuple[str, dict[str, Any]]],
) -> None:
    for name, told in facts:
        tolerance = 1e-6 if "tied" in name else 1e-12  # parts of it compute in float32 themselves
        wanted, found = told["losses"]
        assert found == pytest.approx(wanted, rel=tolerance)
        assert told["parameters"] < tolerance and abs(told["moved"]) > 1e-4 and told["held"]


def test_evaluation_is_planned_as_forward_alone_in_the_same_stages(
    facts: list[tuple[str, dict[str, Any]]],
) -> None:
    for name, told in facts:
        assert told["evaluated"] < (1e-6 if "tied" in name else 1e-12) and told["forward alone"]


def test_gradients_of_gradients_are_refused_on_every_rank(
    facts: list[tuple[str, dict[str, Any]]],
) -> None:
    assert all("computes first derivatives only" in told["second"] for _, told in facts)


def test_a_step_holds_what_was_predicted(facts: list[tuple[str, dict[str, Any]]]) -> None:
    for _, told in facts:
        measured, predicted = told["peak"]
        assert measured == predicted


def test_what_a_loss_leaves_out_what_calls_share_and_what_is_refused() -> None:
    first, second = run_processes(2, WORKER, "parts")
    assert first["nothing trained here"] and not second["nothing trained here"]
    for told in (first, second):
        assert all(told[which] < 1e-12 for which in ("logits", "size", "two calls"))
        assert "backward ran a second time for one call" in told["twice"]
    assert (
        "was changed in place after the call" in second["changed"]
    )  # of the first stage backward reads nothing


def test_a_stage_that_trains_nothing_takes_part_in_backward() -> None:
    first, second = run_processes(2, WORKER, "frozen")
    assert first[0] and not second[0] and first[1] < 1e-12 and second[1] < 1e-12


def test_an_output_that_was_changed_is_told_of_on_all_ranks() -> None:
    assert all(
        "output 'early' was changed in place" in said
        for said in run_processes(2, WORKER, "changed")
    )


def test_ranks_that_compute_different_losses_are_told_so() -> None:
    first, second = run_processes(2, WORKER, "apart")
    said = "a different loss from the same outputs than rank 0: the gradients of logits"
    assert first == second and said in first


def test_what_has_no_part_in_the_loss_is_not_computed_and_its_infinite_derivatives_do_no_harm() -> (
    None
):
    assert all(error < 1e-12 for errors in run_processes(2, WORKER, "unused") for error in errors)


@pytest.mark.slow
def test_several_stages_a_rank_are_evaluated_as_forward_alone() -> None:
    for gradients, evaluated, alone in run_processes(2, WORKER, "interleaved"):
        assert gradients < 1e-12 and evaluated < 1e-12 and alone


def test_outputs_are_held_once() -> None:
    for measured, predicted in run_processes(2, WORKER, "large"):
        assert measured == predicted
