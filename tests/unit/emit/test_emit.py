"""Emission: local graphs from a plan, and refusals where the plan does not fit."""

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


def test_the_predicted_peak_is_that_of_the_emitted_program_and_within_the_budget(
    planned: tuple[Trace, Planned],
) -> None:
    _, made = planned
    assert made.program.stages[0].collectives
    optimizer = made.plan.prediction.memory_bytes["optimizer"]
    peak = trace_peak(made.program.stages[0], outputs="dtensor").peak_bytes + optimizer
    assert made.plan.prediction.peak_bytes == peak <= made.plan.options["memory_bytes"]


def test_a_plan_without_stages_is_emitted_into_a_program_of_one_stage_and_one_microbatch(
    planned: tuple[Trace, Planned],
) -> None:
    trace, made = planned
    program = made.program
    (stage,) = program.stages
    assert program.is_single and program.axis == "" and program.microbatches.num == 1
    assert program.mesh == stage.mesh == MESH and program.trace is trace
    assert (program.inputs, program.outputs) == (stage.inputs, stage.outputs)
    assert {kind for kind, _ in program.microbatches.outputs.values()} == {"whole"}
    assert program.microbatches.weight == 1.0 and not program.shared


def test_emission_from_the_saved_plan_gives_the_same_program(
    planned: tuple[Trace, Planned], tmp_path: Path
) -> None:
    trace, made = planned
    made.plan.save(tmp_path / "plan.json")
    program = emit(trace, Plan.load(tmp_path / "plan.json"))
    (again,) = program.stages
    for ours, theirs in (
        (made.program.stages[0].forward, again.forward),
        (made.program.stages[0].backward, again.backward),
    ):
        assert str(ours.graph) == str(theirs.graph)
    assert again.collectives == made.program.stages[0].collectives
    assert program.plan_hash == made.program.plan_hash == made.plan.hash
    assert emit(trace, made.plan, named=False).plan_hash == ""


def test_forward_ends_with_saved_values_and_backward_begins_with_them(
    planned: tuple[Trace, Planned],
) -> None:
    _, made = planned
    placeholders = [n for n in made.program.stages[0].backward.graph.nodes if n.op == "placeholder"]
    assert len(placeholders) == made.program.stages[0].num_saved + 1
    results = next(iter(reversed(made.program.stages[0].forward.graph.nodes))).args[0]
    assert isinstance(results, tuple)
    assert (
        len(results)
        == len(made.program.outputs)
        + len(made.program.stages[0].mutated)
        + made.program.stages[0].num_saved
    )
    assert all(isinstance(r, fx.Node) for r in results)


def test_every_emitted_node_knows_its_module_and_phase(planned: tuple[Trace, Planned]) -> None:
    _, made = planned
    for phase, graph in (
        ("forward", made.program.stages[0].forward.graph),
        ("backward", made.program.stages[0].backward.graph),
    ):
        named = [n for n in graph.nodes if n.op == "call_function" and "key" in n.meta]
        assert named
        assert all(n.meta["phase"] == phase and "module" in n.meta for n in named)


def test_where_nothing_runs_beside_compute_a_reduction_is_issued_as_soon_as_its_partial_sum_exists_and_a_gather_when_it_is_first_read(  # noqa: E501
    planned: tuple[Trace, Planned],
) -> None:
    trace, made = planned
    program = emit_stage(trace, replace(made.plan, overlap=Overlap()))
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


def test_a_plan_of_another_model_is_refused_by_name(planned: tuple[Trace, Planned]) -> None:
    trace, made = planned
    with pytest.raises(PlanError, match="the plan has no entry for"):
        emit_stage(trace, replace(made.plan, entries=made.plan.entries[:-1]))
    model, batch = zoo_small.gpt2()
    with pytest.raises(PlanError, match="the model has no node for"):
        emit_stage(capture(model, (), batch), made.plan)


def test_a_plan_without_one_of_its_collectives_is_refused_with_the_place(
    planned: tuple[Trace, Planned],
) -> None:
    trace, made = planned
    for missing in made.plan.communications:
        others = tuple(c for c in made.plan.communications if c is not missing)
        with pytest.raises(EmissionError, match="no collective of the plan returns it"):
            emit_stage(trace, replace(made.plan, communications=others))


def test_a_plan_that_does_not_keep_what_backward_reads_is_refused(
    planned: tuple[Trace, Planned],
) -> None:
    trace, made = planned
    assert made.plan.kept
    with pytest.raises(EmissionError, match="no collective of the plan returns it"):
        emit_stage(trace, replace(made.plan, kept=()))


def test_gradients_of_16_bit_parameters_are_reduced_in_fp32_and_other_partial_sums_in_their_own_dtype() -> (  # noqa: E501
    None
):
    model, batch = zoo_small.llama(dtype=torch.bfloat16)
    options = PlanOptions(constraints=expert.llama(fsdp=True))
    trace = capture(model, (), batch)
    made = make_plan(trace, MESH, HardwareProfile.load("h100-sxm"), options)
    program = emit_stage(trace, replace(made.plan, buckets=()))
    reduced = [
        n
        for n in program.backward.graph.nodes
        if "collective" in n.meta and n.meta["collective"].reduce_op
    ]
    weights = [
        n for n in reduced if n.meta["collective"].axis == 0
    ]  # over data only gradients are reduced
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


def test_a_strategy_that_the_ops_rule_does_not_offer_is_refused_with_the_users_line() -> None:
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


def test_a_collective_that_does_not_lead_where_the_plan_says_is_refused(
    planned: tuple[Trace, Planned],
) -> None:
    trace, made = planned
    step = next(c for c in made.plan.communications if c.collective.kind == "all_gather")
    others = tuple(c for c in made.plan.communications if c is not step)
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
            emit_stage(trace, replace(made.plan, communications=(*others, wrong)))


def test_a_parameter_that_cannot_rest_so_is_refused(planned: tuple[Trace, Planned]) -> None:
    trace, made = planned
    position, entry = next((i, e) for i, e in enumerate(made.plan.entries) if e.kind == "parameter")
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
                    made.plan,
                    entries=(
                        *made.plan.entries[:position],
                        wrong,
                        *made.plan.entries[position + 1 :],
                    ),
                ),
            )


@pytest.mark.slow
def test_collectives_of_equal_layers_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, numbers, ask = list[object](), list[int](), program_builder.neighbours
    monkeypatch.setattr(
        program_builder, "neighbours", lambda *of, **more: asked.append(of) or ask(*of, **more)
    )
    for num_layers in (3, 6):
        model, batch = zoo_small.llama(num_layers=num_layers)
        trace = capture(model, (), batch)
        plan = make_plan(
            trace, Mesh(2), HardwareProfile.load("h100-sxm"), PlanOptions(constraints=(fsdp(),))
        ).plan
        program_builder._converts.cache_clear()
        asked.clear()
        emit_stage(trace, plan)
        numbers.append(len(asked))
    assert numbers[0] == numbers[1] > 5
