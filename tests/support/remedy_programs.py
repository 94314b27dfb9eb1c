"""Programs that show that a remedy works: a refused program, and the same program after following
the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from tests.support.mlp import Mlp

Forward = Callable[[Any, Tensor], Tensor]


class Program(NamedTuple):
    """A refused program, the text of its remedy, and the program that follows the remedy."""

    refused: Callable[[], object]
    says: str
    followed: Callable[[], object]


class Net(nn.Module):
    """The mean square of a linear layer applied to the result of `compute`. `state` contains
    tensors and modules that `compute` may use."""

    def __init__(self, compute: Forward, **state: Any) -> None:
        super().__init__()
        self.layer, self.compute = nn.Linear(4, 4), compute
        for name, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.compute(self, x)).square().mean()


class Called(nn.Module):
    """A model whose forward is a function of (layer, *batch)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, *batch: Any) -> Any:
        return self.function(self.layer, *batch)


def captured(model: nn.Module, *batch: Any) -> Callable[[], object]:
    """Capture a model, by default on ones of shape [8, 4]."""
    return lambda: capture(model, batch or (torch.ones(8, 4),))


def forward(compute: Forward, **state: Any) -> Callable[[], object]:
    """Capture a `Net`."""
    return captured(Net(compute, **state))


def planned(
    model: Any = None, batch: Any = None, mesh: Any = 2, **options: Any
) -> Callable[[], object]:
    """Plan a model for two CPUs, by default a small MLP with a batch of [8, 4]."""
    model = Mlp(4, 8, 2) if model is None else model
    batch = {"x": torch.ones(8, 4)} if batch is None else batch
    return lambda: autopar.plan(
        model, mesh, example_inputs=batch, **{"hardware": "cpu-gloo", **options}
    )
