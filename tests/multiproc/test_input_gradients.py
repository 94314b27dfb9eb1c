"""Input gradients on several processes match the plain model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from harness import run_processes
from worker_input_gradients import PLANS

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_input_gradients.py")


@pytest.mark.parametrize("plan", PLANS)
def test_input_gradients_on_several_processes_match_the_plain_model(plan: str) -> None:
    tolerance = 1e-6 if plan.startswith("llama") else 1e-12  # parts of the model compute in float32
    for told in run_processes(math.prod(PLANS[plan][1].values()), WORKER, "run", plan):
        for way in ("global", "local") if "convolutions" not in plan else ("global",):
            assert told[way] < tolerance and told[f"{way} split"] == 1.0


def test_an_input_gradient_requested_on_only_one_rank_is_refused() -> None:
    first, second = run_processes(2, WORKER, "apart")
    assert (
        first == second
        and "ranks do different things: rank 0 calls" in first
        and "that requires a gradient" in first
    )


def test_a_generator_and_a_discriminator_train_as_the_plain_models() -> None:
    for told in run_processes(2, WORKER, "adversaries"):
        assert (
            told["ours"] == pytest.approx(told["plain"], rel=1e-12) and len(set(told["plain"])) == 6
        )
        assert max(told["parameters"]) < 1e-12 and any(told["sharded"])
