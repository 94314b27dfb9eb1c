"""A loss computed from the outputs on several processes has the gradients of the plain model, for
every form of the outputs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from harness import run_processes
from worker_outer_loss import OUTPUTS, PLANS

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_outer_loss.py")


@pytest.mark.parametrize("plan", PLANS)
def test_training_with_an_outer_loss_on_several_processes_follows_the_plain_model(
    plan: str,
) -> None:
    tolerance = 1e-6 if plan.startswith("llama") else 1e-12  # parts of the model compute in float32
    for told in run_processes(math.prod(PLANS[plan][1].values()), WORKER, "run", plan):
        assert told.keys() == set(OUTPUTS)
        for outputs, facts in told.items():
            wanted, found = facts["losses"]
            if outputs != "local":  # the loss of one rank is not the total loss
                assert found == pytest.approx(wanted, rel=tolerance)
                assert facts["evaluated"] < tolerance
            assert facts["parameters"] < tolerance and abs(facts["moved"]) > 1e-4
            assert any(facts["parts"]) == (outputs != "auto" and plan != "llama heads")
        assert facts["sharded"] or plan.endswith("ddp")


def test_parameters_that_a_loss_does_not_reach_have_no_gradient() -> None:
    for told in run_processes(2, WORKER, "heads"):
        first, both, second = told
        assert (
            first[0] == ["right.weight", "right.bias"]
            and both[0] == []
            and second[0] == ["left.weight", "left.bias"]
        )
        assert all(error < 1e-12 for _, error in told)


def test_different_outer_losses_on_ranks_are_refused() -> None:
    first, second = run_processes(2, WORKER, "apart")
    said = "rank 1 computed a different loss from the same outputs than rank 0: the gradients of 0"
    assert first == second and said in first


def test_a_sum_of_outputs_can_be_the_loss() -> None:
    assert max(run_processes(2, WORKER, "expanded")) < 1e-5
