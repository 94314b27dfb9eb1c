"""Programs that show that a remedy helps: what is refused, and the same changed as the remedy
says."""

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
    """What is refused, what the remedy says, and what helps."""

    refused: Callable[[], object]
    says: str
    followed: Callable[[], object]


class Net(nn.Module):
    """The mean square of what `compute` makes of a linear layer; `state` is tensors and modules
    that it may use."""

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
    """The capture of a model, on [8, 4] ones where no batch is given."""
    return lambda: capture(model, batch or (torch.ones(8, 4),))


def forward(compute: Forward, **state: Any) -> Callable[[], object]:
    """The capture of a `Net`."""
    return captured(Net(compute, **state))


def planned(
    model: Any = None, batch: Any = None, mesh: Any = 2, **options: Any
) -> Callable[[], object]:
    """The plan of a model for two CPUs; by default of a small MLP on a batch of [8, 4]."""
    model = Mlp(4, 8, 2) if model is None else model
    batch = {"x": torch.ones(8, 4)} if batch is None else batch
    return lambda: autopar.plan(
        model, mesh, example_inputs=batch, **{"hardware": "cpu-gloo", **options}
    )
