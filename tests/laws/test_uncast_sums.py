"""Gradients that are added without a cast to wider sums over microbatches: results are bitwise
equal, with less communication and memory.

The references are the program that casts first, and the model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo_small
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import autopar
from autopar.analysis.gradients import addable_uncast
from autopar.analysis.work import Work
from autopar.api.planning import plan_model
from autopar.capture import capture
from autopar.certificate.facts import Facts
from autopar.certificate.multiplier_proof import Moments
from autopar.constraints import Constraint, fsdp, megatron, pipeline
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, local_shape
from autopar.core.layout_graph import neighbours
from autopar.core.mesh import Mesh
from autopar.cost import price as cost_price
from autopar.cost.memory import Liveness
from autopar.cost.op_times import compute_time
from autopar.cost.price import price
from autopar.emit import phase as emit_phase
from autopar.kernels.collectives import add_to, fake_groups
from autopar.planner import Planned
from autopar.planner.min_memory import certain_moments
from autopar.plans import Plan
from autopar.program.abstract_executor import LiveBytes
from autopar.program.executor import Executor
from autopar.program.lockstep import run_lockstep
from autopar.program.program import Program, ProgramTensor, StageProgram
from autopar.program.stage_memory import put_together, trace_stage_peak
from autopar.program.stage_work import StageWork
from autopar.sharding import classes_of
from autopar.solve import evaluate_choices, solve

BF16, _cast = torch.bfloat16, torch.ops.aten._to_copy.default
NUM = 2  # microbatches
H100 = HardwareProfile.load("h100-sxm")
ONE, LINE, SQUARE = Mesh({"gpu": 1}), Mesh({"gpu": 2}), Mesh({"data": 2, "tensor": 2})
CUBE = Mesh({"stage": 2, "data": 2, "tensor": 2})
WAYS: dict[str, tuple[Mesh, tuple[Constraint, ...], dict[str, Any]]] = {
    "one device": (ONE, (), {"num_microbatches": NUM}),
    "free": (SQUARE, (), {"num_microbatches": NUM}),
    "ZeRO-1": (LINE, (megatron(dp=2, zero=1, microbatches=NUM),), {}),
    "ZeRO-2": (LINE, (megatron(dp=2, zero=2, microbatches=NUM),), {}),
    "ZeRO-3": (LINE, (fsdp(),), {"num_microbatches": NUM}),
    "tensor parallel": (SQUARE, (megatron(dp=2, tp=2, zero=1, microbatches=NUM),), {}),
    "stages": (CUBE, (megatron(pp=2, dp=2, tp=2, zero=1, microbatches=NUM),), {}),
}
CASES = [*(("llama", way) for way in WAYS), ("gpt2", "ZeRO-1"), ("gpt2", "tensor parallel")]
UNCAST = ("one device", "ZeRO-1", "tensor parallel", "stages")


@functools.cache
def planned(
    kind: str, way: str, **options: Any
) -> tuple[Planned, Program, nn.Module, dict[str, Any]]:
    model, batch = getattr(zoo_small, kind)()
    mesh, constraints, more = WAYS[way]
    asked: dict[str, Any] = {
        "hardware": "h100-sxm",
        "constraints": constraints,
        "precision": "bf16",
        **more,
        **options,
    }
    made = plan_model(model, mesh, example_inputs=batch, **asked)[1]
    return made, made.program, model, batch


def added(program: StageProgram) -> list[fx.Node]:
    return [node for node in program.backward.graph.nodes if node.target is add_to]


def stages_of(plan: Plan) -> tuple[Plan, ...]:
    assert plan.pipeline is not None
    return plan.pipeline.stages


def uncast_of(plan: Plan) -> Iterator[tuple[str, Layout]]:
    """Return the parameters whose gradients are added without a cast, and how."""
    for stage in stages_of(plan):
        for key, strategy in stage.node_choices().items():
            if key.endswith("/parameter") and strategy.inputs and strategy.inputs[0].uncast:
                yield key.removesuffix("/parameter"), strategy.inputs[0]


def casting(program: Program) -> Program:
    """Return the program with a cast before each addition."""
    stages = []
    for stage in program.stages:
        graph = fx.Graph()
        graph.output(graph.graph_copy(stage.backward.graph, {}))
        for node in [n for n in graph.nodes if n.target is add_to]:
            with graph.inserting_before(node):
                cast = graph.call_function(_cast, (node.args[1],), {"dtype": torch.float32})
            cast.meta = dict(node.meta)
            node.args = (node.args[0], cast)
        stages.append(replace(stage, backward=fx.GraphModule({}, graph)))
    return replace(program, stages=tuple(stages))


@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.data(),
)
def test_addition_casts_to_the_same_bits(
    numbers: list[float], narrow: torch.dtype, data: st.DataObject
) -> None:
    x = torch.tensor(numbers).to(narrow)
    total = torch.tensor(
        data.draw(st.lists(st.floats(width=32), min_size=len(numbers), max_size=len(numbers)))
    )
    assert (
        add_to(total.clone(), x).numpy().tobytes()
        == add_to(total.clone(), x.float()).numpy().tobytes()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_gradients_are_bitwise_equal_to_those_of_the_program_that_casts_first(
    kind: str, way: str
) -> None:
    made, program, model, batch = planned(kind, way)
    assert autopar.verify(made.plan, model, batch).ok
    assert autopar.verify(made.plan, model, batch, dtype=None).ok
    names, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    found = run_lockstep(program, names, buffers, batch).gradients
    wanted = run_lockstep(casting(program), names, buffers, batch).gradients
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_gradients_added_where_they_are_produced_are_not_cast(kind: str, way: str) -> None:
    made, program, model, batch = planned(kind, way)
    assert autopar.check(Plan.loads(made.plan.dumps()), model, batch).ok
    uncast = dict(uncast_of(made.plan))
    addable = addable_uncast(program.trace)
    casts = {program.trace.node(name).meta["key"] for name in addable}
    if way in UNCAST:
        assert len(uncast) > 0.5 * len(addable)
        assert uncast.keys() <= set(addable.values())
    if way == "one device":
        assert uncast.keys() == set(addable.values())
    if way in ("tensor parallel", "stages"):
        assert {str(at) for at in uncast.values()} >= {"P S(0) uncast", "P S(1) uncast"}
    for stage in program.stages:
        for node in added(stage):
            name = node.meta["key"].removesuffix("/parameter/add_to")
            gradient = node.args[1]
            assert isinstance(gradient, fx.Node)
            assert not (gradient.meta["key"] in casts and name in uncast)
            assert (
                "collective" not in gradient.meta or gradient.meta["collective"].dtype == "float32"
            )


@pytest.mark.parametrize("way", ["ZeRO-2", "ZeRO-3"])
def test_gradients_reduced_in_every_microbatch_are_cast_first(way: str) -> None:
    made, program, _, _ = planned("llama", way)
    scattered = [
        c for phase, _, c in program.stages[0].collectives if phase == "backward" and c.reduce_op
    ]
    assert scattered and {c.dtype for c in scattered} == {"float32"}
    assert not dict(uncast_of(made.plan))


@pytest.mark.parametrize("way", WAYS)
def test_casts_and_additions_are_priced_by_the_bytes_they_move(way: str) -> None:
    """The bytes that the graphs read and write are counted on the tensors of the lockstep run."""
    made, program, model, batch = planned("llama", way, optimizer="none")
    counted_s, sizes = 0.0, dict[fx.Node, tuple[int, torch.dtype]]()

    def observe(phase: str, node: fx.Node, results: list[Any]) -> None:
        nonlocal counted_s
        if isinstance(results[0], Tensor):
            sizes[node] = results[0].numel(), results[0].dtype
        if node.target is add_to:
            passes = (
                2 if node in seen else 1
            )  # the first microbatch writes the sum without reading it
            moved = passes * size_of(node.args[0]) + size_of(node.args[1])
            counted_s += compute_time(Work(0, moved, "elementwise"), torch.float32, H100) / NUM
        if node.target is _cast and node.meta.get("key", "") in casts and node not in seen:
            dtype = sizes[node.args[0]][1]  # type: ignore[index]
            counted_s += compute_time(
                Work(0, size_of(node.args[0]) + size_of(node), "elementwise"), dtype, H100
            )
        seen.add(node)

    def size_of(node: Any) -> int:
        return sizes[node][0] * sizes[node][1].itemsize

    seen = set[fx.Node]()
    trace = program.trace
    casts = {trace.node(name).meta["key"] for name in addable_uncast(trace)}
    run_lockstep(
        program, dict(model.named_parameters()), dict(model.named_buffers()), batch, observe=observe
    )
    priced_s = 0.0
    for stage in stages_of(made.plan):
        for entry in stage.entries:
            if (
                entry.kind == "parameter"
                or entry.nodes[0].node.format(*entry.instances[0]) in casts
            ):
                priced_s += entry.time_s * len(entry.instances)
    for tensor in (
        t for stage in program.stages for t in stage.parameters
    ):  # read once per step for the cast
        num = torch.Size(
            local_shape(tensor.view, tensor.layout, program.stages[0].mesh.shape)
        ).numel()
        priced_s -= compute_time(Work(0, num * (4 + 2), "elementwise"), BF16, H100) / NUM
    assert counted_s == pytest.approx(priced_s, rel=1e-9)


def measured_peak(program: StageProgram, batch: dict[str, Tensor]) -> int:
    """Return the peak of a step on real tensors without the batch, with process groups that do
    nothing."""

    def local(tensors: tuple[ProgramTensor, ...]) -> list[Tensor]:
        return [
            torch.zeros(local_shape(t.view, t.layout, program.mesh.shape), dtype=t.dtype)
            for t in tensors
        ]

    parts = [
        {t.name: batch[t.name].chunk(NUM)[n] for t in program.inputs if not t.given}
        for n in range(NUM)
    ]
    work, memory = (
        StageWork(
            program,
            Executor(program, fake_groups(program.mesh), outputs="local"),
            torch.device("cpu"),
        ),
        LiveBytes(),
    )
    with memory:
        memory.register(batch.values())
        batch_bytes = memory.live_bytes
        parameters, buffers = local(program.parameters), local(program.buffers)
        given = {t.name: torch.ones(t.shape, dtype=t.dtype) for t in program.inputs if t.given}
        memory.reset_peak()
        parts = [{**part, **given} for part in parts]
        work.begin(
            [t.name for t in program.outputs if t.is_loss],
            parameters,
            buffers,
            parts,
            1 / NUM,
            keep=True,
        )
        for number in range(NUM):
            work.forward(number)
            work.backward(number)
        joined = put_together(work)  # the losses of the microbatches are joined
        gradients = work.finish()
        assert {g.dtype for g in gradients} == {torch.float32}
        del gradients, joined
        return memory.peak_bytes - batch_bytes


@pytest.mark.parametrize(("kind", "way"), [case for case in CASES if case[1] != "stages"])
def test_the_predicted_peak_of_microbatches_without_casts_equals_the_measured_peak(
    kind: str, way: str
) -> None:
    _, program, _, batch = planned(kind, way)
    (stage,) = program.stages
    assert (
        measured_peak(stage, batch) == trace_stage_peak(stage, "1f1b", 1, NUM, "dtensor").peak_bytes
    )


class Square(nn.Module):
    """A product whose weight takes almost all of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float().pow(2).mean()


