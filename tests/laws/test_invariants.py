"""Invariants of a full plan on a real model: priced = emitted, folded = unfolded, and no cached
state."""

from __future__ import annotations

import itertools
from collections import Counter

import expert
import pytest
import zoo_small

from autopar.capture import Trace, capture
from autopar.core.collective import bucket_time
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.cost.op_times import CollectivePrices, call_time
from autopar.planner import Planned, PlanOptions, make_plan
from autopar.plans import Communication, Member, Plan
from autopar.rules import call_of

MESH = Mesh({"data": 2, "tensor": 2})
H100 = HardwareProfile.load("h100-sxm")


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def planned(request: pytest.FixtureRequest) -> tuple[Trace, Planned]:
    model, batch = getattr(zoo_small, request.param)(num_layers=3)
    trace = capture(model, (), batch)
    constraints = getattr(expert, request.param)(fsdp=True)
    return trace, make_plan(trace, MESH, H100, PlanOptions(constraints=constraints))


@pytest.mark.slow
def test_priced_communication_equals_emitted_communication_in_bytes(
    planned: tuple[Trace, Planned],
) -> None:
    _, made = planned
    priced: Counter[tuple[str, str, int]] = Counter()
    assert made.plan.buckets
    for phase, collective in made.plan.issued():
        priced[phase, collective.kind, collective.axis] += collective.bytes
    emitted: Counter[tuple[str, str, int]] = Counter()
    for phase, _, collective in made.program.stages[0].collectives:
        emitted[phase, collective.kind, collective.axis] += collective.bytes
    assert emitted
    assert emitted == priced
    price = CollectivePrices(MESH, H100)
    passes_s = 0.0
    for bucket in made.plan.buckets:
        c = bucket.collective
        sizes = [
            next(s.collective.bytes for n, s in made.plan.steps() if is_of(m, n, s, bucket.phase))
            for m in bucket.members
        ]
        assert (
            bucket.time_s
            == bucket_time(c, MESH.shape[c.axis], MESH.link(c.axis), H100, sizes)
            > price(c)
        )
        passes_s += bucket.time_s - price(c)
    predicted = made.plan.prediction
    shared_s = predicted.communication_s + predicted.beyond_shares_s - predicted.in_buckets_s
    assert sum(
        price(c) for _, _, c in made.program.stages[0].collectives
    ) + passes_s == pytest.approx(shared_s)


def is_of(member: Member, node: str, step: Communication, phase: str) -> bool:
    return (member.node, member.result, member.target, phase) == (
        node,
        step.result,
        step.target,
        step.phase,
    )


def test_the_folded_objective_is_the_cost_of_the_unfolded_graph(
    planned: tuple[Trace, Planned],
) -> None:
    trace, made = planned
    chosen = made.plan.node_choices()
    nodes = [n for n in trace.graph.nodes if n.op == "call_function"]
    ops_s = sum(call_time(call_of(n), chosen[n.meta["key"]], MESH.shape, H100) for n in nodes)
    rest_s = sum(e.time_s * len(e.instances) for e in made.plan.entries if e.kind != "compute")
    assert any(len(e.instances) == 3 for e in made.plan.entries)
    assert ops_s + rest_s == pytest.approx(made.plan.prediction.compute_s)
    assert (
        made.plan.prediction.step_s
        == made.plan.proof.objective_s
        == pytest.approx(least_s(made.plan))
    )
    assert made.plan.proof.bound_s <= made.plan.proof.objective_s


def least_s(plan: Plan) -> float:
    """Return a lower bound per phase: overlapped communication takes a share of its time from
    compute, and a phase is not shorter than its communication."""
    alone = sum(e.time_s * len(e.instances) for e in plan.entries if e.kind != "compute")
    own, sent = Counter[str](), Counter[str]()
    for e in (e for e in plan.entries if e.kind == "compute"):
        own[e.phase] += e.time_s * len(e.instances)
        own["backward"] += e.again_s * len(e.instances)
    for c in plan.communications:
        time_s = c.time_s * len(c.instances)
        if c.collective.kind == "slice":
            own[c.phase] += time_s
        elif c.beside:
            sent[c.phase] += time_s
        else:
            alone += time_s
    assert sent["forward"] and sent["backward"]
    return alone + sum(
        max(own[phase] + H100.overlap_slowdown * sent[phase], sent[phase])
        for phase in ("forward", "backward")
    )


def test_the_length_of_the_timeline_is_the_sum_of_its_bars(planned: tuple[Trace, Planned]) -> None:
    _, made = planned
    prediction = made.plan.prediction
    by_kind: Counter[str] = Counter()
    for _, _, kind, _, duration in prediction.timeline:
        by_kind[kind] += duration
    slowed_s = prediction.hidden_s * made.plan.overlap.slowdown
    local_s = sum(
        c.time_s * len(c.instances)
        for c in made.plan.communications
        if c.collective.kind == "slice"
    )
    assert by_kind["compute"] == pytest.approx(prediction.compute_s + slowed_s + local_s)
    alone_s = prediction.communication_s + prediction.beyond_shares_s
    assert by_kind["communication"] == pytest.approx(alone_s - local_s - prediction.in_buckets_s)
    assert prediction.in_buckets_s > 0
    starts = [start for *_, start, _ in prediction.timeline]
    assert starts == sorted(starts)
    ends = {
        kind: max(start + duration for _, _, k, start, duration in prediction.timeline if k == kind)
        for kind in by_kind
    }
    assert max(ends.values()) == pytest.approx(prediction.simulated_s)
    assert 0 < prediction.hidden_s < alone_s
    assert (
        prediction.step_s
        <= prediction.simulated_s
        < prediction.compute_s + alone_s - prediction.in_buckets_s
    )
    for kind in by_kind:  # a stream runs one op at a time
        lane = sorted(
            (start, start + duration)
            for _, _, k, start, duration in prediction.timeline
            if k == kind
        )
        assert all(before <= after + 1e-12 for (_, before), (after, _) in itertools.pairwise(lane))


def test_a_plan_round_trips_through_its_file(planned: tuple[Trace, Planned]) -> None:
    _, made = planned
    text = made.plan.dumps()
    assert Plan.loads(text) == made.plan
    assert Plan.loads(text).dumps() == text


@pytest.mark.slow
def test_two_meshes_and_profiles_in_one_process_are_independent() -> None:
    model, batch = zoo_small.gpt2(num_layers=1)
    trace = capture(model, (), batch)
    cases = [
        (mesh, profile)
        for mesh in (Mesh({"a": 2, "b": 2}), Mesh({"a": 2, "b": 2}, links={"a": "intra"}))
        for profile in (H100, HardwareProfile.load("cpu-gloo"))
    ]
    first = [make_plan(trace, *case, PlanOptions()).plan.dumps() for case in cases]
    again = [make_plan(trace, *case, PlanOptions()).plan.dumps() for case in reversed(cases)]
    assert first == again[::-1]
    assert len(set(first)) == len(cases)
