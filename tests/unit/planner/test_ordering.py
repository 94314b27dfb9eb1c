"""The memory for early communication: what the step leaves of the budget while it is in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import zoo_small
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from autopar.api.planning import plan_model
from autopar.capture import capture
from autopar.constraints import fsdp, megatron
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.core.solution import Solution
from autopar.emit import Orders, apply_buckets, apply_overlap, buckets_without
from autopar.emit.overlap import Room, follows
from autopar.kernels import collectives as steps
from autopar.kernels.packing import into_bucket
from autopar.planner import PlanOptions, make_plan
from autopar.planner.candidates import Candidate
from autopar.planner.comm_schedule import (
    _WINDOWS,
    BucketOffers,
    Groups,
    Ordering,
    Peaks,
    _pieces,
    _Plain,
)
from autopar.planner.emitter import Emitter
from autopar.planner.learned_moments import LayerGroups
from autopar.planner.timeline import simulated_s
from autopar.plans import Bucket, Overlap
from autopar.program.peak_memory import NodePeak
from autopar.program.program import StageProgram
from autopar.program.reorder import order_of

PROFILE = HardwareProfile.load("h100-sxm")


def starts(program: StageProgram) -> int:
    """Return the number of early communication steps in the order or in the graphs."""
    actions = (each for phase in ("forward", "backward") for each in order_of(program, phase))
    return sum(action == "start" or node.target is steps.start for action, node in actions)


def test_if_no_early_step_fits_the_plan_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(_: Peaks, program: StageProgram) -> int:
        in_buckets = any(node.target is into_bucket for node in program.backward.graph.nodes)
        return 2**60 if in_buckets or starts(program) else 0

    model, batch = zoo_small.bert()
    trace, wish = capture(model, (), batch), PlanOptions(constraints=(fsdp(),))
    assert starts(make_plan(trace, Mesh(2), PROFILE, wish).stage_program())
    monkeypatch.setattr(Peaks, "peak_bytes", peak)
    made = make_plan(trace, Mesh(2), PROFILE, wish)
    assert not starts(made.stage_program()) and not made.plan.buckets
    assert (made.plan.overlap.forward_bytes, made.plan.overlap.backward_bytes) == (0, 0)


def test_early_steps_get_the_memory_that_the_step_leaves_at_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test budgets from the peak of the plan without early steps to that with all of them."""
    ordering: list[tuple[Ordering, Candidate]] = []
    fastest = Ordering.fastest

    def seen(self: Ordering, tried: Candidate) -> Candidate:
        ordering.append((self, tried))
        return fastest(self, tried)

    monkeypatch.setattr(Ordering, "fastest", seen)
    model, batch = zoo_small.llama(num_layers=6)
    trace, wish = capture(model, (), batch), PlanOptions(constraints=(fsdp(),))
    make_plan(trace, Mesh(2), PROFILE, wish)
    ((free, plain),) = ordering
    orders = _Plain(plain, Orders(plain.program, plain.plan))
    roomy = orders.overlapped(free._all_room(plain))
    most = free.peak_bytes(roomy.program) + plain.plan.prediction.beside_bytes
    assert plain.peak_bytes < most, "otherwise the test shows nothing"
    numbers = []
    for budget in (plain.peak_bytes - 1, plain.peak_bytes, (plain.peak_bytes + most) // 2, most):
        found = replace(free, budget=budget)._within_budget(orders, roomy)
        numbers.append(-1 if found is None else starts(found.program))
        if found is not None:
            assert found.peak_bytes <= budget
            again = apply_overlap(plain.program, found.plan)[0]
            assert free.peak_bytes(again) + plain.plan.prediction.beside_bytes == found.peak_bytes
    assert numbers[0] == -1 and numbers[3] // 2 < numbers[1] <= numbers[2] <= numbers[3] == starts(
        roomy.program
    )