def square(monkeypatch: pytest.MonkeyPatch | None = None) -> Plan:
    if monkeypatch is not None:
        monkeypatch.setattr(cost_price, "left_uncast", lambda classes, trace: (classes, {}))
    batch = {"x": torch.zeros(4, 2, 512)}
    return autopar.plan(
        Square(),
        ONE,
        example_inputs=batch,
        hardware="h100-sxm",
        precision="bf16",
        num_microbatches=NUM,
    )


def test_the_wide_copy_of_a_gradient_is_not_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, casting = square(), square(monkeypatch)
    wide, narrow, factors = (
        4 * 512**2,
        2 * 512**2,
        2 * 2 * 2 * 2 * 512,
    )  # freed before their product is cast
    assert casting.prediction.peak_bytes - plan.prediction.peak_bytes == wide - factors

    def takes(num_bytes: int, dtype: torch.dtype) -> float:
        return compute_time(Work(0, num_bytes, "elementwise"), dtype, H100)

    less_s = (
        takes(narrow + wide, BF16)
        + takes(3 * wide, torch.float32)
        - takes(narrow + 2 * wide, torch.float32)
    )
    assert casting.prediction.step_s - plan.prediction.step_s == pytest.approx(NUM * less_s)


def test_a_budget_without_the_wide_copy_suffices() -> None:
    least = square().prediction.peak_bytes
    batch = {"x": torch.zeros(4, 2, 512)}
    asked: dict[str, Any] = {
        "hardware": "h100-sxm",
        "precision": "bf16",
        "num_microbatches": NUM,
        "memory_bytes": least,
    }
    plan = autopar.plan(Square(), ONE, example_inputs=batch, **asked)
    assert (
        plan.prediction.peak_bytes <= least and plan.prediction.step_s == square().prediction.step_s
    )
    found = autopar.check(plan, Square(), batch)
    assert (
        found.ok
        and found.certified_bound_s is not None
        and found.certified_bound_s <= plan.prediction.step_s
    )


