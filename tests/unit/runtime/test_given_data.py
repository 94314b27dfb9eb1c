"""A program would ignore data assigned to a parameter, so the assignment is refused. In-place
writes are allowed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import RuntimeStateError

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).pow(2).mean()


@pytest.fixture
def module() -> Any:
    torch.manual_seed(0)
    return autopar.compile(Net(), example_inputs=(X,), hardware="cpu-gloo")


@pytest.mark.parametrize(
    "data", [lambda p: torch.eye(8), lambda p: p.data * 0.5], ids=["plain", "distributed"]
)
def test_a_parameter_with_assigned_data_is_refused_at_the_next_call(
    module: Any, data: Callable[[Any], Tensor]
) -> None:
    module(X).backward()
    module.body.weight.data = data(module.body.weight)
    with pytest.raises(
        RuntimeStateError, match=r"'body\.weight' was assigned data \(p\.data = \.\.\.\)"
    ):
        module(X)
    with pytest.raises(RuntimeStateError, match="was assigned data"), torch.no_grad():
        module(X)


@pytest.mark.parametrize("calls", [(X[:2],), (X[:2], X)], ids=["another shape", "both shapes"])
def test_assigned_data_is_refused_if_the_next_call_needs_another_program(
    module: Any, calls: tuple[Tensor, ...]
) -> None:
    module(X)
    module.body.weight.data = torch.eye(8)
    for x in calls:
        with pytest.raises(RuntimeStateError, match=r"'body\.weight' was assigned data"):
            module(x)
    module.eval()
    with pytest.raises(RuntimeStateError, match="was assigned data"), torch.no_grad():
        module(X)


def test_in_place_writes_to_parameters_are_allowed(module: Any) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    before = module(X)
    before.backward()
    optimizer.step()
    after = module(X)
    assert after.item() != before.item()
    with torch.no_grad():
        module.body.weight.mul_(0.5)
    module.body.weight.data.mul_(2.0)
    module.float()
    assert module(X).item() == pytest.approx(after.item())
    module.load_state_dict(Net().state_dict())
    copied = copy.deepcopy(module)
    assert copied(X).item() == module(X).item()