@pytest.mark.slow
def test_the_room_of_a_phase_shrinks_by_the_excess_of_that_phase_over_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters are gathered at the beginning of a step with several microbatches, where nothing
    is early."""
    ordering: list[tuple[Ordering, Candidate]] = []

    def seen(self: Ordering, tried: Candidate) -> Candidate:
        ordering.append((self, tried))
        return tried

    monkeypatch.setattr(Ordering, "fastest", seen)
    model, batch = zoo_small.llama(num_layers=1)
    plan_model(
        model,
        Mesh({"data": 2}),
        example_inputs=batch,
        hardware=PROFILE,
        constraints=(megatron(dp=2, zero=1, microbatches=2),),
    )
    free, plain = ordering[-1]
    nodes = free.by_node(plain.program)
    most = {
        phase: max(each.peak_bytes for each in nodes if each.phase == phase)
        for phase in ("begin", "forward", "backward")
    }
    budget = min(most.values()) - 100
    room = ((0, 10 * budget),)
    less = replace(free, budget=budget)._less(Overlap(0.5, budget, budget, room, room), plain, 0)
    assert less.forward_room == ((0, 10 * budget - (most["forward"] - budget)),)
    assert less.backward_room == ((0, 10 * budget - (most["backward"] - budget)),)


@pytest.fixture(scope="module")
def sharded() -> tuple[Ordering, Candidate]:
    """The ordering of a sharded model, and its plan in the order of its ops."""
    calls: list[tuple[Ordering, Candidate]] = []

    def record(self: Ordering, tried: Candidate) -> Candidate:
        calls.append((self, tried))
        return tried

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ordering, "fastest", record)
        model, batch = zoo_small.llama(num_layers=6)
        options = PlanOptions(constraints=(fsdp(),))
        make_plan(capture(model, (), batch), Mesh(2), PROFILE, options)
    return calls[0]


def bucketed(sharded: tuple[Ordering, Candidate], num: int) -> Candidate:
    """Return the plan with `num` buckets per group."""
    _, plain = sharded
    groups = Groups.of(plain.plan, PROFILE, 1)
    offers = BucketOffers.of(groups, plain.program, lambda _: True)
    plan = replace(plain.plan, buckets=offers.with_num(num))
    return replace(plain, plan=plan, program=apply_buckets(plain.program, plan))


def memory_of(ordering: Ordering, program: StageProgram) -> dict[tuple[str, str], int]:
    """Return the peak of each node that is not part of a communication, by phase and key."""
    return {
        (each.phase, each.node.meta["key"]): each.peak_bytes
        for each in ordering.by_node(program)
        if "key" in each.node.meta and not follows(each.node)
    }


@pytest.mark.parametrize("num", [1, 4])
def test_a_bucket_changes_the_memory_only_while_it_holds_tensors(
    num: int, sharded: tuple[Ordering, Candidate]
) -> None:
    ordering, plain = sharded
    tried = bucketed(sharded, num)
    memory = memory_of(ordering, tried.program)
    peaks = [each for each in ordering.by_node(tried.program) if not follows(each.node)]
    compared = 0
    for each in peaks[:: len(peaks) // 12]:
        key = each.phase, each.node.meta.get("key", "")
        idle = buckets_without(tried.program, {each.node})
        active = tuple(bucket for bucket in tried.plan.buckets if bucket not in idle)
        plan = replace(plain.plan, buckets=active)
        without_idle = memory_of(ordering, apply_buckets(plain.program, plan))
        if key in memory and key in without_idle:
            assert without_idle[key] == memory[key]
            compared += 1
    assert compared >= 6


def test_a_budget_removes_the_buckets_that_exceed_it(sharded: tuple[Ordering, Candidate]) -> None:
    """Test budgets that one node exceeds, from the first node of backward to the last."""
    free, plain = sharded
    tried = bucketed(sharded, 8)
    spine = [n for n in tried.program.backward.graph.nodes if n.op == "call_function"]
    numbers = set()
    for over in spine[:: len(spine) // 8]:

        def by_node(program: StageProgram, over: fx.Node = over) -> tuple[NodePeak, ...]:
            exceeds = program is tried.program
            return (NodePeak("backward", over, 2 if exceeds else 0),)

        budget = 1 + plain.plan.prediction.beside_bytes
        tight = replace(
            free, budget=budget, by_node=by_node, peak_bytes=lambda p, f=by_node: f(p)[0].peak_bytes
        )
        reduced = tight._reduce_to_budget(tried, plain.program)
        kept = buckets_without(tried.program, {over})
        if len(kept) == len(tried.plan.buckets):
            assert reduced is None, "the plan without these buckets exceeds the budget as well"
        else:
            assert reduced is not None
            assert reduced.plan.buckets == kept
            assert (
                reduced.program.collectives
                == apply_buckets(plain.program, reduced.plan).collectives
            )
            numbers.add(len(kept))
    assert numbers, "otherwise the test shows nothing"


@pytest.mark.parametrize(
    ("fits", "has_eight", "numbers"),
    [(True, True, [8, 4, 1]), (True, False, [8, 4, 1]), (False, True, [8, 32])],
)
def test_smaller_buckets_are_tried_if_large_ones_exceed_the_budget(
    fits: bool,
    has_eight: bool,
    numbers: list[int],
    sharded: tuple[Ordering, Candidate],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    with_num = BucketOffers.with_num

    def record(self: BucketOffers, num: int) -> tuple[Bucket, ...]:
        tried.append(num)
        return with_num(self, num) if num != 8 or has_eight else ()

    def reduce(self: Ordering, tried: Candidate, plain: StageProgram) -> Candidate | None:
        return tried if fits else None

    monkeypatch.setattr(BucketOffers, "with_num", record)
    monkeypatch.setattr(Ordering, "_reduce_to_budget", reduce)
    ordering, plain = sharded
    assert bool(list(ordering._in_buckets(plain))) == fits
    assert tried == numbers


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.integers(0, 1200))
def test_the_room_is_the_remaining_budget_rounded_down(held: list[int], budget: int) -> None:
    room = Room(10**9, _pieces(held, budget))
    assert len(room.pieces) <= _WINDOWS
    for place, size in enumerate(held):
        assert room.at(place) <= max(budget - size, 0)
    if len(held) <= _WINDOWS:
        left = [max(budget - size, 0) for size in held]
        assert all(
            room.at(place) >= 0.9 * size - 2 or size < 0.002 * max(left)
            for place, size in enumerate(left)
        )


def test_orders_are_not_measured_if_no_order_can_be_below_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ordering: list[tuple[Ordering, Candidate]] = []
    within = Ordering.fastest_within

    def seen(self: Ordering, tried: Candidate, limit_s: float) -> Candidate | None:
        ordering.append((self, tried))
        return within(self, tried, limit_s)

    monkeypatch.setattr(Ordering, "fastest_within", seen)
    model, batch = zoo_small.llama(num_layers=2)
    trace = capture(model, (), batch)
    make_plan(trace, Mesh(2), PROFILE, PlanOptions(constraints=(fsdp(),)))
    ((order, plain),) = ordering
    found = order.fastest(plain)
    seconds = simulated_s(found.program, found.plan)
    same = order.fastest_within(plain, 1.01 * seconds)
    assert same is not None and same.plan == found.plan

    def peak_bytes(program: StageProgram) -> int:
        measured.append(starts(program))
        return order.peak_bytes(program)

    measured: list[int] = []
    counting = replace(order, peak_bytes=peak_bytes)
    assert counting.fastest_within(plain, 0.9 * seconds) is None
    assert not any(measured), "only buckets are measured, without early communication"
    counting.fastest(plain)
    assert any(measured)


def test_another_bound_changes_only_the_proof_of_a_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emitted: list[tuple[Emitter, LayerGroups, Candidate]] = []
    emit = Emitter.emit

    def seen(self: Emitter, groups: LayerGroups, choices: Solution) -> Candidate:
        emitted.append((self, groups, emit(self, groups, choices)))
        return emitted[-1][2]

    monkeypatch.setattr(Emitter, "emit", seen)
    model, batch = zoo_small.llama(num_layers=2)
    make_plan(capture(model, (), batch), Mesh(2), PROFILE, PlanOptions(constraints=(fsdp(),)))
    emitter, groups, first = emitted[0]
    groups = replace(groups, bound_s=first.bound_s / 2)
    proven = emitter.prove(groups, first)
    again = emit(emitter, groups, first.draft.choices)
    assert proven.program is first.program and proven.plan == again.plan != first.plan
    assert (proven.bound_s, proven.gap) == (again.bound_s, again.gap)
