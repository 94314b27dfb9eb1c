"""Communication in buckets: one collective for many tensors gives the same results, in the order
and memory of the plan."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import zoo_small
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from measured import measured_peak
from torch import fx, nn
from torch.distributed.tensor import Partial, Replicate, Shard

import autopar
from autopar import constraints
from autopar.api.planning import plan_model
from autopar.capture import Trace, capture
from autopar.certificate import certify, rates
from autopar.core import collective
from autopar.core.collective import Collective
from autopar.core.hardware import HardwareProfile, Link
from autopar.core.layout import Layout, local_shape
from autopar.core.mesh import Mesh
from autopar.emit import WaitingError, apply_buckets, emit, emit_stage, on_bucket
from autopar.emit.context import CALLS, Moved
from autopar.errors import PlanError, VerificationError
from autopar.kernels import collectives as steps
from autopar.kernels.packing import from_bucket, into_bucket
from autopar.planner import Planned, PlanOptions, make_plan
from autopar.planner.comm_schedule import Groups
from autopar.plans import Bucket, Member, Overlap, Plan
from autopar.program.interpreter import Ranks
from autopar.program.lockstep import run_lockstep
from autopar.program.peak_memory import trace_peak
from autopar.program.program import Program, ProgramTensor, StageProgram
from autopar.verification import verify_program
from benchmarks.random_plans import prepare, random_plan

GLOO, H100 = HardwareProfile.load("cpu-gloo"), HardwareProfile.load("h100-sxm")
MESH = Mesh({"a": 2, "b": 3})
_cast = torch.ops.aten._to_copy.default


@cache
def planned(
    kind: str, force: str, hardware: str = "cpu-gloo", mesh: int = 2
) -> tuple[nn.Module, dict[str, Any], Trace, Planned]:
    model, batch = getattr(zoo_small, kind)()
    trace = capture(model, (), batch)
    options = PlanOptions(constraints=(getattr(constraints, force)(),))
    return (
        model,
        batch,
        trace,
        make_plan(trace, Mesh(mesh), HardwareProfile.load(hardware), options),
    )


# Arbitrary tensors and axes
# --------------------------------------------------------------------------------------------------


@st.composite
def sent(draw: st.DrawFn) -> list[tuple[tuple[int, ...], list[tuple[str, int, int]], bool]]:
    """Draw tensors: a shape that all layouts divide, (kind, axis, dim) of the communication steps,
    and whether they use a wider dtype."""
    found = []
    for _ in range(draw(st.integers(2, 9))):
        shape = tuple(6 * n for n in draw(st.lists(st.integers(1, 2), max_size=3)))
        axes = draw(st.permutations([0, 1]))[: draw(st.integers(1, 2))]
        kinds = ["all_reduce", "reduce_scatter", "all_gather"] if shape else ["all_reduce"]
        moves = [
            (draw(st.sampled_from(kinds)), axis, draw(st.integers(0, max(len(shape) - 1, 0))))
            for axis in axes
        ]
        found.append((shape, moves, draw(st.booleans())))
    return found


def placed(moves: list[tuple[str, int, int]]) -> list[Layout]:
    """Return the layouts before and after each step."""
    at: list[Any] = [Replicate(), Replicate()]
    for kind, axis, dim in moves:
        at[axis] = Shard(dim) if kind == "all_gather" else Partial("sum")
    # the axis that is gathered first shards innermost
    gathered = [axis for kind, axis, _ in moves if kind == "all_gather"]
    found = [Layout(tuple(at), [*(a for a in (0, 1) if a not in gathered), *reversed(gathered)])]
    for kind, axis, dim in moves:
        at[axis] = Shard(dim) if kind == "reduce_scatter" else Replicate()
        found.append(Layout(tuple(at), [*(a for a in found[-1].order if a != axis), axis]))
    return found


def program_of(
    tensors: list[tuple[tuple[int, ...], list[tuple[str, int, int]], bool]],
) -> StageProgram:
    """Return a backward graph that communicates the tensors one after another."""
    graph, results = fx.Graph(), []
    for number in range(len(tensors)):
        graph.placeholder(f"x{number}").meta.update(key=f"x{number}/parameter")
    for number, ((shape, moves, wide), x) in enumerate(
        zip(tensors, list(graph.nodes), strict=True)
    ):
        node, layouts = x, placed(moves)
        for (kind, axis, dim), source, target in zip(moves, layouts, layouts[1:], strict=False):
            about = {"slack": "deferrable", "phase": "backward", "module": "", "source": ""}
            reduces = kind != "all_gather"
            dtype = "float64" if wide and reduces else "float32"
            if wide and reduces:
                node = graph.call_function(_cast, (node,), {"dtype": torch.float64})
                node.meta.update(about, key=f"x{number}/widen")
            size = (
                torch.empty(local_shape(shape, source, MESH.shape)).numel()
                * getattr(torch, dtype).itemsize
            )
            c = Collective(
                kind,
                axis,
                -1 if kind == "all_reduce" else dim,
                -1,
                "sum" if reduces else "",
                dtype,
                size,
            )  # type: ignore[arg-type]
            call, args = CALLS[kind](c, target)
            node = graph.call_function(call, (node, *args))
            moved = Moved("backward", f"x{number}/parameter", 0, shape, source, target)
            node.meta.update(about, key=f"x{number}/{kind}", collective=c, time_s=1e-3, moved=moved)
            if wide and reduces:
                node = graph.call_function(_cast, (node,), {"dtype": torch.float32})
                node.meta.update(about, key=f"x{number}/narrow")
        results.append(node)
    graph.output(tuple(results))
    empty = fx.Graph()
    empty.output(())
    moved_by = tuple(
        ("backward", n.meta["moved"].node, n.meta["collective"])
        for n in graph.nodes
        if "moved" in n.meta
    )
    none: tuple[ProgramTensor, ...] = ()
    modules = fx.GraphModule({}, empty), fx.GraphModule({}, graph)
    return StageProgram(MESH, *modules, none, none, none, none, 0, (), moved_by)


def in_buckets(program: StageProgram, nodes: list[fx.Node]) -> Bucket:
    moved = [n.meta["moved"] for n in nodes]
    members = tuple(Member(m.node, m.result, m.target) for m in moved)
    return Bucket("backward", members, on_bucket(nodes, MESH.shape), 1e-3, 0.0)


def grouped(program: StageProgram) -> list[list[fx.Node]]:
    found: dict[Any, list[fx.Node]] = {}
    for node in program.backward.graph.nodes:
        if "moved" in node.meta:
            c = node.meta["collective"]
            found.setdefault((c.kind, c.axis, c.dtype), []).append(node)
    return [nodes for nodes in found.values() if len(nodes) > 1]


@examples(60)
@given(sent(), st.integers(0, 2**16))
def test_tensors_in_buckets_are_bitwise_equal_to_separate_communication(
    tensors: Any, seed: int
) -> None:
    program = program_of(tensors)
    _, _, _, made = planned("gpt2", "ddp")
    generator = torch.Generator().manual_seed(seed)
    operands = []
    for shape, moves, _ in tensors:
        local = local_shape(shape, placed(moves)[0], MESH.shape)
        operands.append([torch.randn(local, generator=generator) for _ in range(MESH.num_devices)])
    alone = Ranks(MESH, None, None, torch.device("cpu"))(
        program.backward, "backward", [list(x) for x in operands]
    )
    buckets: tuple[Bucket, ...] = ()
    for nodes in grouped(program):
        more = (*buckets, in_buckets(program, nodes))
        try:
            apply_buckets(program, replace(made.plan, buckets=more))
        except WaitingError:
            continue
        buckets = more
    together = apply_buckets(program, replace(made.plan, buckets=buckets))
    together.backward.graph.lint()  # type: ignore[no-untyped-call]
    run = Ranks(MESH, None, None, torch.device("cpu"))
    results = run(together.backward, "backward", operands)
    assert all(
        torch.equal(x, y)
        for a, b in zip(alone, results, strict=True)
        for x, y in zip(a, b, strict=True)
    )
    emitted = Counter(str(c) for _, _, c in together.collectives)
    assert Counter(str(c) for _, _, c in run.records) == emitted
    assert emitted.total() == len(program.collectives) - sum(len(b.members) - 1 for b in buckets)


def test_members_that_wait_for_each_other_are_refused() -> None:
    """One tensor is reduced over the first axis and then over the second, the other one in the
    opposite order."""
    first, second = ("all_reduce", 0, 0), ("all_reduce", 1, 0)
    program = program_of([((6,), [first, second], False), ((6,), [second, first], False)])
    _, _, _, made = planned("gpt2", "ddp")
    buckets = tuple(in_buckets(program, nodes) for nodes in grouped(program))
    for bucket in buckets:
        apply_buckets(program, replace(made.plan, buckets=(bucket,)))
    with pytest.raises(WaitingError, match=r"members of the bucket of .* depend on each other"):
        apply_buckets(program, replace(made.plan, buckets=buckets))


@examples(60)
@given(sent())
def test_buckets_formed_in_turn_do_not_deadlock(tensors: Any) -> None:
    """This holds for tensors that are communicated over any axes in any order."""
    program = program_of(tensors)
    steps_of_all = [n for n in program.backward.graph.nodes if "moved" in n.meta]
    groups = Groups(MESH, GLOO, 1, {n.meta["moved"].name: 1.0 for n in steps_of_all})
    by_turn = groups.of_program(program, by_turn=True)
    buckets = tuple(bucket for nodes in by_turn for bucket in groups.in_buckets(nodes, 1))
    _, _, _, made = planned("gpt2", "ddp")
    together = apply_buckets(program, replace(made.plan, buckets=buckets))
    assert sum(len(b.members) for b in buckets) == sum(map(len, by_turn))
    assert len(together.collectives) == len(steps_of_all) - sum(len(b.members) - 1 for b in buckets)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=5),
    st.sampled_from([torch.float64, torch.float32]),
)
@examples(30)
def test_unpacking_a_bucket_returns_its_members(
    shapes: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    tensors = [torch.randn([2 * n] * num_dims) for num_dims, n in shapes]
    for parts in (1, 2) if all(x.dim() for x in tensors) else (1,):
        dims, sizes = [max(x.dim() - 1, 0) for x in tensors], [list(x.shape) for x in tensors]
        bucket = into_bucket(tensors, dims, parts, parts, dtype)
        again = from_bucket(bucket, sizes, dims, parts, [x.dtype for x in tensors])
        assert all(
            torch.equal(x, y) and x.shape == y.shape for x, y in zip(tensors, again, strict=True)
        )


# Plans
# --------------------------------------------------------------------------------------------------

CASES = [
    ("gpt2", "ddp", "cpu-gloo", 2),
    ("llama", "fsdp", "cpu-gloo", 4),
    ("bert", "fsdp", "h100-sxm", 2),
    ("vit", "ddp", "h100-sxm", 2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_a_planned_model_gives_the_same_results_without_buckets(
    case: tuple[str, str, str, int],
) -> None:
    model, batch, trace, made = planned(*case)
    plan, program = made.plan, made.stage_program()
    assert plan.buckets and all(len(b.members) > 1 and b.saved_s > 0 for b in plan.buckets)
    alone = emit_stage(trace, replace(plan, buckets=()))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    inputs = [batch[i.path] for i in trace.inputs]
    ran, before = (
        run_lockstep(made.program, tensors, tensors, inputs),
        run_lockstep(Program.of_one_stage(trace, alone), tensors, tensors, inputs),
    )
    assert all(torch.equal(ran.gradients[name], x) for name, x in before.gradients.items())
    assert verify_program(trace, made.program, model, (), batch).ok

    # The listed buckets are emitted and run.
    listed = Counter((phase, str(c)) for phase, c in plan.issued())
    assert (
        listed
        == Counter((phase, str(c)) for phase, _, c in program.collectives)
        == Counter((p, str(c)) for p, _, c in ran.records)
    )
    assert len(program.collectives) == len(alone.collectives) - sum(
        len(b.members) - 1 for b in plan.buckets
    )
    found = certify(trace, plan, HardwareProfile.load(case[2]))
    assert found.ok, str(found)
    assert Plan.loads(plan.dumps()) == plan


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_parameters_that_move_over_two_axes_in_different_orders_are_in_buckets(kind: str) -> None:
    model, batch = getattr(zoo_small, kind)()
    prepared = prepare(model, batch, Mesh({"a": 2, "b": 2}), GLOO)
    alone, serial = random_plan(prepared, 0)
    groups = Groups.of(alone, GLOO, 1)
    circle = tuple(
        b for nodes in groups.of_program(serial.stages[0]) for b in groups.in_buckets(nodes, 1)
    )
    with pytest.raises(WaitingError):
        apply_buckets(serial.stages[0], replace(alone, buckets=circle))
    plan, program = random_plan(prepared, 0, in_order=True)
    by_turn = groups.of_program(serial.stages[0], by_turn=True)
    assert (
        sum(len(b.members) for b in plan.buckets)
        == sum(map(len, by_turn))
        > 0.95 * sum(map(len, groups.of_program(serial.stages[0])))
    )
    assert (
        plan.prediction.simulated_s < alone.prediction.serial_s + alone.prediction.beyond_shares_s
    )
    assert (
        plan.prediction.peak_bytes
        == trace_peak(program.stages[0], outputs="dtensor").peak_bytes
        + plan.prediction.beside_bytes
    )
    assert verify_program(prepared.trace, program, model, (), batch).ok


def test_equal_communications_of_equal_layers_are_priced_in_a_bucket_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, _, trace, made = planned("llama", "fsdp", "h100-sxm")
    serial = emit_stage(trace, replace(made.plan, buckets=(), overlap=Overlap()))
    groups, priced, price = Groups.of(made.plan, H100, 1), list[object](), Groups.bucket

    def watched(self: Groups, steps: Any) -> Bucket:
        if len(steps) == 2 and steps[0] is steps[1]:
            priced.append(steps[0])
        return price(self, steps)

    monkeypatch.setattr(Groups, "bucket", watched)
    found = groups.of_program(serial)
    num = len(priced)
    monkeypatch.setattr(
        Groups, "_gains", lambda self, step, _: self.bucket((step, step)).saved_s > 0
    )
    assert groups.of_program(serial) == found
    assert 0 < num < (len(priced) - num) / 2, "each kind once"


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_the_savings_of_buckets_match_the_prediction(case: tuple[str, str, str, int]) -> None:
    made = planned(*case)[3]
    plan, p = made.plan, made.plan.prediction
    steps = {(c.phase, node, c.result, c.target): c for node, c in plan.steps()}
    for bucket in plan.buckets:
        members = [steps[bucket.phase, m.node, m.result, m.target] for m in bucket.members]
        assert bucket.time_s + bucket.saved_s == pytest.approx(sum(c.by_itself_s for c in members))
        assert sum(c.time_s for c in members) <= bucket.time_s, (
            "what the objective counts is a bound of every bucket"
        )
    assert p.in_buckets_s == pytest.approx(sum(b.saved_s for b in plan.buckets))
    hides_s = (1 - plan.overlap.slowdown) * p.hidden_s
    assert p.simulated_s == pytest.approx(
        p.serial_s + p.beyond_shares_s - p.in_kernels_s - p.in_buckets_s - hides_s
    )
    assert (
        p.step_s <= p.simulated_s
        and p.beyond_shares_s
        == pytest.approx(sum(c.by_itself_s - c.time_s for c in steps.values()))
        != 0.0
    )
    assert plan.proof.bound_s <= plan.proof.objective_s == p.step_s
    assert any("as parts of full 32 MiB buckets" in line for line in plan.proof.covers)
    assert f"{sum(len(b.members) for b in plan.buckets)} small communications share" in str(
        autopar.explain(plan)
    )


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: " ".join(map(str, case)))
def test_the_predicted_peak_equals_the_measured_peak(case: tuple[str, str, str, int]) -> None:
    """The peak is measured on real tensors with fake process groups, whose steps allocate the same
    memory."""
    _, batch, _, made = planned(*case)
    assert (
        measured_peak(made.stage_program(), batch)[0] == trace_peak(made.stage_program()).peak_bytes
    )


@pytest.mark.slow
def test_a_bucket_starts_after_its_last_member_is_ready() -> None:
    """There are three buckets, so that some compute can overlap with the first one, for each limit
    of memory."""
    _, _, trace, made = planned("llama", "fsdp", "h100-sxm")
    serial = emit_stage(trace, replace(made.plan, buckets=(), overlap=Overlap()))
    groups = Groups.of(made.plan, H100, 1)
    offered = groups.of_program(serial)
    buckets = tuple(
        bucket for steps_of_one in offered for bucket in groups.in_buckets(steps_of_one, 3)
    )
    assert {b.phase for b in buckets} == {"forward", "backward"} and len(buckets) >= 5
    begun = 0
    for num_bytes in (2**40, 20_000):
        plan = replace(made.plan, buckets=buckets, overlap=Overlap(0.4, num_bytes, num_bytes))
        program = emit_stage(trace, plan)
        for graph in (program.forward.graph, program.backward.graph):
            graph.lint()  # type: ignore[no-untyped-call]
            nodes = list(graph.nodes)
            place = {node: number for number, node in enumerate(nodes)}
            for packed in (node for node in nodes if node.target is into_bucket):
                start = next(iter(packed.users))
                begun += start.target is steps.start
                finish = next(iter(start.users)) if start.target is steps.start else start
                assert (
                    max(place[x] for x in packed.all_input_nodes)
                    < place[packed]
                    < place[start]
                    <= place[finish]
                )
                unpacked = next(iter(finish.users))
                assert unpacked.target is from_bucket
                assert all(
                    place[part] - place[unpacked] <= len(unpacked.users) for part in unpacked.users
                ), "taken out at once"
        model, batch, _, _ = planned("llama", "fsdp", "h100-sxm")
        assert verify_program(trace, Program.of_one_stage(trace, program), model, (), batch).ok
    assert begun > 2


def with_latency(latency_s: float, launch_s: float = 3e-6) -> HardwareProfile:
    links = {
        name: Link(latency_s, link.bandwidth_bytes_per_s, link.all_to_all_efficiency, {})
        for name, link in H100.links.items()
    }
    return replace(
        H100, links=links, launch_overhead_s=launch_s, hash=f"latency {latency_s} {launch_s}"
    )


def test_buckets_exist_only_if_links_have_latency() -> None:
    _, _, trace, _ = planned("gpt2", "ddp")
    ddp = PlanOptions(constraints=(constraints.ddp(),))
    fast = make_plan(trace, Mesh(2), with_latency(0.0, 0.0), ddp).plan
    slow = make_plan(trace, Mesh(2), with_latency(1e-3), ddp).plan
    assert not fast.buckets and fast.prediction.in_buckets_s == 0.0
    assert slow.buckets and slow.prediction.simulated_s < slow.prediction.in_buckets_s, (
        "less than half of what it was"
    )


def test_buckets_stay_within_the_budget() -> None:
    """At the smallest budget, only the plan without buckets fits. Slightly above it, smaller
    buckets fit."""
    _, _, trace, made = planned("gpt2", "ddp")
    alone = emit_stage(trace, replace(made.plan, buckets=()))
    least = trace_peak(alone, outputs="dtensor").peak_bytes + made.plan.prediction.beside_bytes
    assert made.plan.prediction.peak_bytes > least
    for budget in (least, (least + made.plan.prediction.peak_bytes) // 2):
        tight = make_plan(
            trace, Mesh(2), GLOO, PlanOptions(constraints=(constraints.ddp(),), memory_bytes=budget)
        ).plan
        assert tight.prediction.peak_bytes <= budget
        assert certify(trace, tight, GLOO).ok
    assert len(tight.buckets) > len(made.plan.buckets), "smaller ones"


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_gathers_at_the_start_and_reductions_at_the_end_of_a_step_share_buckets(zero: int) -> None:
    model, batch = zoo_small.gpt2()
    force = (constraints.megatron(dp=2, zero=zero, microbatches=2),)
    _, made = plan_model(
        model, Mesh({"data": 2}), example_inputs=batch, hardware="cpu-gloo", constraints=force
    )
    assert made.plan.pipeline is not None
    stage = made.plan.pipeline.stages[0]
    kinds = {(b.phase, b.members[0].result, b.collective.kind) for b in stage.buckets}
    assert kinds == (
        {("step", 0, "all_gather"), ("step", 1, "reduce_scatter")}
        if zero
        else {("step", 1, "all_reduce")}
    )
    whole = made.plan.prediction
    assert whole.in_buckets_s == pytest.approx(2 * stage.prediction.in_buckets_s)
    assert autopar.verify(made.plan, model, batch).ok
    assert autopar.check(made.plan, model, batch).ok
    swapped = tuple(
        replace(b, members=tuple(replace(m, result=1 - m.result) for m in b.members))
        for b in stage.buckets
    )
    pipeline = replace(made.plan.pipeline, stages=(replace(stage, buckets=swapped),))
    assert not autopar.check(replace(made.plan, pipeline=pipeline), model, batch).ok


# Refusals
# --------------------------------------------------------------------------------------------------

Change = Callable[[Bucket], Bucket]


def stepped(bucket: Bucket, **changes: Any) -> Bucket:
    return replace(bucket, collective=replace(bucket.collective, **changes))


CHANGES: dict[str, tuple[Change, str]] = {
    "a member twice": (
        lambda b: replace(b, members=(*b.members, b.members[0])),
        "buckets: the collective to .* is in two buckets",
    ),
    "a member less": (
        lambda b: replace(b, members=b.members[1:]),
        "buckets: .*a device contributes",
    ),
    "one member": (
        lambda b: replace(b, members=b.members[:1]),
        "buckets: .*the plan has 1 of the collectives of its 1 members",
    ),
    "no members": (
        lambda b: replace(b, members=()),
        "buckets: .*the plan has 0 of the collectives of its 0 members",
    ),
    "a member that the plan does not move": (
        lambda b: replace(
            b, members=(replace(b.members[0], node="x/y/backward/0"), *b.members[1:])
        ),
        "buckets: .*the plan has",
    ),
    "a member's target": (
        lambda b: replace(
            b, members=(replace(b.members[0], target=Layout.parse("S(0)")), *b.members[1:])
        ),
        "buckets: .*the plan has",
    ),
    "its phase": (lambda b: replace(b, phase="forward"), "buckets: .*the plan has 0"),
    "its kind": (
        lambda b: stepped(b, kind="all_gather"),
        "buckets: .*but its bucket uses all_gather",
    ),
    "its reduction": (lambda b: stepped(b, reduce_op="max"), "buckets: .*uses "),
    "its dtype": (
        lambda b: stepped(b, dtype="bfloat16"),
        "buckets: .*but its bucket uses all_reduce of bfloat16",
    ),
    "its dim": (lambda b: stepped(b, dim=1), "buckets: .*a device contributes"),
    "its bytes": (
        lambda b: stepped(b, bytes=b.collective.bytes - 4),
        "buckets: .*a device contributes",
    ),
    "its time": (lambda b: replace(b, time_s=b.time_s / 2), "buckets: .*it takes"),
    "what it saves": (lambda b: replace(b, saved_s=b.saved_s * 1.01), "buckets: .*it saves"),
}


@pytest.mark.parametrize(("change", "finding"), CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_bucket_is_refused_with_the_reason(change: Change, finding: str) -> None:
    _, _, trace, made = planned("gpt2", "ddp")
    plan = replace(made.plan, buckets=(change(made.plan.buckets[0]), *made.plan.buckets[1:]))
    found = certify(trace, plan, GLOO)
    assert not found.ok
    assert any(re.match(finding, str(f)) for f in found.findings), str(found)


@pytest.mark.parametrize("place", [0, -1])
def test_a_member_of_two_buckets_is_refused(place: int) -> None:
    """This includes the member at whose place the buckets run."""
    _, _, trace, made = planned("gpt2", "ddp")
    alone = replace(made.plan, buckets=(), overlap=Overlap())
    program, groups = emit_stage(trace, alone), Groups.of(alone, GLOO, 1)
    steps_of_group = groups.of_program(program)[0]
    half = len(steps_of_group) // 2
    assert half > 1
    shared = steps_of_group[place]
    parts = [
        list(dict.fromkeys((*nodes, shared)))
        for nodes in (steps_of_group[:half], steps_of_group[half:])
    ]
    plan = replace(alone, buckets=tuple(map(groups.bucket, parts)))
    assert "in two buckets" in str(certify(trace, plan, GLOO))
    with pytest.raises(PlanError, match="in two buckets"):
        apply_buckets(program, plan)


@pytest.mark.slow
def test_a_bucket_over_several_axes_or_of_awaited_tensors_is_refused() -> None:
    model, batch = zoo_small.llama()
    trace = capture(model, (), batch)
    options = PlanOptions(constraints=(constraints.megatron(tp="tensor", dp=2),))
    plan = make_plan(trace, Mesh({"data": 2, "tensor": 2}), GLOO, options).plan
    bucket = next(b for b in plan.buckets if b.collective.kind == "all_reduce")
    waited = next(
        (node, c)
        for node, c in plan.steps()
        if c.phase == "backward" and c.slack == "critical" and c.collective.kind == "all_reduce"
    )
    other = Member(waited[0], waited[1].result, waited[1].target)
    found = certify(
        trace, replace(plan, buckets=(replace(bucket, members=(*bucket.members, other)),)), GLOO
    )
    said = str(found)
    assert (
        "is critical: it depends on an op" in said
        and "along axis 1, but its bucket uses all_reduce of float32 along axis 0" in said
    )


def test_a_bucket_of_prefetched_and_deferred_tensors_is_refused() -> None:
    _, _, trace, made = planned("llama", "fsdp", "h100-sxm")
    gathers = next(b for b in made.plan.buckets if b.phase == "forward")
    assert gathers.collective.kind == "all_gather"
    reduces = next(b for b in made.plan.buckets if b.phase == "backward" and b.collective.reduce_op)
    mixed = replace(
        reduces, members=(*reduces.members, *(replace(m, target=m.target) for m in gathers.members))
    )
    assert "the plan has" in str(certify(trace, replace(made.plan, buckets=(mixed,)), H100))
    with pytest.raises(PlanError, match="has collectives that no graph"):
        emit_stage(trace, replace(made.plan, buckets=(mixed,)))


def test_emission_refuses_an_illegal_bucket() -> None:
    _, _, trace, made = planned("gpt2", "ddp")
    bucket = made.plan.buckets[0]
    for wrong in (
        replace(bucket, members=(*bucket.members, bucket.members[0])),
        stepped(bucket, bytes=8),
        replace(bucket, members=()),
    ):
        with pytest.raises(PlanError, match=r"bucket|cannot share one"):
            emit_stage(trace, replace(made.plan, buckets=(wrong,)))


def test_the_certificate_checks_the_savings_of_buckets_and_missing_buckets() -> None:
    _, _, trace, made = planned("gpt2", "ddp")
    less = replace(made.plan.prediction, in_buckets_s=made.plan.prediction.in_buckets_s / 2)
    assert "time: buckets save" in str(certify(trace, replace(made.plan, prediction=less), GLOO))
    assert not certify(trace, replace(made.plan, buckets=()), GLOO).ok


def test_no_bucket_exceeds_the_maximum_size(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, trace, made = planned("gpt2", "ddp")
    most = made.plan.buckets[0].collective.bytes // 2
    monkeypatch.setattr(collective, "BUCKET_BYTES", most)
    monkeypatch.setattr(rates, "_MOST_IN_BUCKET", most)
    assert "it exceeds the largest bucket size" in str(certify(trace, made.plan, GLOO))
    again = make_plan(
        trace, made.plan.mesh, GLOO, PlanOptions(constraints=(constraints.ddp(),))
    ).plan
    assert again.buckets and certify(trace, again, GLOO).ok
    sizes = {(c.phase, node, c.result, c.target): c.collective.bytes for node, c in again.steps()}
    for b in again.buckets:
        parts = again.mesh.shape[b.collective.axis] if b.collective.kind == "all_gather" else 1
        assert parts * sum(sizes[b.phase, m.node, m.result, m.target] for m in b.members) <= most


@pytest.mark.slow
def test_gathers_over_two_axes_are_in_buckets_of_each_axis() -> None:
    model, batch, trace, _ = planned("vit", "fsdp")
    made = make_plan(
        trace, Mesh({"a": 2, "b": 2}), H100, PlanOptions(constraints=(constraints.fsdp(),))
    )
    gathers = [
        b for b in made.plan.buckets if b.phase == "forward" and b.collective.kind == "all_gather"
    ]
    first, second = ({m.node for m in b.members} for b in gathers)
    assert {b.collective.axis for b in gathers} == {
        0,
        1,
    } and first & second, "what one has gathered the other gathers on"
    assert (
        certify(trace, made.plan, H100).ok
        and verify_program(trace, made.program, model, (), batch).ok
    )


def test_an_older_plan_has_no_buckets() -> None:
    _, _, trace, made = planned("gpt2", "ddp")
    data = json.loads(made.plan.dumps())
    del data["buckets"], data["prediction"]["in_buckets_s"]
    older = Plan.loads(json.dumps(data))
    assert older.buckets == () and older.prediction.in_buckets_s == 0.0
    assert len(emit_stage(trace, older).collectives) == len(older.steps())


def test_a_broken_bucket_pass_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above fail if segments are returned in another order."""
    model, batch, trace, made = planned("gpt2", "ddp")

    def turned(bucket: Any, sizes: Any, dims: Any, parts: Any, dtypes: Any) -> list[torch.Tensor]:
        found = from_bucket(bucket, sizes, dims, parts, dtypes)
        same = [n for n, x in enumerate(found) if x.shape == found[0].shape]
        for n, x in zip(same, [found[n] for n in reversed(same)], strict=True):
            found[n] = x
        return found

    monkeypatch.setattr("autopar.emit.buckets.from_bucket", turned)
    with pytest.raises(VerificationError, match="computes a different value"):
        verify_program(trace, emit(trace, made.plan), model, (), batch)


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an axis is none of the mesh": (
        lambda b: b["collective"].update(axis=1),
        "a bucket moves along axis 1, but mesh gpu=2 has 1 axes",
    ),
    "a layout is of another mesh": (
        lambda b: b["members"][0].update(target="R R"),
        "'R R' has 2 placements, but mesh gpu=2 has 1 axes",
    ),
    "a time is a word": (
        lambda b: b.update(time_s="soon"),
        r"buckets\[0\].time_s must be a number, not 'soon'",
    ),
    "its members are no list of members": (lambda b: b.update(members=[1]), "plan is malformed"),
}


@pytest.mark.parametrize(("damage", "complaint"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_file_with_a_damaged_bucket_is_refused(
    damage: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    data = json.loads(planned("gpt2", "ddp")[3].plan.dumps())
    damage(data["buckets"][0])
    with pytest.raises(PlanError, match=complaint):
        Plan.loads(json.dumps(data))


def test_compiled_bucket_passes_are_the_same() -> None:
    """Both passes are one torch operator whose settings are literals."""

    def through(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        bucket = into_bucket([x, y, z], [0, 1, 0], 1, 1, torch.float32)
        return from_bucket(
            2 * bucket,
            [[4], [3, 8], []],
            [0, 1, 0],
            1,
            [torch.bfloat16, torch.float32, torch.float32],
        )

    operands = torch.randn(4).bfloat16(), torch.randn(3, 8), torch.randn(())
    compiled = torch.compile(through, fullgraph=True, backend="aot_eager", dynamic=False)
    assert all(
        torch.equal(x, y) for x, y in zip(compiled(*operands), through(*operands), strict=True)
    )
