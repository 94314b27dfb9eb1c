"""Calls with other shapes and in the other mode on several processes match the plain model and
share the parameters."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from harness import run_processes
from worker_variants import CALLS, PLANS, batch_of, model_of, train

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_variants.py")


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_an_epoch_with_several_shapes_and_evaluation_follows_the_plain_model(plan: str) -> None:
    plain = model_of(plan)
    wanted = train(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    told = run_processes(math.prod(PLANS[plan][1].values()), WORKER, "epoch", plan)
    for each in told:
        assert each["losses"] == pytest.approx(wanted, rel=2e-5)
        assert each["programs"] == len(set(CALLS)) + 1 and each["same"]
    assert abs(wanted[0] / wanted[-2] - 1) > 1e-3, "it learns"


def test_batches_with_different_shapes_on_ranks_are_refused() -> None:
    first, second = run_processes(2, WORKER, "apart")
    assert (
        first == second
        and "rank 1 calls GPT2LMHeadModel in training mode with input_ids = int64 (5, 16)" in first
    )


def test_a_batch_that_cannot_satisfy_the_constraints_is_computed_without_them() -> None:
    found = run_processes(2, WORKER, "unable")
    assert found == pytest.approx([model_of()(**batch_of(1, 16)).loss.item()] * 2, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_every_rank_captures_a_call_once(num_microbatches: int) -> None:
    parts = [(8 // num_microbatches, True)] if num_microbatches > 1 else []
    wanted = [(8, True), *parts, (8, False), (12, True)]
    assert run_processes(2, WORKER, "captures", num_microbatches) == [wanted] * 2


def test_a_model_that_cannot_be_captured_is_refused_on_every_rank() -> None:
    first, second = run_processes(2, WORKER, "refused")
    assert first.startswith("CaptureError") or first.startswith("CallError")
    assert second.startswith(f"PlanError: rank 0 could not plan: {first[:40]}")
