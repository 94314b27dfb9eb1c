"""The bound under a budget is not higher than any plan that fits, and such plans are found.

Plans under decreasing budgets are emitted and their peaks are measured. The peak of each plan is
then used as a budget.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import zoo_small
from torch import nn

from autopar.capture import Trace, capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.errors import InfeasibleError
from autopar.planner import PlanOptions, make_plan
from autopar.plans import Plan

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6)  # shares of the peak of a plan without a budget
GAP = 1e-3
KINDS = ("gpt2", "llama", "bert", "vit")
Body = Callable[[nn.Linear, Any], Any]


def _halves(up: nn.Linear, x: Any) -> Any:
    return torch.tanh(up(torch.cat([x[0].sin(), x[1]], -1) if isinstance(x, tuple) else x)).chunk(
        2, -1
    )


def _parts(up: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    first, second = torch.tanh(up(x)).chunk(2, -1)
    return torch.cat([first * second, first + second.sin()], -1)


def _turned(up: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    turned = torch.tanh(up(x)).transpose(1, 2)
    return turned * turned.sin()


# Backward keeps a result of a layer and a view of it, which share memory.
BODIES: dict[str, Body] = {
    "ends with a view": lambda up, x: torch.tanh(up(x)).transpose(-1, -2),
    "ends with two views": _halves,
    "reads a view": lambda up, x: torch.nn.functional.gelu(torch.sigmoid(up(x)).transpose(1, 2)),
    "reads a view twice": _turned,
    "reads views of parts": _parts,
}
LONG = (("bert", 1), ("vit", 1), *((kind, 2) for kind in KINDS))
CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] * (case in LONG))
    for case in [*((kind, 1) for kind in (*BODIES, *KINDS)), *LONG[2:]]
]


class Layer(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up, self.body = nn.Linear(64, 64), body

    def forward(self, x: Any) -> Any:
        return self.body(self.up, x)


class Layers(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(body) for _ in range(3))

    def forward(self, x: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return sum(each.square().sum() for each in (x if isinstance(x, tuple) else (x,)))


def built(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    if kind in BODIES:
        return Layers(BODIES[kind]), {"x": torch.ones(32, 64, 64)}
    model, batch = getattr(zoo_small, kind)()
    return model, {
        name: torch.cat([x] * 8) for name, x in batch.items()
    }  # activations are larger than parameters


@cache
def traced(kind: str) -> Trace:
    model, batch = built(kind)
    return capture(model, (), batch)


def planned(trace: Trace, mesh: int, budget: int | None) -> Plan:
    options = PlanOptions(memory_bytes=budget, optimizer="sgd", gap=GAP, loss_rows=0)
    return make_plan(trace, Mesh(mesh), HardwareProfile.load("h100-sxm"), options).plan


def ladder(trace: Trace, mesh: int) -> list[Plan]:
    """Return plans under decreasing memory budgets."""
    plans = [planned(trace, mesh, None)]
    for share in SHARES:
        try:
            plans.append(planned(trace, mesh, int(share * plans[0].prediction.peak_bytes)))
        except InfeasibleError:
            break
    return plans


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_no_plan_is_below_the_bound_of_a_budget_that_it_fits(kind: str, mesh: int) -> None:
    trace = traced(kind)
    plans = ladder(trace, mesh)
    assert len({plan.prediction.peak_bytes for plan in plans}) > (0 if kind in BODIES else 2), (
        "memory binds"
    )
    for plan in plans:
        again = planned(trace, mesh, plan.prediction.peak_bytes)
        assert again.proof.bound_s <= plan.proof.objective_s * (1 + 1e-9), (
            "a bound above a plan that fits is none"
        )


@pytest.mark.parametrize(
    ("kind", "what", "mutant"),
    [
        (
            "bert",
            "autopar.sharding.clusters.Storages.are_full",
            lambda self, refs: False,
        ),  # the result of attention and a view of it
        ("reads a view", "autopar.sharding.clusters.Storages.are_full", lambda self, refs: False),
        (
            "ends with a view",
            "autopar.cost.tensor_values._is_view",
            lambda cluster: False,
        ),  # the result of a layer and its base tensor are both kept
    ],
)
def test_counting_shared_memory_twice_gives_a_bound_that_is_too_high(
    kind: str, what: str, mutant: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = ladder(traced(kind), 1)
    monkeypatch.setattr(what, mutant)
    model, batch = built(kind)
    trace = capture(model, (), batch)  # classes are cached by trace
    assert any(is_refused(trace, plan) for plan in plans)


def is_refused(trace: Trace, plan: Plan) -> bool:
    """Return whether the bound excludes a plan as fast as this one under its own peak."""
    try:
        return planned(
            trace, 1, plan.prediction.peak_bytes
        ).proof.bound_s > plan.proof.objective_s * (1 + 1e-9)
    except InfeasibleError:
        return True