def test_no_memory_row_counts_a_copy_that_is_not_made() -> None:
    """The memory that certainly exists at a moment, by the rows of the planner and of the
    certificate, is at most the peak of the program."""
    trace = capture(Square(), (), {"x": torch.zeros(2, 2, 512)}, precision=BF16)
    priced = price(
        trace,
        classes_of(trace, (1,)),
        ONE,
        H100,
        budget_bytes=2**40,
        optimizer="none",
        num_microbatches=NUM,
    )
    liveness = Liveness(trace, priced)
    moments = (*liveness.certain, *certain_moments(liveness))
    choices = solve(priced.problem)
    found = evaluate_choices(replace(priced.problem, moments=moments), choices)
    batch = {"x": torch.zeros(4, 2, 512)}
    plan = autopar.plan(
        Square(),
        ONE,
        example_inputs=batch,
        hardware=H100,
        precision="bf16",
        num_microbatches=NUM,
        optimizer="none",
    )
    assert max(found.resting_bytes) <= plan.prediction.peak_bytes
    (cast,) = addable_uncast(trace)
    rows = Moments(trace, Facts.of(trace), priced, (1,))
    row = rows.row(trace.node(cast).meta["key"], 1.0)
    (op,) = [
        n
        for n, source in enumerate(priced.sources)
        if source.cluster and source.cluster.first.members[0].node == cast
    ]
    assert row is not None
    made, uncast = row.live[op]
    assert made - uncast == 4 * 512**2 and uncast == 2 * 512**2


