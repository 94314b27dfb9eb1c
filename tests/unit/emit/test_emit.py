"""Emission of local graphs from a plan, and refusal of plans that do not fit the trace."""

from __future__ import annotations

import operator
from dataclasses import replace
from pathlib import Path

import expert
import pytest
import torch
import zoo_small
from made_plan import strategy
from torch import fx

from autopar.capture import Trace, capture
from autopar.constraints import fsdp
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.emit import emit, emit_stage, program_builder
from autopar.errors import EmissionError, PlanError
from autopar.kernels import collectives as steps
from autopar.planner import Planned, PlanOptions, make_plan
from autopar.plans import Overlap, Plan
from autopar.program.peak_memory import trace_peak

MESH = Mesh({"a": 2, "b": 2})


@pytest.fixture(scope="module")
def planned() -> tuple[Trace, Planned]:
    model, batch = zoo_small.llama()
    trace = capture(model, (), batch)
    options = PlanOptions(constraints=expert.llama(fsdp=True))
    return trace, make_plan(trace, MESH, HardwareProfile.load("h100-sxm"), options)


def test_predicted_peak_equals_the_peak_of_the_emitted_program_within_the_budget(
    planned: tuple[Trace, Planned],
) -> None:
    _, result = planned
    assert result.program.stages[0].collectives
    optimizer = result.plan.prediction.memory_bytes["optimizer"]
    peak = trace_peak(result.program.stages[0], outputs="dtensor").peak_bytes + optimizer
    assert result.plan.prediction.peak_bytes == peak <= result.plan.options["memory_bytes"]


def test_plan_without_stages_gives_a_program_with_one_stage_and_one_microbatch(
    planned: tuple[Trace, Planned],
) -> None:
    trace, result = planned
    program = result.program
    (stage,) = program.stages
    assert program.is_single and program.axis == "" and program.microbatches.num == 1
    assert program.mesh == stage.mesh == MESH and program.trace is trace
    assert (program.inputs, program.outputs) == (stage.inputs, stage.outputs)
    assert {kind for kind, _ in program.microbatches.outputs.values()} == {"whole"}
    assert program.microbatches.weight == 1.0 and not program.shared


def test_emitting_a_saved_plan_gives_the_same_program(
    planned: tuple[Trace, Planned], tmp_path: Path
) -> None:
    trace, result = planned
    result.plan.save(tmp_path / "plan.json")
    program = emit(trace, Plan.load(tmp_path / "plan.json"))
    (again,) = program.stages
    for ours, theirs in (
        (result.program.stages[0].forward, again.forward),
        (result.program.stages[0].backward, again.backward),
    ):
        assert str(ours.graph) == str(theirs.graph)
    assert again.collectives == result.program.stages[0].collectives
    assert program.plan_hash == result.program.plan_hash == result.plan.hash
    assert emit(trace, result.plan, named=False).plan_hash == ""


def test_forward_returns_the_saved_values_and_backward_takes_them_first(
    planned: tuple[Trace, Planned],
) -> None:
    _, result = planned
    placeholders = [
        n for n in result.program.stages[0].backward.graph.nodes if n.op == "placeholder"
    ]
    assert len(placeholders) == result.program.stages[0].num_saved + 1
    results = next(iter(reversed(result.program.stages[0].forward.graph.nodes))).args[0]
    assert isinstance(results, tuple)
    assert (
        len(results)
        == len(result.program.outputs)
        + len(result.program.stages[0].mutated)
        + result.program.stages[0].num_saved
    )
    assert all(isinstance(r, fx.Node) for r in results)


def test_emitted_nodes_record_their_module_and_phase(planned: tuple[Trace, Planned]) -> None:
    _, result = planned
    for phase, graph in (
        ("forward", result.program.stages[0].forward.graph),
        ("backward", result.program.stages[0].backward.graph),
    ):
        named = [n for n in graph.nodes if n.op == "call_function" and "key" in n.meta]
        assert named
        assert all(n.meta["phase"] == phase and "module" in n.meta for n in named)


def test_without_overlap_reductions_are_issued_early_and_gathers_late(
    planned: tuple[Trace, Planned],
) -> None:
    trace, result = planned
    program = emit_stage(trace, replace(result.plan, overlap=Overlap()))
    early = late = 0
    for graph in (program.forward.graph, program.backward.graph):
        nodes = list(graph.nodes)
        for at, node in enumerate(nodes):
            if node.target in (steps.reduce_scatter, steps.all_reduce):
                begun = nodes.index(node.args[0])
                between = nodes[begun + 1 : at]
                assert all(
                    n.target in (*steps.STEPS, torch.ops.aten._to_copy.default, operator.getitem)
                    for n in between
                )
                early += 1
            elif node.target is steps.all_gather and node.users:
                read = min(nodes.index(user) for user in node.users if user.op != "output")
                assert all(
                    n.target in (*steps.STEPS, *steps.PLACES, torch.ops.aten._to_copy.default)
                    for n in nodes[at + 1 : read]
                )
                late += 1
    assert early and late


def test_plan_of_another_model_raises_an_error_that_names_the_node(
    planned: tuple[Trace, Planned],
) -> None:
    trace, result = planned
    with pytest.raises(PlanError, match="the plan has no entry for"):
        emit_stage(trace, replace(result.plan, entries=result.plan.entries[:-1]))
    model, batch = zoo_small.gpt2()
    with pytest.raises(PlanError, match="the model has no node for"):
        emit_stage(capture(model, (), batch), result.plan)


