"""Offload to host memory: plans match the plain model, are certified, fit both budgets, and are
not slower than plans without offload."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zoo_small
from hosts import quick_hosts
from measured import measured_peak

import autopar
from autopar import constraints as asked
from autopar.capture import capture
from autopar.constraints import Constraint
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.emit import emit_stage
from autopar.errors import ConstraintError, HardwareError
from autopar.plans import Plan
from autopar.program.peak_memory import trace_peak
from autopar.report import report

ONE, SQUARE = Mesh(1), Mesh({"a": 2, "b": 2})
TOLERANCE = 1e-6  # parts of the models compute in float32
HOSTED = asked.layout("*", storage="R R host")


@cache
def built(kind: str) -> tuple[Any, Any]:
    """Return a model with two layers by name, such as ``gpt2``, or with another number of layers,
    such as ``gpt2:1``."""
    name, _, layers = kind.partition(":")
    return getattr(zoo_small, name)(num_layers=int(layers or 2))  # type: ignore[no-any-return]


@cache
def planned(
    kind: str,
    mesh: Mesh,
    *constraints: Constraint,
    hardware: HardwareProfile | str = "h100-sxm",
    **options: Any,
) -> Plan:
    model, batch = built(kind)
    return autopar.plan(
        model, mesh, example_inputs=batch, hardware=hardware, constraints=constraints, **options
    )


def holds(kind: str, plan: Plan, hardware: HardwareProfile | str = "h100-sxm") -> None:
    """Assert that a plan is certified, also after it is saved and loaded, and that it matches the
    model."""
    model, batch = built(kind)
    again = Plan.loads(plan.dumps())
    assert again == plan
    certificate = autopar.check(again, model, batch, hardware=hardware)
    assert certificate.ok, certificate.findings
    assert autopar.verify(again, model, batch, tolerance=TOLERANCE).max_error < TOLERANCE


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_that_does_not_fit_on_devices_is_planned_with_host_memory(
    kind: str, tmp_path: Path
) -> None:
    rests = planned(kind, ONE).prediction.memory_bytes
    budget = (
        rests["parameters"] + rests["optimizer"] - 1
    )  # less than the memory of parameters and optimizer states
    plan = planned(kind, ONE, asked.offload(), memory_bytes=budget)
    assert plan.prediction.peak_bytes <= budget
    assert {"parameters", "optimizer", "gradients"} <= plan.prediction.host_bytes.keys()
    holds(kind, plan)
    assert any(
        re.fullmatch(
            r"host memory .* per device: parameters .* \+ optimizer .* \+ gradients .*", line
        )
        for line in autopar.explain(plan).summary()
    )
    assert "R host" in str(autopar.explain(plan))
    written = tmp_path / "plan.png"
    report(plan, written)
    assert written.stat().st_size


@pytest.mark.parametrize("mesh", [ONE, SQUARE], ids=str)
def test_activations_are_offloaded_if_that_costs_less_than_recompute(mesh: Mesh) -> None:
    free = planned("gpt2", mesh, hardware=quick_hosts())
    budget = int(0.85 * free.prediction.peak_bytes)
    plan = planned(
        "gpt2", mesh, asked.offload(parameters=False), hardware=quick_hosts(), memory_bytes=budget
    )
    assert plan.prediction.host_bytes.keys() == {"activations"}
    kinds = {(c.phase, c.collective.kind) for c in plan.communications} & {
        ("forward", "store"),
        ("backward", "fetch"),
    }
    assert len(kinds) == 2 and plan.prediction.peak_bytes <= budget
    holds("gpt2", plan, quick_hosts())


@pytest.mark.slow
def test_a_plan_with_host_memory_is_not_slower_than_the_bound_without() -> None:
    free = planned("gpt2", SQUARE, hardware=quick_hosts())
    for share in (0.9, 0.8, 0.7):
        budget = int(share * free.prediction.peak_bytes)
        without = planned("gpt2", SQUARE, hardware=quick_hosts(), memory_bytes=budget)
        hosted = planned(
            "gpt2", SQUARE, asked.offload(), hardware=quick_hosts(), memory_bytes=budget
        )
        assert hosted.proof.bound_s <= without.prediction.step_s, (
            "what is proven of more choices holds for fewer"
        )
        assert hosted.prediction.step_s <= without.prediction.step_s * 1.02, "and it is found"


@pytest.mark.slow
def test_host_memory_stays_within_its_budget() -> None:
    free = planned("gpt2:1", ONE, hardware=quick_hosts())
    budget = int(0.7 * free.prediction.peak_bytes)
    ample = planned("gpt2:1", ONE, asked.offload(), hardware=quick_hosts(), memory_bytes=budget)
    most = sum(ample.prediction.host_bytes.values()) // 2
    less = planned(
        "gpt2:1", ONE, asked.offload(host_bytes=most), hardware=quick_hosts(), memory_bytes=budget
    )
    assert 0 < sum(less.prediction.host_bytes.values()) <= most
    holds("gpt2:1", less, quick_hosts())


WAYS: dict[str, tuple[Sequence[Constraint], dict[str, Any]]] = {
    "as it is used": ((HOSTED,), {}),
    "read in bf16": ((HOSTED,), {"precision": "bf16"}),
    "in microbatches": ((HOSTED,), {"num_microbatches": 2}),
    "in microbatches read in bf16": ((HOSTED,), {"num_microbatches": 2, "precision": "bf16"}),
    "sharded": ((asked.layout("*", storage="S(0) S(0) host"),), {}),
    "sharded in microbatches": (
        (asked.layout("*", storage="S(0) S(0) host"),),
        {"num_microbatches": 2},
    ),
    "in stages": (
        (asked.pipeline("a", microbatches=2), asked.layout("*", storage="S(0) host")),
        {},
    ),
    "chosen in interleaved stages": (
        (asked.pipeline("a", microbatches=2, schedule="interleaved_1f1b"), asked.offload()),
        {},
    ),
    "chosen beside stage 1": (
        (asked.megatron(dp=2, tp=2, zero=1, microbatches=2), asked.offload()),
        {},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_in_host_memory_match_the_plain_model_in_every_kind_of_step(way: str) -> None:
    constraints, options = WAYS[way]
    forced = not way.startswith("chosen")
    if forced:
        plan = planned("gpt2", SQUARE, *constraints, **options)
        assert plan.prediction.host_bytes["parameters"]
    else:
        free = planned("gpt2", SQUARE, *constraints, **options)
        share = (
            0.5 if "interleaved" in way else 0.7
        )  # with stages, less memory would suffice without hosts, in the same time
        plan = planned(
            "gpt2",
            SQUARE,
            *constraints,
            memory_bytes=int(share * free.prediction.peak_bytes),
            **options,
        )
        assert sum(plan.prediction.host_bytes.values())
    holds("gpt2", plan)


def test_optimizer_state_and_gradients_are_stored_where_the_parameter_is() -> None:
    model, batch = built("gpt2")
    free, hosted = planned("gpt2", ONE), planned("gpt2", ONE, asked.layout("*", storage="R host"))
    weights = {p.name: p for p in capture(model, (), batch).parameters if p.name.endswith("weight")}
    size = sum(p.numel() * 4 for name, p in model.named_parameters() if name in weights)
    assert hosted.prediction.host_bytes == {
        "parameters": size,
        "optimizer": 2 * size,
        "gradients": size,
    }
    for kind, times in (("parameters", 1), ("optimizer", 2), ("gradients", 1)):
        assert (
            free.prediction.memory_bytes[kind] - hosted.prediction.memory_bytes[kind]
            == times * size
        )


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_predicted_peak_with_offload_equals_the_measured_peak(kind: str) -> None:
    model, batch = built(kind)
    free = planned(kind, ONE, hardware=quick_hosts())
    plan = planned(
        kind,
        ONE,
        asked.offload(),
        hardware=quick_hosts(),
        memory_bytes=int(0.6 * free.prediction.peak_bytes),
    )
    assert {"parameters", "activations"} <= plan.prediction.host_bytes.keys()
    program = emit_stage(capture(model, (), batch), plan)
    assert measured_peak(program, batch)[0] == trace_peak(program, outputs="full").peak_bytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda p: replace(p, prediction=replace(p.prediction, host_bytes={})),
            "host memory for .* not 0",
        ),
        (
            lambda p: replace(
                p, kept=tuple(k for k in p.kept if not any(x.host for x in k.layouts))
            ),
            "which no collective returns",
        ),
        (
            lambda p: replace(
                p, communications=tuple(c for c in p.communications if c.collective.kind != "store")
            ),
            "forward does not compute it",
        ),
        (lambda p: _with_times(p, 0.5), "it takes"),
        (lambda p: _on_devices(p), "it takes|takes .* s, not"),
    ],
    ids=["host bytes", "kept", "stores", "copies' time", "optimizer's time"],
)
def test_the_certificate_refuses_wrong_claims_about_offload(change: Any, said: str) -> None:
    model, batch = built("gpt2")
    free = planned("gpt2", ONE, hardware=quick_hosts())
    plan = planned(
        "gpt2",
        ONE,
        asked.offload(),
        hardware=quick_hosts(),
        memory_bytes=int(0.6 * free.prediction.peak_bytes),
    )
    found = autopar.check(change(plan), model, batch, hardware=quick_hosts())
    assert not found.ok
    assert any(re.search(said, str(finding)) for finding in found.findings), found.findings


def _with_times(plan: Plan, factor: float) -> Plan:
    moved = (
        replace(c, time_s=c.time_s * factor) if c.collective.kind == "fetch" else c
        for c in plan.communications
    )
    return replace(plan, communications=tuple(moved))


def _on_devices(plan: Plan) -> Plan:
    """Make the optimizer step of offloaded state as fast as on the device."""
    entries = []
    for entry in plan.entries:
        there = entry.kind == "parameter" and entry.nodes[0].strategy.outputs[0].host
        entries.append(replace(entry, time_s=entry.time_s / 50) if there else entry)
    return replace(plan, entries=tuple(entries))


def test_impossible_offload_is_refused_with_the_reason() -> None:
    with pytest.raises(ConstraintError, match="offloads nothing"):
        asked.offload(parameters=False, activations=False)
    with pytest.raises(
        ConstraintError, match="host_bytes must be a positive number of bytes, got 0"
    ):
        asked.offload(host_bytes=0)
    with pytest.raises(ConstraintError, match="both set what may be offloaded"):
        planned("gpt2", SQUARE, asked.offload(), asked.offload(activations=False))
    for constraint in (asked.offload(), asked.layout("*", storage="R R host")):
        with pytest.raises(HardwareError, match="has no figures for host memory"):
            planned("gpt2", SQUARE, constraint, hardware="cpu-gloo")