def test_no_step_converts_an_uncast_gradient() -> None:
    at = Layout.parse("P S(0) uncast")
    assert (
        at.uncast and str(at) == "P S(0) uncast" and at != at.plain and at.plain.left_uncast() == at
    )
    assert neighbours((4, 4), torch.float32, at, (2, 2)) == []
    assert neighbours((4, 4), torch.float32, at.plain, (2, 2))


@pytest.mark.parametrize("way", ["ZeRO-1", "tensor parallel"])
def test_changed_plans_with_uncast_sums_are_refused(way: str) -> None:
    made, _, model, batch = planned("llama", way)
    nodes = [c for e in stages_of(made.plan)[0].entries for c in e.nodes]
    cast = next(c for c in nodes if c.strategy.outputs[0].uncast)
    reader = next(c for c in nodes if c.strategy.inputs and c.strategy.inputs[0].uncast)
    product = next(c for c in nodes if "/dot/backward" in c.node)
    changes = [
        (cast, replace(cast.strategy, outputs=cast.strategy.plain.outputs)),
        (reader, replace(reader.strategy, inputs=(reader.strategy.inputs[0].plain,))),
        (product, replace(product.strategy, outputs=(product.strategy.outputs[0].left_uncast(),))),
        (
            product,
            replace(
                product.strategy,
                inputs=(product.strategy.inputs[0].left_uncast(), product.strategy.inputs[1]),
            ),
        ),
        (reader, replace(reader.strategy, outputs=(reader.strategy.outputs[0].left_uncast(),))),
    ]
    for old, strategy in changes:
        data = json.loads(made.plan.dumps())
        for entry in data["pipeline"]["stages"][0]["entries"]:
            for node in entry["nodes"]:
                if node["node"] == old.node:
                    node["strategy"] = {
                        "inputs": [*map(str, strategy.inputs)],
                        "outputs": [*map(str, strategy.outputs)],
                    }
        try:
            certificate = autopar.check(Plan.loads(json.dumps(data)), model, batch)
        except autopar.AutoparError:
            continue
        assert not certificate.ok


