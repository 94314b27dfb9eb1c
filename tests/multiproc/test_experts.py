"""A small Mixtral on four gloo processes, experts split over two or all of them, follows the plain model. The processes measure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
import zoo_small  # noqa: E402
from harness import run_processes  # noqa: E402

import autopar  # noqa: E402
from autopar.constraints import megatron  # noqa: E402

pytestmark = pytest.mark.multiproc
MESH = autopar.Mesh({"data": 2, "expert": 2})


@pytest.mark.parametrize("wish", [megatron(ep=2, zero=3), megatron(ep=4)], ids=str)
def test_five_steps_follow_the_plain_model(wish: Any) -> None:
    model, batch = zoo_small.mixtral(dtype=torch.float64)
    plan = autopar.plan(model, MESH, example_inputs=batch, hardware="cpu-gloo", constraints=(wish,))
    facts = run_processes(4, str(Path(__file__).parent / "worker_training.py"), "run", {"mixtral": plan.dumps()})
    for fact in facts:
        found = fact["mixtral"]
        assert found["hash"] == plan.hash
        assert max(found["loss"]) < 2e-6 and max(found["norm"]) < 2e-6 and found["parameters"] < 2e-6
        assert found["state"] == {"keys": "<All keys matched successfully>", "apart": True, "same": True}
        assert found["sharded"] >= 4, "the experts' two weights of two layers"
