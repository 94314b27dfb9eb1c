"""Outputs other than the loss: full in evaluation, and in training shards that cannot be read as
full tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_processes
from worker_outputs import PLANS, metrics, model_and_batch

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_outputs.py")


@pytest.mark.parametrize(
    ("use", "plan"), [*(("evaluation", plan) for plan in PLANS), ("inference", "data parallel")]
)
def test_evaluation_metrics_match_the_plain_model_on_every_rank(use: str, plan: str) -> None:
    model, batch = model_and_batch()
    wanted = metrics(model(*batch)[1], batch[1])
    for found, outputs in run_processes(2, WORKER, use, plan):
        assert found == pytest.approx(wanted, rel=1e-5) and outputs == "full"


def test_full_outputs_that_do_not_fit_are_returned_as_dtensors() -> None:
    for in_parts, outputs, peak_bytes in run_processes(2, WORKER, "scarce"):
        assert in_parts and outputs == "dtensor" and peak_bytes < 400_000


def test_reading_a_shard_in_training_is_refused_with_a_remedy() -> None:
    for told in run_processes(2, WORKER, "training"):
        assert len(told) == 3 and all(
            'outputs="full"' in each and "full_tensor()" in each for each in told
        )
