"""Kernels of several equal or summed products: the product that a plan names, and claims that a
single product must not make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.planning import plan_model
from autopar.api.what_if import what_if
from autopar.constraints import pipeline
from autopar.plans import Communication, Plan
from tests.laws.test_kernel_plans import LINE, SLOW, UNEVEN, kernels, overlapping, sums

BATCH = (4, 24, 32)


def linear(ins: int, outs: int) -> nn.Linear:
    return nn.Linear(ins, outs, bias=False)


class Heads(nn.Module):
    """Parallel products with the same name, whose results are added."""

    def __init__(
        self, widths: Sequence[int], join: Callable[[list[Tensor], Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.first, self.join = linear(32, 32), join
        self.up, self.down = (
            nn.ModuleList(pair)
            for pair in zip(*((linear(32, n), linear(n, 32)) for n in widths), strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return (
            self.join([down(up(h).relu()) for up, down in zip(self.up, self.down, strict=True)], x)
            .square()
            .mean()
        )


def in_a_row(parts: list[Tensor], x: Tensor) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.relu() * x


def in_pairs(parts: list[Tensor], _: Tensor) -> Tensor:
    return (parts[0] + parts[1]).relu() * (parts[0] + parts[2]).sigmoid()


class Blocks(nn.Module):
    """Layers, the last of which may be wider. Each layer adds two products of its input."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        names = ("up", "gate"), ("down", "back")
        made = (
            {**{n: linear(32, k) for n in names[0]}, **{n: linear(k, 32) for n in names[1]}}
            for k in widths
        )
        self.layers = nn.ModuleList([nn.ModuleDict(each) for each in made])

    def forward(self, x: Tensor) -> Tensor:
        for f in self.layers:
            h = x.tanh()
            x = (f["down"](f["gate"](h).relu()) + f["back"](f["up"](h).relu())).relu() + x
        return x.square().mean()


CASES: dict[str, Callable[[], nn.Module]] = {
    "alike, in a row": lambda: Heads((64, 64), in_a_row),
    "of two widths": lambda: Heads((64, 128), in_a_row),
    "the wide one first": lambda: Heads((128, 64), in_a_row),
    "widths mixed": lambda: Heads((64, 128, 64), in_a_row),
    "one added twice": lambda: Heads((64, 64, 64), in_pairs),
    "layers": lambda: Blocks((64, 64)),
    "unlike layers": lambda: Blocks((64, 96)),
}


@cache
def made(
    case: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[Plan, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = CASES[case]().to(dtype), {"x": torch.randn(BATCH, dtype=dtype)}
    return plan_model(model, LINE, example_inputs=batch, hardware=SLOW)[1].plan, model, batch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_a_plan_names_the_product_of_a_kernel(case: str, dtype: torch.dtype) -> None:
    """The savings are those of the named product: the plan is certified, priced the same again, and
    correct."""
    plan, model, batch = made(case, dtype)
    assert kernels(plan) or dtype == torch.float64, (
        "what is twice as wide is sometimes better not moved at all"
    )
    found = autopar.check(plan, model, batch, hardware=SLOW)
    assert found.ok, str(found)
    assert what_if(plan, model, batch, hardware=SLOW).step_s == pytest.approx(
        plan.prediction.step_s
    )
    assert autopar.verify(plan, model, batch).ok


def test_some_of_these_plans_scatter_sums() -> None:
    assert any(sums(c) for case in CASES for c in kernels(made(case)[0]))


@pytest.mark.slow
def test_only_sums_in_backward_are_scattered_by_their_products() -> None:
    """Sums in forward may be recomputed from a product that would have to be kept. A plan that does
    so on three devices is emitted."""
    torch.manual_seed(0)
    model, batch = Blocks((48,)).bfloat16(), {"x": torch.randn(3, 8, 32, dtype=torch.bfloat16)}
    slow = overlapping(link_bytes_per_s=1e7, slowdown=0.0)
    plan = plan_model(model, UNEVEN, example_inputs=batch, hardware=slow)[1].plan

    def apart(c: Communication) -> bool:
        return c.phase == "backward" and c.kernel is not None and not c.kernel.again

    assert all(apart(c) for c in kernels(plan) if sums(c))
    assert (
        autopar.check(plan, model, batch, hardware=slow).ok
        and autopar.verify(plan, model, batch).ok
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("widths", [(64, 64), (64, 128), (64, 64, 128)])
def test_the_bound_over_cuts_includes_the_kernels_of_every_stage(
    widths: tuple[int, ...], schedule: str
) -> None:
    """If layers differ, the sums of the full model contain products of several kinds, and the sums
    of a stage contain one kind."""
    torch.manual_seed(0)
    model, batch = Blocks(widths).bfloat16(), {"x": torch.randn(BATCH, dtype=torch.bfloat16)}
    wish = pipeline("stage", microbatches=2, schedule=schedule)
    mesh = autopar.Mesh({"stage": 2, "gpu": 2})
    plan = plan_model(model, mesh, example_inputs=batch, hardware=SLOW, constraints=(wish,))[1].plan
    assert plan.pipeline is not None and any(kernels(stage) for stage in plan.pipeline.stages)
    found = autopar.check(plan, model, batch, hardware=SLOW)
    assert found.ok, str(found)
