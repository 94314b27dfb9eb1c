"""A rehearsal, which adds up the memory effects of each kind of call, agrees with a run of all
calls on fake tensors."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo_small

import autopar
from autopar.api.planning import plan_model
from autopar.capture import capture
from autopar.constraints import megatron
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.emit import emit_stage
from autopar.kernels import collectives as steps
from autopar.plans import Overlap
from autopar.program import abstract_executor, peak_memory, stage_memory
from autopar.program.executor import Executor
from autopar.program.peak_memory import node_peaks, trace_peak
from autopar.program.program import StageProgram
from autopar.program.stage_memory import trace_stage_peak

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.random_plans import prepare, random_plan

CASES = [("gpt2", "a=2,b=2", 0), ("llama", "a=2,b=2", 1), ("bert", "3", 2), ("vit", "2", 4)]


def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all calls from now on."""

    def executor(
        program: StageProgram,
        groups: Any,
        _: Any,
        *,
        seen: Any = None,
        unread: bool = False,
        last_queries: bool = False,
        **how: Any,
    ) -> Executor:
        return Executor(program, groups, **how)

    monkeypatch.setattr(peak_memory, "Rehearsal", executor)
    monkeypatch.setattr(stage_memory, "Rehearsal", executor)


@pytest.mark.parametrize(("kind", "mesh", "seed"), CASES)
def test_a_rehearsal_of_random_plans_agrees_with_a_run(
    kind: str, mesh: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = getattr(zoo_small, kind)()
    ready = prepare(model, batch, Mesh.parse(mesh), HardwareProfile.load("cpu-gloo"))
    plan, program = random_plan(ready, seed, recompute_share=0.5)
    early = emit_stage(ready.trace, replace(plan, overlap=Overlap(0.4, 2**30, 2**30)))
    assert any(node.target is steps.start for node in early.backward.graph.nodes)
    first, last = (
        (0,) * len(ready.mesh.shape),
        tuple(size - 1 for size in ready.mesh.shape),
    )  # a rank may have no queries by default
    ways: list[dict[str, Any]] = [
        {},
        {"outputs": "dtensor"},
        {"batch": "local"},
        {"train": False},
        {"coordinate": last},
    ]
    ways = [{"coordinate": first, **way} for way in ways]
    found = [trace_peak(p, **way) for p in (program.stages[0], early) for way in ways]
    assert (
        max(n.peak_bytes for n in node_peaks(program.stages[0], outputs="dtensor"))
        == trace_peak(program.stages[0], outputs="dtensor").peak_bytes
    )
    plainly(monkeypatch)
    assert found == [trace_peak(p, **way) for p in (program.stages[0], early) for way in ways]


@pytest.mark.slow
def test_a_rehearsal_of_stages_over_microbatches_agrees_with_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = zoo_small.gpt2()
    force = (megatron(pp="stage", dp=2, zero=1, microbatches=2),)
    _, planned = plan_model(
        model, {"stage": 2, "data": 2}, example_inputs=batch, hardware="h100-sxm", constraints=force
    )
    program = planned.program
    assert any(stage.begin is not None for stage in program.stages)
    ways = [
        (name, flying, outputs)
        for name in ("1f1b", "gpipe")
        for flying in (1, 2, 4)
        for outputs in ("full", "dtensor")
    ]
    cases = [
        (stage, name, flying, 4, outputs)
        for stage in program.stages
        for name, flying, outputs in ways
    ]
    found = [trace_stage_peak(*case) for case in cases]  # type: ignore[arg-type]
    plainly(monkeypatch)
    assert found == [trace_stage_peak(*case) for case in cases]  # type: ignore[arg-type]


def test_a_rehearsal_includes_the_temporaries_of_a_loss_by_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = zoo_small.llama()
    _, planned = plan_model(
        model, 2, example_inputs=batch, hardware="cpu-gloo", outputs="loss", loss_rows=3
    )
    program = planned.stage_program()
    found = trace_peak(program)
    plainly(monkeypatch)
    assert found == trace_peak(program)


@pytest.mark.slow
def test_a_rehearsal_runs_equal_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(abstract_executor, "_effects", {})
    kept = abstract_executor.tried_out
    monkeypatch.setattr(
        abstract_executor, "tried_out", lambda *call: tried.append(call[0].name) or kept(*call)
    )
    numbers = []
    for num_layers in (3, 6):
        model, batch = zoo_small.llama(num_layers=num_layers)
        trace = capture(model, (), batch)
        program = emit_stage(
            trace, autopar.plan(model, 2, example_inputs=batch, hardware="cpu-gloo")
        )
        trace_peak(program)
        numbers.append(len(tried))
        tried.clear()
        abstract_executor._effects.clear()
    assert numbers[0] == numbers[1] > 50


def test_a_wrong_memory_effect_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """This shows that the comparison above can fail."""
    model, batch = zoo_small.gpt2()
    ready = prepare(model, batch, Mesh.parse("2"), HardwareProfile.load("cpu-gloo"))
    _, program = random_plan(ready, 0)
    right = trace_peak(program.stages[0])
    last_uses = abstract_executor._last_uses
    monkeypatch.setattr(
        abstract_executor,
        "_last_uses",
        lambda graph: {n: dead[1:] for n, dead in last_uses(graph).items()},
    )
    assert trace_peak(program.stages[0]).peak_bytes > right.peak_bytes
    assert torch.get_default_dtype() == torch.float32
