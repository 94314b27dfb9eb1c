"""All legal plans, not only those of the planner, satisfy the laws: priced = emitted = run, a plan
round-trips through its file, and it matches the model.

Random legal plans (`benchmarks.random_plans`) use layouts, redistributions and recomputations that
the planner avoids.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from autopar.core.collective import Collective
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.cost.op_times import CollectivePrices
from autopar.emit import emit_stage
from autopar.plans import Plan
from autopar.program.lockstep import run_lockstep
from autopar.program.peak_memory import trace_peak
from autopar.verification import verify_program

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import Batch, ModelSpec
from benchmarks.random_plans import Prepared, prepare, random_plan

MESHES = ("4", "a=2,b=2", "a=2,b=4", "8")
MODELS = ("tiny-vit", "tiny-llama", "tiny-gpt2", "tiny-bert")
FAST = [(model, mesh, seed) for model, mesh in zip(MODELS, MESHES, strict=True) for seed in (0, 1)]
SLOW = [(model, mesh, seed) for model in MODELS for mesh in MESHES for seed in range(2, 8)]
CASES = [*(pytest.param(*case, id=" ".join(map(str, case))) for case in FAST)]
CASES += [pytest.param(*case, id=" ".join(map(str, case)), marks=pytest.mark.slow) for case in SLOW]


@cache
def prepared(model: str, mesh: str) -> tuple[Prepared, object, Batch]:
    built, batch = ModelSpec.known(model).build()
    return prepare(built, batch, Mesh.parse(mesh), HardwareProfile.load("cpu-gloo")), built, batch


Kinds = Counter[tuple[str, str, int, int]]


def kinds(steps: Iterable[tuple[str, Collective, int]]) -> Kinds:
    """Return the number of steps of each phase, kind, axis and size."""
    found: Kinds = Counter()
    for phase, collective, count in steps:
        found[phase, collective.kind, collective.axis, collective.bytes] += count
    return found


@pytest.mark.parametrize(("model", "mesh", "seed"), CASES)
def test_a_random_legal_plan_satisfies_every_law(model: str, mesh: str, seed: int) -> None:
    ready, plain, batch = prepared(model, mesh)
    plan, program = random_plan(ready, seed)
    assert program.stages[0].collectives

    # The program matches the model: loss, outputs and all gradients.
    found = verify_program(ready.trace, program, plain, (), batch)
    assert found.max_error <= found.tolerance
    assert found.num_collectives > 0

    # Priced, emitted and executed steps agree by phase, kind, axis and bytes.
    priced = kinds((c.phase, c.collective, len(c.instances)) for c in plan.communications)
    emitted = kinds((phase, c, 1) for phase, _, c in program.stages[0].collectives)
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}  # type: ignore[attr-defined]
    ran = run_lockstep(program, tensors, tensors, [batch[i.path] for i in ready.trace.inputs])
    assert priced == emitted == kinds((phase, c, 1) for phase, _, c in ran.records)
    price = CollectivePrices(ready.mesh, ready.profile)
    assert sum(price(c) for _, _, c in program.stages[0].collectives) == pytest.approx(
        plan.prediction.communication_s + plan.prediction.beyond_shares_s
    )

    # The plan round-trips through its file, which emits the same program.
    text = plan.dumps()
    loaded = Plan.loads(text)
    assert loaded == plan and loaded.dumps() == text
    again = emit_stage(ready.trace, loaded)
    assert (str(again.forward.graph), str(again.backward.graph)) == (
        str(program.stages[0].forward.graph),
        str(program.stages[0].backward.graph),
    )
    assert (again.parameters, again.inputs, again.outputs, again.collectives) == (
        program.stages[0].parameters,
        program.inputs,
        program.outputs,
        program.stages[0].collectives,
    )
    assert (
        trace_peak(again, outputs="dtensor").peak_bytes + plan.prediction.memory_bytes["optimizer"]
        == plan.prediction.peak_bytes
    )


@pytest.mark.slow
def test_random_plans_recompute_and_differ() -> None:
    ready, _, _ = prepared("tiny-gpt2", "a=2,b=4")
    plans = [
        random_plan(ready, seed, recompute_share=share)[0] for seed, share in ((20, 1.0), (21, 0.0))
    ]
    assert any(entry.recompute for entry in plans[0].entries)
    assert not any(entry.recompute for entry in plans[1].entries)
    assert len(plans[0].kept) < len(plans[1].kept)
    assert plans[0].hash != plans[1].hash
    assert random_plan(ready, 21, recompute_share=0.0)[0] == plans[1]


@pytest.mark.slow
def test_recomputed_values_may_have_another_layout_than_in_forward() -> None:
    ready, plain, batch = prepared("tiny-vit", "4")
    plan, program = random_plan(ready, 30, recompute_share=1.0, recompute_otherwise=True)
    assert any(entry.recompute and entry.recompute != entry.nodes for entry in plan.entries)
    assert verify_program(ready.trace, program, plain, (), batch).ok
    priced = kinds((c.phase, c.collective, len(c.instances)) for c in plan.communications)
    assert priced == kinds((phase, c, 1) for phase, _, c in program.stages[0].collectives)
