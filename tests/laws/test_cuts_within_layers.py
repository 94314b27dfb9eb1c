"""A model with fewer layers than stages is cut within its layers. A model that cannot be cut is
refused with a remedy that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.capture import capture
from autopar.errors import ConstraintError
from autopar.stages import cut_points


class Flat(nn.Module):
    """A model without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(32, 32) * 0.1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + torch.tanh(x @ weight)
        return x.square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


class OneList(nn.Module):
    """A model whose only child is a list with one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(Block(), Block())])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x).square().mean()  # type: ignore[no-any-return]


class Deep(nn.Module):
    """Blocks in a dict with names as keys, two levels below the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"trunk": nn.ModuleDict({name: Block() for name in "qwer"})})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.net["trunk"].values():  # type: ignore[operator, union-attr]
            x = block(x)
        return x.square().mean()


class OneLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()  # type: ignore[no-any-return]


X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))


def plan(model: nn.Module, **settings: Any) -> autopar.Plan:
    wish = [autopar.constraints.pipeline(**settings)] if settings else []
    return autopar.plan(model, 2, example_inputs=(X,), hardware="h100-sxm", constraints=wish)


@pytest.mark.parametrize("build", [Flat, OneList, Deep])
def test_stages_within_layers_equal_the_plain_model(build: type[nn.Module]) -> None:
    made = plan(build(), microbatches=2, schedule="1f1b")
    assert made.pipeline is not None and len(made.pipeline.stages) == 2
    report = autopar.verify(made, build(), (X,))
    assert report.ok, str(report)


def test_units_are_as_coarse_as_the_number_of_stages_allows() -> None:
    trace = capture(Deep(), (X,))
    assert [point.module for point in cut_points(trace, 3)] == [
        f"net.trunk.{name}" for name in "wer"
    ]
    assert "net.trunk.q.up" in {point.module for point in cut_points(trace, 4)}
    assert len(cut_points(trace, 100)) >= 11


def test_a_model_with_one_op_with_parameters_is_refused_and_the_remedy_works() -> None:
    with pytest.raises(ConstraintError, match="1 parts") as refusal:
        plan(OneLinear(), microbatches=2)
    assert "remove constraints.pipeline()" in refusal.value.remedy
    assert autopar.verify(plan(OneLinear()), OneLinear(), (X,)).ok
