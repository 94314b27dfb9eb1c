"""A small Mixtral on four gloo processes, with experts sharded over two or four of them, follows
the plain model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
import zoo_small  # noqa: E402
from harness import run_processes  # noqa: E402

import autopar  # noqa: E402
from autopar.constraints import expert_parallel, fsdp, megatron  # noqa: E402

pytestmark = pytest.mark.multiproc
MESH = autopar.Mesh({"data": 2, "expert": 2})


WISHES = {
    "mixtral over two": (megatron(ep=2, zero=3),),
    "mixtral over four": (megatron(ep=4),),
    "mixtral dispatched": (expert_parallel("expert", tokens="dispatched"), fsdp("data")),
}


def test_dispatched_experts_match_the_unsharded_op_and_the_predicted_memory() -> None:
    for facts in run_processes(4, str(Path(__file__).parent / "worker_dispatch.py"), "run"):
        assert facts["wrong"] == []
        (said,) = facts["said"]
        assert (
            "rows are sent to their experts with an all-to-all" in said
            and "cannot access each other's memory" in said
        )
        for phase, row in (("forward", 32), ("backward", 2 * 32)):
            measured, predicted = facts[phase]
            assert measured == predicted >= 2 * (16 * 2 * row * 4), (
                "rows of pairs that go and that come"
            )


@pytest.mark.slow
def test_steps_follow_the_plain_model() -> None:
    model, batch = zoo_small.mixtral(num_layers=1, dtype=torch.float64)
    plans = {
        name: autopar.plan(model, MESH, example_inputs=batch, hardware="cpu-gloo", constraints=wish)
        for name, wish in WISHES.items()
    }
    assert any(c.own for c in plans["mixtral dispatched"].communications)
    texts = {name: plan.dumps() for name, plan in plans.items()}
    assert len(set(texts.values())) == len(texts)
    for facts in run_processes(
        4, str(Path(__file__).parent / "worker_training.py"), "run", texts, 1
    ):
        assert facts.keys() == plans.keys()
        for name, found in facts.items():
            assert found["hash"] == plans[name].hash
            assert (
                max(found["loss"]) < 2e-6
                and max(found["norm"]) < 2e-6
                and found["parameters"] < 2e-6
            )
            assert found["state"] == {
                "keys": "<All keys matched successfully>",
                "apart": True,
                "same": True,
            }
            assert found["sharded"] >= 2, "the experts' two weights"