def test_plan_with_a_missing_collective_is_refused(
    planned: tuple[Trace, Planned],
) -> None:
    trace, result = planned
    for missing in result.plan.communications:
        others = tuple(c for c in result.plan.communications if c is not missing)
        with pytest.raises(EmissionError, match="no collective of the plan returns it"):
            emit_stage(trace, replace(result.plan, communications=others))


def test_plan_that_drops_a_layout_read_in_backward_is_refused(
    planned: tuple[Trace, Planned],
) -> None:
    trace, result = planned
    assert result.plan.kept
    with pytest.raises(EmissionError, match="no collective of the plan returns it"):
        emit_stage(trace, replace(result.plan, kept=()))


@pytest.mark.slow
def test_only_gradients_of_16_bit_parameters_are_reduced_in_fp32() -> None:
    model, batch = zoo_small.llama(dtype=torch.bfloat16)
    options = PlanOptions(constraints=expert.llama(fsdp=True))
    trace = capture(model, (), batch)
    result = make_plan(trace, MESH, HardwareProfile.load("h100-sxm"), options)
    program = emit_stage(trace, replace(result.plan, buckets=()))
    reduced = [
        n
        for n in program.backward.graph.nodes
        if "collective" in n.meta and n.meta["collective"].reduce_op
    ]
    weights = [
        n for n in reduced if n.meta["collective"].axis == 0
    ]  # only gradients are reduced over the data axis
    assert {n.meta["collective"].dtype for n in weights} == {"float32"}
    matrices = [n for n in weights if "/dot/" in n.meta["key"]]
    assert len(matrices) == 2 * 7 + 1
    for node in matrices:
        assert node.args[0].kwargs["dtype"] == torch.float32
        made_here = next(iter(node.users)) if node.target is steps.start else node
        assert {user.kwargs["dtype"] for user in made_here.users} == {torch.bfloat16}
    activations = [n for n in reduced if n.meta["key"].split("/")[1] == "add.Tensor"]
    assert activations
    assert {n.meta["collective"].dtype for n in activations} == {"bfloat16"}


def test_strategy_that_violates_the_rule_of_its_op_is_refused_with_the_source_line() -> None:
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x).softmax(1).pow(2).sum()

    trace = capture(Model(), (torch.randn(4, 6, 8),))
    plan = make_plan(trace, Mesh({"a": 2}), HardwareProfile.load("cpu-gloo"), PlanOptions()).plan
    emit_stage(trace, plan)
    position, entry = next(
        (i, e) for i, e in enumerate(plan.entries) if any("_softmax/" in n.node for n in e.nodes)
    )
    along = tuple(
        replace(n, strategy=strategy("S(1) -> S(1)")) if "_softmax/" in n.node else n
        for n in entry.nodes
    )
    wrong = replace(
        plan,
        entries=(
            *plan.entries[:position],
            replace(entry, nodes=along),
            *plan.entries[position + 1 :],
        ),
    )
    with pytest.raises(
        PlanError,
        match=(
            r"_softmax/forward/0 cannot run as S\(1\) -> S\(1\)(.|\n)*test_emit\.py:\d+:"
            r" .*softmax\(1\)"
        ),
    ):
        emit_stage(trace, wrong)


def test_collective_that_does_not_produce_the_planned_layout_is_refused(
    planned: tuple[Trace, Planned],
) -> None:
    trace, result = planned
    step = next(c for c in result.plan.communications if c.collective.kind == "all_gather")
    others = tuple(c for c in result.plan.communications if c is not step)
    changes = (
        {"axis": 1 - step.collective.axis},
        {"dim": 1 - step.collective.dim},
        {"kind": "slice"},
        {"bytes": 1},
        {"dtype": "int8"},
    )
    for change in changes:
        wrong = replace(step, collective=replace(step.collective, **change))
        with pytest.raises(PlanError, match=r"no .* converts .* to .* for"):
            emit_stage(trace, replace(result.plan, communications=(*others, wrong)))


def test_parameter_with_an_impossible_layout_is_refused(planned: tuple[Trace, Planned]) -> None:
    trace, result = planned
    position, entry = next(
        (i, e) for i, e in enumerate(result.plan.entries) if e.kind == "parameter"
    )
    for layout in ("S(7) R", "P R", "S(0)"):
        wrong = replace(
            entry,
            nodes=tuple(
                replace(n, strategy=strategy(f"{layout} -> {layout}")) for n in entry.nodes
            ),
        )
        with pytest.raises(PlanError, match="cannot have layout"):
            emit_stage(
                trace,
                replace(
                    result.plan,
                    entries=(
                        *result.plan.entries[:position],
                        wrong,
                        *result.plan.entries[position + 1 :],
                    ),
                ),
            )


@pytest.mark.slow
def test_collectives_of_identical_layers_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, numbers, ask = list[object](), list[int](), program_builder.neighbours
    monkeypatch.setattr(
        program_builder, "neighbours", lambda *of, **more: calls.append(of) or ask(*of, **more)
    )
    for num_layers in (3, 6):
        model, batch = zoo_small.llama(num_layers=num_layers)
        trace = capture(model, (), batch)
        plan = make_plan(
            trace, Mesh(2), HardwareProfile.load("h100-sxm"), PlanOptions(constraints=(fsdp(),))
        ).plan
        program_builder._converts.cache_clear()
        calls.clear()
        emit_stage(trace, plan)
        numbers.append(len(calls))
    assert numbers[0] == numbers[1] > 5
