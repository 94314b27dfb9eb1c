"""Mixed precision on four gloo processes: weights, gradients and optimizer state are fp32, and
everything else is bf16."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
import zoo_small  # noqa: E402
from harness import run_processes  # noqa: E402
from worker_precision import NUM_LAYERS  # noqa: E402

import autopar  # noqa: E402
from autopar.constraints import Constraint, fsdp, megatron, pipeline  # noqa: E402
from autopar.core.mesh import Mesh  # noqa: E402
from autopar.plans import Plan  # noqa: E402

pytestmark = pytest.mark.multiproc
MESH = Mesh({"a": 2, "b": 2})
WAYS: dict[str, Constraint] = {
    "llama fully sharded": fsdp(),
    "llama in microbatches": megatron(dp=2, tp=2, zero=2, microbatches=2),
    "gpt2 in stages": pipeline("a", microbatches=2),
}


def plan(way: str) -> Plan:
    kind = way.split()[0]
    model, batch = getattr(zoo_small, kind)(num_layers=NUM_LAYERS[kind])
    return autopar.plan(
        model,
        MESH,
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=(WAYS[way],),
        precision="bf16",
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_mixed_precision_training_follows_the_model_with_cast_weights(way: str) -> None:
    facts = run_processes(
        4, str(Path(__file__).parent / "worker_precision.py"), "run", {way: plan(way).dumps()}
    )
    for fact in facts:
        assert fact[way]["dtypes"] == {"torch.float32"}
        assert max(fact[way]["loss"]) < 5e-3
        assert max(fact[way]["norm"]) < 3e-2
        assert fact[way]["away"] < 5e-2  # of the furthest that a weight moved
    assert len({fact[way]["last"] for fact in facts}) == 1
    if way == "llama fully sharded":
        assert all(fact[way]["sharded"] > 3 for fact in facts)
