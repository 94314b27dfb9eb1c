"""The factor at which a choice in a stage changes. On hardware beyond the stated factor, the
runner-up is not more expensive, and before it, the chosen strategy is better. A decision shared by
several stages is not a choice of one stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.api.planning import plan_model
from autopar.capture import Trace, capture
from autopar.constraints import pipeline
from autopar.core.collective import faster
from autopar.core.hardware import HardwareProfile
from autopar.core.problem import Problem
from autopar.errors import PlanError
from autopar.planner import PlanOptions
from autopar.planner.pipeline.step_schedule import step_time
from autopar.planner.reprice import PlanPart, decisions, problems_of
from autopar.planner.sensitivity import all_flips
from autopar.plans import COMPUTE, Flip, Plan
from autopar.solve import evaluate


class Block(torch.nn.Module):
    """Two linear layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 512), torch.nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.down(torch.relu(self.up(x))))


class Net(torch.nn.Module):
    """Four blocks and a loss. If tied, the last block has the weight of the first one."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))
        if tied:
            self.layers[3].up.weight = self.layers[0].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


H100, GLOO = HardwareProfile.load("h100-sxm"), HardwareProfile.load("cpu-gloo")
MESH = {"stage": 2, "node": 2, "gpu": 2}
INTER: dict[str, Any] = {"schedule": "interleaved_1f1b", "chunks": 2}
Case = tuple[
    dict[str, int], tuple[Any, ...], int, int, HardwareProfile
]  # mesh, constraints, microbatches, rows, profile
CASES: dict[str, Case] = {
    "1f1b": (MESH, (pipeline("stage", microbatches=4),), 4, 16384, H100),
    "uneven cuts": (MESH, (pipeline("stage", microbatches=4, cuts=["layers.1"]),), 4, 16384, H100),
    "interleaved": (MESH, (pipeline("stage", microbatches=4, **INTER),), 4, 16384, H100),
    "one stage": ({"node": 2, "gpu": 2}, (), 2, 4096, GLOO),
    "partial sums": ({"node": 2, "gpu": 2}, (), 2, 16384, GLOO),
    "tied": (MESH, (pipeline("stage", microbatches=2),), 2, 16384, GLOO),
}
Built = tuple[Plan, Trace, PlanOptions, HardwareProfile]


def built(name: str) -> Built:
    axes, constraints, num, rows, profile = CASES[name]
    net = Net(tied=name == "tied")
    options = {"constraints": constraints, "num_microbatches": num}
    planned = plan_model(
        net,
        autopar.Mesh(axes),
        example_inputs={"x": torch.zeros(rows, 128)},
        hardware=profile,
        **options,
    )[1]
    part = capture(net, (), {"x": torch.zeros(rows // num, 128)})
    return planned.plan, part, PlanOptions(**options), profile


def parts_on(made: Built, what: str = COMPUTE, factor: float = 1.0) -> list[PlanPart]:
    """Return the problems of all stages, priced again on hardware on which `what` is faster by a
    factor."""
    plan, part, options, profile = made
    if what != COMPUTE:
        links = {**profile.links, what: faster(profile.links[what], factor - 1)}
        return list(problems_of(plan, part, plan.mesh, replace(profile, links=links), options))
    return [
        replace(p, priced=replace(p.priced, problem=computing(p.priced.problem, factor)))
        for p in parts_on(made, "intra")
    ]


def computing(problem: Problem, factor: float) -> Problem:
    """Scale the speed of compute by a factor."""
    times = [
        [(s.time_s - s.communication_s) / factor + s.communication_s for s in op.strategies]
        for op in problem.ops
    ]
    ops = (
        replace(
            op,
            strategies=tuple(
                replace(s, time_s=t) for s, t in zip(op.strategies, each, strict=True)
            ),
        )
        for op, each in zip(problem.ops, times, strict=True)
    )
    return replace(problem, ops=tuple(ops))


def step_deltas(made: Built, flip: Flip, parts: Iterable[PlanPart]) -> tuple[float, float]:
    """Return the change of the step of a stage's microbatch and of the full step with the
    runner-up."""
    assert flip.stage is not None
    loads, problems = [], []
    for part in parts:
        strategies, again = decisions(part.priced, part.plan)
        loads.append(evaluate(part.priced.problem, strategies, again).objective_s)
        problems.append((part.priced.problem, strategies, again))
    problem, strategies, again = problems[flip.stage]
    index = next(
        i for i, e in enumerate(made[0].pipeline.stages[flip.stage].entries) if e.key == flip.key
    )  # type: ignore[union-attr]
    named = [
        i for i, s in enumerate(problem.ops[index].strategies) if str(s.layouts) == flip.strategy
    ]
    other_s = min(
        evaluate(problem, (*strategies[:index], s, *strategies[index + 1 :]), again).objective_s
        for s in named
    )
    then = [other_s if number == flip.stage else time_s for number, time_s in enumerate(loads)]
    num = made[0].pipeline.num_microbatches  # type: ignore[union-attr]
    return other_s - loads[flip.stage], step_time(then, num) - step_time(loads, num)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "one stage" else pytest.mark.slow) for n in CASES]
)
def test_the_choice_of_a_stage_turns_exactly_at_the_stated_change_of_hardware(
    name: str,
) -> None:
    made = built(name)
    plan, part, options, profile = made
    assert plan.pipeline is not None
    found = all_flips(plan, part, plan.mesh, profile, options, most=16)[:3]
    assert found and {f.stage for f in found} <= set(range(len(plan.pipeline.stages)))
    for flip in found:
        for closer, dearer in (
            (0.0, True),
            (0.99, True),
            (1.01, False),
        ):  # fraction of the way to the factor
            delta_s, step_s = step_deltas(
                made, flip, parts_on(made, flip.what, flip.factor**closer)
            )
            assert (delta_s > 0) == (step_s > 0) == dearer, (flip, closer, delta_s)
            if not closer:
                assert delta_s == pytest.approx(flip.delta_s, rel=1e-6)


@pytest.mark.slow
def test_joint_decisions_of_stages_are_not_choices_of_one_stage() -> None:
    made = built("tied")
    plan, part, options, profile = made
    assert plan.pipeline is not None
    found = all_flips(plan, part, plan.mesh, profile, options, most=1000)
    for number, each in enumerate(parts_on(made)):
        assert "layers.0.up.weight" in each.shared
        for entry, source in zip(
            plan.pipeline.stages[number].entries, each.priced.sources, strict=True
        ):
            if source.crosses or "layers.0.up.weight" in source.names:
                assert not [f for f in found if (f.stage, f.key) == (number, entry.key)]


@pytest.mark.slow
def test_the_public_call_requires_the_hardware_of_the_plan_and_names_the_stage() -> None:
    plan, *_ = built("one stage")
    batch = {"x": torch.zeros(4096, 128)}
    found = autopar.flips(plan, Net(), batch, most=8)
    assert found and all(str(flip).startswith("stage 0: ") for flip in found)
    with pytest.raises(PlanError, match="not made for this profile"):
        autopar.flips(plan, Net(), batch, hardware=H100)


def test_parameter_communication_once_per_step_is_priced_on_the_changed_hardware(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = built("partial sums")
    plan, part, options, profile = made
    assert plan.pipeline is not None
    entries, looked_at = plan.pipeline.stages[0].entries, []
    monkeypatch.setattr(
        "autopar.planner.sensitivity.nearest_root", lambda delta: looked_at.append(delta.__self__)
    )
    all_flips(plan, part, plan.mesh, profile, options, most=1000)
    parameters = [local for local in looked_at if entries[local.index].kind == "parameter"]
    assert {local.what for local in parameters} >= {COMPUTE, "intra"}
    for what in {local.what for local in parameters}:
        parts = parts_on(made, what, 2.0)
        for local in (local for local in parameters if local.what == what):
            entry = entries[local.index]
            assert entry.runner_up is not None
            flip = Flip(entry.key, entry.runner_up.strategy, entry.runner_up.delta_s, what, 2.0, 0)
            assert local.delta_s(2.0) == pytest.approx(
                step_deltas(made, flip, parts)[0], rel=1e-6, abs=1e-12
            )
