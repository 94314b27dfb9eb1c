"""Input gradients match the plain model, full on every rank, under every plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import given_back
import pytest
import torch
from measured import measured_peak
from torch import nn

import autopar
from autopar import constraints as asked
from autopar.api.planning import plan_model
from autopar.capture import capture
from autopar.constraints import Constraint
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError, InfeasibleError, PlanError
from autopar.planner import Planned
from autopar.plans import NodeChoice
from autopar.program.peak_memory import trace_peak
from autopar.verification import verify_program

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.random_plans import prepare, random_plan

SQUARE, THREE = Mesh({"a": 2, "b": 2}), Mesh({"a": 3})
TOLERANCE = 1e-6  # parts of some models compute in float32
PLANS: dict[str, Sequence[Constraint]] = {
    "free": (),
    "ddp": (asked.ddp(),),
    "fsdp": (asked.fsdp(),),
    "fsdp and heads": (asked.fsdp(axes="a"), asked.tensor_parallel("1d", axes="b")),
    "sequence": (asked.context_parallel("b"),),
}
KINDS = ("shifted", "several", "convolutions", "llama")


@cache
def built(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    made: tuple[nn.Module, dict[str, Any]] = getattr(given_back, kind)()
    return made


@cache
def planned(kind: str, mesh: Mesh, plan: str, **options: Any) -> Planned:
    model, batch = built(kind)
    return plan_model(
        model, mesh, example_inputs=batch, hardware="cpu-gloo", constraints=PLANS[plan], **options
    )[1]


def wanted(kind: str) -> set[str]:
    model, batch = built(kind)
    returned = {f"input {name!r}" for name, x in batch.items() if x.requires_grad} - {
        "input 'seen'"
    }  # no output depends on it
    return {*dict(model.named_parameters()), *returned}


def holds(kind: str, found: Planned) -> None:
    model, batch = built(kind)
    again = autopar.Plan.loads(found.plan.dumps())
    certificate = autopar.check(again, model, batch)
    assert certificate.ok, certificate.findings
    verified = autopar.verify(again, model, batch, tolerance=TOLERANCE)
    assert verified.gradients.keys() == wanted(kind)


@pytest.mark.parametrize("plan", ["free", "ddp", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_input_gradients_under_data_parallelism_match_the_plain_model(kind: str, plan: str) -> None:
    holds(kind, planned(kind, SQUARE, plan))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp and heads", "sequence"])
def test_input_gradients_under_tensor_and_sequence_parallelism_match_the_plain_model(
    plan: str,
) -> None:
    holds("llama", planned("llama", SQUARE, plan))


@pytest.mark.parametrize("outputs", ["full", "dtensor", "loss"])
def test_input_gradients_match_for_every_form_of_outputs(outputs: str) -> None:
    holds("llama", planned("llama", SQUARE, "ddp", outputs=outputs))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mesh", [SQUARE, THREE], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_input_gradients_under_random_plans_match_the_plain_model(
    kind: str, mesh: Mesh, seed: int
) -> None:
    model, batch = built(kind)
    ready = prepared(kind, mesh)
    _, program = random_plan(ready, seed)
    found = verify_program(ready.trace, program, model, (), batch)
    assert found.max_error <= found.tolerance and found.gradients.keys() == wanted(kind)


@cache
def prepared(kind: str, mesh: Mesh) -> Any:
    model, batch = built(kind)
    return prepare(model, batch, mesh, HardwareProfile.load("cpu-gloo"))


@pytest.mark.parametrize("layout", ["R S(0)", "R P"])
def test_a_plan_that_leaves_an_input_gradient_sharded_is_refused(layout: str) -> None:
    model, batch = built("shifted")
    plan = planned("shifted", SQUARE, "ddp").plan

    def in_parts(choice: NodeChoice) -> NodeChoice:
        return replace(choice, strategy=Strategy((Layout.parse(layout),), choice.strategy.outputs))

    entries = tuple(
        replace(e, nodes=tuple(map(in_parts, e.nodes))) if e.nodes[0].node == "shift/input" else e
        for e in plan.entries
    )
    changed = replace(plan, entries=entries)
    assert changed != plan and not autopar.check(changed, model, batch).ok
    said = (
        r"the gradient of input 'shift' would have layout R S\(0\)|shift/input of shape \(12,\)"
        r" cannot have layout R P"
    )
    with pytest.raises(PlanError, match=said):
        autopar.verify(changed, model, batch)


@pytest.mark.slow
def test_a_frozen_model_has_only_input_gradients() -> None:
    model, batch = given_back.frozen("llama")
    plan = autopar.plan(
        model, SQUARE, example_inputs=batch, hardware="cpu-gloo", constraints=PLANS["fsdp"]
    )
    assert autopar.check(plan, model, batch).ok
    assert autopar.verify(plan, model, batch, tolerance=TOLERANCE).gradients.keys() == {
        "input 'inputs_embeds'"
    }


@pytest.mark.slow
def test_with_a_precision_an_input_gradient_has_the_dtype_of_its_input() -> None:
    model, batch = built("llama")
    plan = autopar.plan(
        model,
        SQUARE,
        example_inputs=batch,
        hardware="h100-sxm",
        precision="bf16",
        constraints=PLANS["fsdp"],
    )
    assert (
        autopar.verify(plan, model, batch, dtype=None).ok and autopar.check(plan, model, batch).ok
    )
    trace = capture(model, (), batch, precision=torch.bfloat16)
    (given,) = trace.given_back
    made = list(trace.graph.nodes)[-1].args[0][given.gradient]
    assert made.meta["val"].dtype == given.dtype == torch.float32


def test_folded_layers_sum_the_gradient_of_an_input_that_all_of_them_read() -> None:
    model, batch = given_back.Shifted(12), built("shifted")[1]
    folded, full = (capture(model, (), batch, fold=fold) for fold in (True, False))
    assert folded.folding.runs and not full.folding.runs
    assert folded.fingerprint == full.fingerprint
    for trace in (folded, full):
        assert [(i.path, i.gradient) for i in trace.given_back] == [("x", 25), ("shift", 26)]


@pytest.mark.parametrize(
    ("kind", "plan"), [("shifted", "ddp"), ("convolutions", "fsdp"), ("llama", "fsdp and heads")]
)
def test_the_predicted_peak_with_input_gradients_equals_that_of_real_tensors(
    kind: str, plan: str
) -> None:
    program = planned(kind, SQUARE, plan).stage_program()
    batch = {name: x.detach() for name, x in built(kind)[1].items()}
    peak, gradients = measured_peak(program, batch)
    assert trace_peak(program).peak_bytes == peak
    asking = [t for t in program.inputs if t.has_gradient]
    assert [tuple(x.shape) for x in gradients[-len(asking) :]] == [t.shape for t in asking]


@pytest.mark.slow
def test_the_gather_of_an_input_gradient_is_priced() -> None:
    model, batch = built("llama")
    plain = {name: x.detach() for name, x in batch.items()}
    without = autopar.plan(
        model, SQUARE, example_inputs=plain, hardware="cpu-gloo", constraints=PLANS["ddp"]
    )
    assert (
        planned("llama", SQUARE, "ddp").plan.prediction.communication_s
        > without.prediction.communication_s
    )


@pytest.mark.parametrize(
    "options",
    [{"constraints": [asked.pipeline("a")]}, {"num_microbatches": 2}],
    ids=["stages", "microbatches"],
)
def test_stages_and_microbatches_are_refused_naming_the_input(options: dict[str, Any]) -> None:
    model, batch = built("llama")
    with pytest.raises(
        ConstraintError,
        match="input 'inputs_embeds' requires a gradient, which is not supported with stages",
    ):
        autopar.plan(model, SQUARE, example_inputs=batch, hardware="cpu-gloo", **options)


@pytest.mark.slow
def test_if_only_microbatches_would_fit_the_error_says_so() -> None:
    model, batch = built("llama")
    peak = planned("llama", SQUARE, "fsdp").plan.prediction.peak_bytes
    for memory in (int(peak * 0.9), int(peak * 0.5)):
        try:
            plan = autopar.plan(
                model,
                SQUARE,
                example_inputs=batch,
                hardware="cpu-gloo",
                memory_bytes=memory,
                constraints=PLANS["fsdp"],
            )
        except InfeasibleError as error:
            assert "fits into" in error.what
        else:
            assert plan.pipeline is None and autopar.verify(
                plan, model, batch, tolerance=TOLERANCE
            ).gradients.keys() == wanted("llama")


@pytest.mark.slow
def test_a_plan_without_input_gradients_is_refused_for_a_call_that_needs_them() -> None:
    model, batch = built("llama")
    plain = {name: x.detach() for name, x in batch.items()}
    plan = planned("llama", SQUARE, "ddp").plan
    with pytest.raises(
        PlanError, match="input inputs_embeds has a gradient in the plan, but does not require one"
    ):
        autopar.verify(plan, model, plain)
    without = autopar.plan(model, SQUARE, example_inputs=plain, hardware="cpu-gloo")
    with pytest.raises(
        PlanError, match="input inputs_embeds requires a gradient, but has none in the plan"
    ):
        autopar.verify(without, model, batch)


def test_a_free_pipeline_gets_no_stages_if_input_gradients_are_needed() -> None:
    model, batch = built("llama")
    plan = autopar.plan(
        model, SQUARE, example_inputs=batch, hardware="cpu-gloo", constraints=[asked.pipeline()]
    )
    assert plan.pipeline is None
