"""How much room early steps get: of each phase, what its own peak leaves of the budget."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import zoo_small
from hypothesis import given
from hypothesis import strategies as st
from made_plan import made_plan

from autopar.capture import capture
from autopar.constraints import fsdp
from autopar.hardware import HardwareProfile
from autopar.kernels import collectives as steps
from autopar.kernels.bucketed import into_bucket
from autopar.mesh import Mesh
from autopar.planning import PlanOptions, make_plan
from autopar.planning.clock import Clock
from autopar.planning.ordering import Ordering, _most
from autopar.planning.peaks import Peaks
from autopar.planning.tried import Tried
from autopar.plans import Overlap, Plan
from autopar.run.program import Program

PROFILE = HardwareProfile.load("h100-sxm")


@given(st.integers(0, 10**12), st.integers(-1, 10**12))
def test_the_most_that_fits_is_found_of_the_shares_that_are_tried(size: int, most: int) -> None:
    asked: list[int] = []

    def fits(share: int) -> bool:
        asked.append(share)
        return share <= most

    found = _most(size, fits)
    assert len(asked) <= 5 and all(0 <= share <= size for share in asked)
    if most < 0:
        assert found is None
    else:
        assert found is not None and found <= most
        assert found == size or found >= 0.7 * min(size, most) or most < 0.06 * size


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(-1, 2 * 10**6))
def test_each_phase_gets_the_room_that_its_own_peak_leaves(forward: int, backward: int, room: int) -> None:
    """Of a program that holds so many bytes early if it may, and a budget with so much room beside what it holds anyway."""
    plain = Tried(None, made_plan(), None, 1000, 0.0)  # type: ignore[arg-type]

    def overlapped(_: object, plan: Plan) -> tuple[Any, Overlap]:
        held = min(plan.overlap.forward_bytes, forward), min(plan.overlap.backward_bytes, backward)
        return held, replace(plan.overlap, forward_bytes=held[0], backward_bytes=held[1])

    priced: Any = SimpleNamespace(problem=SimpleNamespace(overlap_slowdown=0.5))
    beside = plain.plan.prediction.beside_bytes
    ordering = Ordering(priced, 1000 + room + beside, lambda held: 1000 + max(held), Clock(lambda _: None))  # type: ignore[call-overload]
    ours = {"overlapped": overlapped, "least_overlap": lambda program, plan: overlapped(program, plan)[1]}
    with mock.patch.multiple("autopar.planning.ordering", **ours):
        roomy = replace(plain, program=(forward, backward), plan=replace(plain.plan, overlap=Overlap(0.5, forward, backward)))  # type: ignore[arg-type]
        found = ordering._within_budget(plain, roomy)
    if room < 0:
        assert found is None
        return
    assert found is not None and found.peak_bytes <= ordering.budget
    overlap = found.plan.overlap
    for most, allowed in ((forward, overlap.forward_bytes), (backward, overlap.backward_bytes)):
        assert allowed == (most if most <= room else _most(most, lambda n: n <= room))
    assert found.program == (overlap.forward_bytes, overlap.backward_bytes)


def starts(program: Program) -> int:
    """Early steps."""
    graphs = program.forward.graph, program.backward.graph
    return sum(node.target is steps.start for graph in graphs for node in graph.nodes)


def test_where_nothing_early_fits_the_plan_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(_: Peaks, program: Program) -> int:
        in_buckets = any(node.target is into_bucket for node in program.backward.graph.nodes)
        return 2**60 if in_buckets or starts(program) else 0

    model, batch = zoo_small.bert()
    trace, wish = capture(model, (), batch), PlanOptions(constraints=(fsdp(),))
    assert starts(make_plan(trace, Mesh(2), PROFILE, wish).stage_program())
    monkeypatch.setattr(Peaks, "peak_bytes", peak)
    made = make_plan(trace, Mesh(2), PROFILE, wish)
    assert not starts(made.stage_program()) and not made.plan.buckets
    assert (made.plan.overlap.forward_bytes, made.plan.overlap.backward_bytes) == (0, 0)
