"""A gradient scaler on several processes with stages and microbatches has the gradients, skipped
steps and scales of one process."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness import run_processes
from worker_scaling import LAYOUTS, LOOPS

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_scaling.py")
HALF, NARROW = 3e-3, 1e-2  # rounding of float16, where both compute in it, and beside float32


def check_loops(told: dict[str, Any]) -> None:
    for name, (wanted, found, error) in told.items():
        assert found == wanted, name
        assert any(later < before for before, later in pairwise(wanted)), name
        assert error < HALF, name


def test_gradients_scales_and_skipped_steps_are_those_of_one_process() -> None:
    for gradients, narrow, told in run_processes(2, WORKER, "usual"):
        assert all(error < HALF for error in gradients.values())
        assert all(error < NARROW for error in narrow.values())
        check_loops(told)


def test_a_scaler_on_one_rank_steps_another_model_but_no_compiled_one() -> None:
    (step, first), (_, second) = run_processes(2, WORKER, "unequal_scalers")
    assert step == pytest.approx(1.0)
    assert first == second and "rank 0 unscales the gradients of an optimizer" in first


@pytest.mark.slow
def test_the_first_gradients_of_a_small_loss_do_not_underflow_in_any_layout() -> None:
    for told in run_processes(2, WORKER, "first_gradients", [*LAYOUTS]):
        assert all(error < HALF for error in told.values()), told


@pytest.mark.slow
def test_a_precision_of_fp16_has_the_gradients_of_fp32_in_every_layout() -> None:
    for told in run_processes(2, WORKER, "narrow_gradients"):
        assert all(error < NARROW for error in told.values()), told


FURTHER = {
    "whole batches": [
        "fused",
        "fused, not clipped",
        "accumulation",
        "one stage overflows",
        "one shard overflows",
        "one shard overflows, fused",
    ],
    "sharded in two": [
        "fused, not clipped",
        "accumulation",
        "two optimizers",
        "one shard overflows",
        "one shard overflows, fused",
    ],
    "replicated in three": ["foreach", "accumulation", "one stage overflows"],
    "stages in one": ["normed", "an optimizer for each stage"],
    "stages in two": [
        name
        for name in LOOPS
        if name not in ("normed", "an optimizer for each stage") and "shard" not in name
    ],
    "stages in three": [
        "fused, not clipped",
        "one stage overflows",
        "one stage overflows, foreach",
    ],
    "interleaved": ["accumulation", "one stage overflows"],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", FURTHER)
def test_training_loops_of_every_kind_follow_one_process(layout: str) -> None:
    for told in run_processes(2, WORKER, "loops", layout, FURTHER[layout]):
        check_loops(told)