def test_an_addition_that_overwrites_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, model, batch = planned("llama", "ZeRO-1")
    monkeypatch.setattr(emit_phase, "add_to", lambda total, x: total.copy_(x))
    with pytest.raises(autopar.errors.ValidationError, match="add_to"):
        autopar.verify(made.plan, model, batch)


@pytest.mark.slow
def test_stages_that_share_a_weight_cast_their_parts_of_its_gradient() -> None:
    """The model without stages does the same, which the bound over all cuts assumes."""
    model, batch = zoo_small.gpt2()
    mesh, constraints = Mesh({"stage": 2, "data": 2}), (pipeline("stage", microbatches=NUM),)
    made = plan_model(
        model,
        mesh,
        example_inputs=batch,
        hardware="h100-sxm",
        constraints=constraints,
        precision="bf16",
    )[1]
    assert "transformer.wte.weight" in made.program.shared
    names = {name for name, _ in uncast_of(made.plan)}
    assert names and "transformer.wte.weight" not in names
    assert autopar.check(made.plan, model, batch).ok and autopar.verify(made.plan, model, batch).ok


class Shares(nn.Module):
    """Equal layers, the first two of which share a weight: its gradient has two terms, and only the
    other gradients are cast directly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.float().pow(2).mean()


@pytest.mark.parametrize("constraints", [(), (pipeline("a", microbatches=NUM),)])
def test_only_gradients_of_layers_without_shared_weights_are_added_uncast(
    constraints: tuple[Constraint, ...],
) -> None:
    torch.manual_seed(0)
    model, batch, mesh = Shares(), {"x": torch.randn(8, 4, 16)}, Mesh({"a": 2, "b": 2})
    asked: dict[str, Any] = {} if constraints else {"num_microbatches": NUM}
    plan = autopar.plan(
        model,
        mesh,
        example_inputs=batch,
        hardware="h100-sxm",
        precision="bf16",
        constraints=constraints,
        **asked,
    )
    names = {name for name, _ in uncast_of(plan)}
    assert "layers.0.weight" not in names and names >= {"layers.2.weight", "layers.3.weight"}
    assert autopar.check(plan, model, batch).ok
    assert (
        autopar.verify(plan, model, batch).ok and autopar.verify(plan, model, batch, dtype=None).ok
    )


class Scaled(nn.Module):
    """A model whose gradient of the weight is the sum of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).float().sum()


@pytest.mark.parametrize(
    ("samples", "num_microbatches"),
    [((255, 2, 2, -258), 1), ((200, 50, 5, 2, -200, -50, -4, -2), 2)],
    ids=["between two axes", "before it is added"],
)
def test_sums_of_16_bit_gradients_are_communicated_in_fp32(
    samples: tuple[int, ...], num_microbatches: int
) -> None:
    """All samples and their sum 1 are bf16 numbers, but the partial sum 257 is not."""
    model, batch = (
        Scaled(),
        {"x": torch.tensor(samples, dtype=BF16)[:, None].expand(-1, 16).contiguous()},
    )
    options: dict[str, Any] = {
        "constraints": (fsdp(),),
        "num_microbatches": num_microbatches,
        "hardware": H100,
    }
    plan = autopar.plan(model, SQUARE, example_inputs=batch, **options)
    assert autopar.check(plan, model, batch).ok
    assert autopar.verify(plan, model, batch, dtype=None).gradients == {"weight": 0.0}
