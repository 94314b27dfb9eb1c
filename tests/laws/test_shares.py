"""Modules of plans that are cut into stages in different ways are compared by shares that add up
to the step."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest

import autopar
from autopar.breakdown import breakdown
from autopar.constraints import fsdp, pipeline
from autopar.explanation.difference import HIDDEN, WAITING, Share, parts_outside_modules
from autopar.plans import Plan
from autopar.plans.plan import load_of
from benchmarks import zoo

STAGES = {"stage": 2, "data": 2}
CASES: dict[str, tuple[dict[str, int], tuple[Any, ...], dict[str, Any]]] = {
    "whole": ({"data": 2, "other": 2}, (fsdp("data"),), {}),
    "one and three": (
        STAGES,
        (pipeline("stage", microbatches=4, cuts=["model.layers.1"]), fsdp("data")),
        {},
    ),
    "two and two": (
        STAGES,
        (pipeline("stage", microbatches=4, cuts=["model.layers.2"]), fsdp("data")),
        {},
    ),
    "interleaved": (
        STAGES,
        (pipeline("stage", microbatches=4, schedule="interleaved_1f1b"), fsdp("data")),
        {},
    ),
    "microbatches": ({"data": 4}, (), {"num_microbatches": 2}),
}


@cache
def planned(name: str) -> Plan:
    axes, constraints, options = CASES[name]
    model, batch = zoo.build("llama", batch=8, num_hidden_layers=4)
    return autopar.plan(
        model,
        autopar.Mesh(axes),
        example_inputs=batch,
        hardware="h100-sxm",
        constraints=constraints,
        **options,
    )


def stages_of(plan: Plan) -> tuple[tuple[Plan, ...], float]:
    """Return the stages of a plan and the number of microbatches per rank."""
    if plan.pipeline is None:
        return (plan,), 1.0
    return plan.pipeline.stages, plan.pipeline.num_microbatches / (
        len(plan.pipeline.stages) // plan.pipeline.num_chunks
    )


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(CASES, 2)))
def test_shares_of_modules_and_the_rest_add_up_to_the_step_of_each_plan(
    one: str, other: str
) -> None:
    found = autopar.diff(planned(one), planned(other))
    shares: list[tuple[Share | None, Share | None]] = [
        change.shares for change in found.changes if change.shares
    ]
    assert len(shares) == len(found.changes) > 0
    for side, plan in enumerate((found.first, found.second)):
        times = [share.time_s for both in shares if (share := both[side])]
        assert sum(times) + sum(row[1 + side] for row in found.beside) == pytest.approx(
            plan.prediction.step_s, rel=1e-9
        )
        for change, both in zip(found.changes, shares, strict=True):
            before, after = (share.time_s if share else 0.0 for share in both)
            assert change.compute_s + change.communication_s == pytest.approx(
                after - before, abs=1e-12
            )


@pytest.mark.parametrize(
    ("one", "other"),
    [("whole", "one and three"), ("two and two", "whole"), ("interleaved", "one and three")],
)
def test_the_share_of_a_module_is_the_sum_over_its_stages(one: str, other: str) -> None:
    found = autopar.diff(planned(one), planned(other))
    for side, plan in enumerate((found.first, found.second)):
        stages, runs = stages_of(plan)
        expected: dict[str, float] = {}
        for part in (part for stage in stages for part in breakdown(stage)):
            expected[part.pattern] = expected.get(part.pattern, 0.0) + runs * (
                part.compute_s + part.communication_s
            )
        told: dict[str, float] = {}
        for change in found.changes:
            share = change.shares[side] if change.shares else None
            if share is not None:
                module = share.part.pattern
                told[module] = told.get(module, 0.0) + share.time_s
        same = {module for module in expected if module not in told}
        assert told == pytest.approx(
            {module: s for module, s in expected.items() if module in told}, rel=1e-9
        )
        assert len(same) <= found.num_equal


@pytest.mark.parametrize("name", CASES)
def test_the_rest_is_the_hidden_time_of_stages_and_the_waiting_time_of_devices(
    name: str,
) -> None:
    plan = planned(name)
    stages, runs = stages_of(plan)
    hidden_s = sum(
        load_of(stage).serial_s - load_of(stage).least_s(stage.overlap.slowdown) for stage in stages
    )
    found = parts_outside_modules(plan)
    assert found[HIDDEN] == pytest.approx(-runs * hidden_s, abs=1e-12)
    assert (found[WAITING] > 1e-9) == (len(stages) > 1)
    assert found[WAITING] == pytest.approx(
        plan.prediction.step_s - runs * sum(stage.prediction.step_s for stage in stages), abs=1e-12
    )


def test_layouts_are_compared_by_axis_names_and_stages_are_shown() -> None:
    found = autopar.diff(planned("whole"), planned("one and three"))
    said = {change.module: change.said for change in found.changes}
    assert (
        said["lm_head"][-1] == "all devices → stage 1"
    )  # fsdp over data in both; tensors are replicated over the axis that one plan lacks
    assert said["model.layers.*.self_attn.q_proj [0]"][-1] == "all devices → stage 0"
    assert said["model.layers.*.self_attn.q_proj [1-3]"][-1] == "all devices → stage 1"
    moved = {
        change.module: change.said
        for change in autopar.diff(planned("one and three"), planned("two and two")).changes
    }
    assert moved["model.layers.*.self_attn.q_proj [1]"][-1] == "stage 1 → stage 0"
    assert not any("→" in moved[module][-1] for module in moved if "[2" in module), (
        "what stays in its stage moves nowhere"
    )
