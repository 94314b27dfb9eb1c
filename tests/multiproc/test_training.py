"""Training real models on four gloo processes, 2×2, follows the plain model under plans with every
kind of collective.

The plans are random legal ones with seeds chosen for their contents. The processes measure, and the
tests check.
"""

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
from hosts import quick_hosts  # noqa: E402
from slow_attention import slow_attention  # noqa: E402

import autopar  # noqa: E402
from autopar import constraints  # noqa: E402
from autopar.core.hardware import HardwareProfile  # noqa: E402
from autopar.core.mesh import Mesh  # noqa: E402
from autopar.plans import Plan  # noqa: E402
from benchmarks.random_plans import prepare, random_plan  # noqa: E402
from benchmarks.zoo import build  # noqa: E402

pytestmark = pytest.mark.multiproc
MESH = Mesh({"a": 2, "b": 2})
SEEDS = {"gpt2": 1, "llama": 8}
JOINED = "gpt2 with heads over two axes"
OFFLOADED = "gpt2 on hosts"
MIRRORED = "llama with mirrored queries"
KINDS = (*SEEDS, JOINED, OFFLOADED, MIRRORED)
Facts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    found = {}
    for kind, seed in SEEDS.items():
        model, batch = getattr(zoo_small, kind)(dtype=torch.float64)
        ready = prepare(model, batch, MESH, HardwareProfile.load("cpu-gloo"))
        found[kind] = random_plan(ready, seed, loudness=(1.0, 1.0), recompute_share=0.3)[0]
    model, batch = zoo_small.gpt2(dtype=torch.float64)
    forced = constraints.tensor_parallel("1d", axes=("a", "b"))
    found[JOINED] = autopar.plan(
        model, MESH, example_inputs=batch, hardware="cpu-gloo", constraints=(forced,)
    )
    found[OFFLOADED] = _offloaded(model, batch)
    model, batch = zoo_small.llama(dtype=torch.float64)
    forced = constraints.megatron(dp="a", cp="b", zero=3)
    found[MIRRORED] = autopar.plan(
        model, MESH, example_inputs=batch, hardware=slow_attention(), constraints=(forced,)
    )
    return found


def _offloaded(model: Any, batch: Any) -> Plan:
    """Return a plan with sharded parameters, some of them and some activations in host memory."""
    free = autopar.plan(
        model, MESH, example_inputs=batch, hardware=quick_hosts(), constraints=(constraints.fsdp(),)
    )
    within, asked = (
        int(0.52 * free.prediction.peak_bytes),
        (constraints.fsdp(), constraints.offload()),
    )
    return autopar.plan(
        model,
        MESH,
        example_inputs=batch,
        hardware=quick_hosts(),
        constraints=asked,
        memory_bytes=within,
    )


@pytest.fixture(scope="module")
def facts(plans: dict[str, Plan]) -> Facts:
    return run_processes(
        4,
        str(Path(__file__).parent / "worker_training.py"),
        "run",
        {kind: p.dumps() for kind, p in plans.items()},
    )


@pytest.mark.slow
def test_the_plans_have_every_kind_of_collective_and_recompute(plans: dict[str, Plan]) -> None:
    kinds = {c.collective.kind for plan in plans.values() for c in plan.communications}
    assert kinds == {
        "all_gather",
        "all_reduce",
        "all_to_all",
        "reduce_scatter",
        "slice",
        "swap",
        "fetch",
        "store",
    }
    assert {"parameters", "activations"} <= plans[OFFLOADED].prediction.host_bytes.keys()
    for plan in (plans[kind] for kind in SEEDS):
        assert {c.collective.axis for c in plan.communications if c.phase == "backward"} == {0, 1}
        assert any(entry.recompute for entry in plan.entries)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_clipping_follow_the_plain_model(
    facts: Facts, plans: dict[str, Plan], kind: str
) -> None:
    # 2e-6: both models compute their loss in float32 for all dtypes of weights.
    for fact in facts:
        assert fact[kind]["hash"] == plans[kind].hash
        assert max(fact[kind]["loss"]) < 2e-6
        assert max(fact[kind]["norm"]) < 2e-6
        assert fact[kind]["clipped"]
        assert fact[kind]["parameters"] < 1e-5
        assert fact[kind]["sharded"] > 3
    assert len({fact[kind]["last"] for fact in facts}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_loading_the_state_dict_of_another_module_gives_the_same_results(
    facts: Facts, kind: str
) -> None:
    for fact in facts:
        assert fact[kind]["state"] == {
            "keys": "<All keys matched successfully>",
            "apart": True,
            "same": True,
        }


def test_three_processes_train_a_model_with_indivisible_dims() -> None:
    model, batch = zoo_small.gpt2(dtype=torch.float64)
    ready = prepare(model, batch, Mesh({"a": 3}), HardwareProfile.load("cpu-gloo"))
    plan, program = random_plan(ready, 0)
    assert any("length" in node.kwargs for node in program.stages[0].forward.graph.nodes)
    for fact in run_processes(
        3, str(Path(__file__).parent / "worker_training.py"), "run", {"gpt2": plan.dumps()}
    ):
        facts = fact["gpt2"]
        assert facts["sharded"] and facts["state"]["same"] and facts["state"]["apart"]
        assert (
            max(facts["loss"]) < 2e-6 and max(facts["norm"]) < 1e-5 and facts["parameters"] < 1e-5
        )


@pytest.mark.slow
def test_dropout_is_the_same_on_one_and_on_four_processes() -> None:
    model, batch = build("gpt2", dropout=0.2, dtype=torch.float64, n_layer=1)
    plan, program = random_plan(prepare(model, batch, MESH, HardwareProfile.load("cpu-gloo")), 0)
    assert program.stages[0].collectives
    worker = str(Path(__file__).parent / "worker_dropout.py")
    (alone,) = run_processes(1, worker, "run", None)
    together = run_processes(4, worker, "run", plan.dumps())
    assert len(set(alone)) == 3 and len({tuple(losses) for losses in together}) == 1
    torch.testing.assert_close(torch.tensor(together[0]), torch.tensor(alone), rtol=2e-6, atol=0)


def test_heads_over_two_axes_are_one_dim_of_the_mesh_of_a_parameter(facts: Facts) -> None:
    for fact in facts:
        assert fact[JOINED]["meshes"] == ["('a', 'b')", "('a_b',)"]
        assert fact["gpt2"]["meshes"] == ["('a', 'b')"]
