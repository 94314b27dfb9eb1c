"""The factor at which a runner-up becomes better: at the factor both cost the same, and before it
the chosen strategy is better. A factor of 1 changes nothing."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.api.planning import plan_model
from autopar.capture import Trace
from autopar.constraints import ddp, pipeline
from autopar.core.collective import faster
from autopar.core.hardware import HardwareProfile
from autopar.core.problem import Problem
from autopar.cost.priced import Priced
from autopar.planner import PlanOptions
from autopar.planner.reprice import decisions, problems_of
from autopar.planner.sensitivity import flips, nearest_root
from autopar.plans import COMPUTE, NO_CHOICE, NO_FLIP, NO_OTHER, Flip, Flips, Plan
from autopar.solve import evaluate


class Net(torch.nn.Module):
    """A model with two linear layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 512), torch.nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (x + self.down(torch.relu(self.up(x)))).pow(2).mean()
        return loss


PROFILE = HardwareProfile.load("h100-sxm")
OPTIONS = PlanOptions()


def priced_for(plan: Plan, trace: Trace, profile: HardwareProfile) -> Priced:
    """Return the problem of a plan without stages."""
    return next(problems_of(plan, trace, MESH, profile, OPTIONS)).priced


MESH = autopar.Mesh({"node": 2, "gpu": 2})


@pytest.mark.slow
def test_at_its_factor_a_runner_up_costs_as_much_as_the_chosen_strategy() -> None:
    batch = {"x": torch.randn(4096, 128)}
    trace, planned = plan_model(Net(), MESH, example_inputs=batch, hardware=PROFILE)
    plan = planned.plan
    found = flips(plan, trace, priced_for(plan, trace, PROFILE), MESH, PROFILE, most=50)
    assert COMPUTE in {flip.what for flip in found} and {"intra", "inter"} & {
        flip.what for flip in found
    }
    assert [abs(math.log(f.factor)) for f in found] == sorted(
        abs(math.log(f.factor)) for f in found
    )
    for flip in found:
        index = next(i for i, e in enumerate(plan.entries) if e.key == flip.key)
        for closer, dearer in (
            (0.0, True),
            (0.99, True),
            (1.01, False),
        ):  # fraction of the way to the factor
            priced = changed(plan, trace, flip.what, flip.factor**closer)
            delta_s = whole_delta(priced.problem, *decisions(priced, plan), index, flip.strategy)
            assert (delta_s > 0) == dearer
            if not closer:
                assert delta_s == pytest.approx(flip.delta_s, rel=1e-6)


def changed(plan: Plan, trace: Trace, what: str, factor: float) -> Priced:
    """Return the full problem on hardware on which `what` is faster by a factor."""
    if what != COMPUTE:
        links = {**PROFILE.links, what: faster(PROFILE.links[what], factor - 1)}
        return priced_for(plan, trace, replace(PROFILE, links=links))
    priced = priced_for(plan, trace, PROFILE)
    ops = [
        replace(op, strategies=tuple(replace(s, time_s=s.time_s / factor) for s in op.strategies))
        for op in priced.problem.ops
    ]
    return replace(priced, problem=replace(priced.problem, ops=tuple(ops)))


def whole_delta(
    problem: Problem, strategies: tuple[int, ...], again: dict[int, int], index: int, other: str
) -> float:
    """Return the change of the full step with the strategy `other` for one op."""
    now = evaluate(problem, strategies, again).objective_s
    named = [i for i, s in enumerate(problem.ops[index].strategies) if str(s.layouts) == other]
    return (
        min(
            evaluate(problem, (*strategies[:index], s, *strategies[index + 1 :]), again).objective_s
            for s in named
        )
        - now
    )


def test_what_if_lists_the_closest_choices() -> None:
    batch = {"x": torch.randn(4096, 128)}
    plan = autopar.plan(Net(), MESH, example_inputs=batch, hardware=PROFILE)
    found = autopar.what_if(plan, Net(), batch, hardware=PROFILE, num_flips=5)
    assert 0 < len(found.flips) <= 5
    runner_up = {e.key: e.runner_up for e in plan.entries}
    for flip in found.flips:
        other = runner_up[flip.key]
        assert other is not None and (flip.strategy, flip.delta_s) == (
            other.strategy,
            other.delta_s,
        )
        assert str(flip) in str(found)


@given(st.floats(0.02, 50.0), st.sampled_from([1, -1]))
def test_the_nearest_root_is_found_on_either_side(root: float, sign: int) -> None:
    found = nearest_root(lambda factor: sign * (factor - root)) if sign * (1 - root) > 0 else None
    if sign * (1 - root) > 1e-9:
        assert found == pytest.approx(root, rel=1e-3)


def test_no_root_is_found_without_a_change_of_sign() -> None:
    assert nearest_root(lambda factor: factor) is None


def test_if_no_choice_turns_the_reason_is_returned() -> None:
    model, batch = Net(), {"x": torch.randn(64, 128)}
    for mesh, forced, why in (
        (autopar.Mesh({"stage": 2}), [pipeline("stage", microbatches=2)], NO_CHOICE),
        (MESH, [ddp()], NO_FLIP),
        (autopar.Mesh(1), [], NO_OTHER),
    ):
        plan = autopar.plan(
            model, mesh, example_inputs=batch, hardware="cpu-gloo", constraints=forced
        )
        found = autopar.flips(plan, model, batch)
        assert found == () and found.why == str(found) == why and why in repr(found)
        assert pickle.loads(pickle.dumps(found)).why == why
        assert why in str(autopar.what_if(plan, model, batch, num_flips=5))
    some = Flips([Flip("up", "R -> R", 1.0, COMPUTE, 2.0)], NO_FLIP)
    assert (
        not some.why
        and str(some) == "up would change to R -> R from 2 times the speed of compute on"
        and some == tuple(some)
    )
