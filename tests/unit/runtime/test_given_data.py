"""A program would ignore data assigned to a parameter or a gradient, so the assignment is refused.
In-place writes are allowed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

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
def test_an_assignment_to_the_data_of_a_parameter_is_refused_and_changes_nothing(
    module: Any, data: Callable[[Any], Tensor]
) -> None:
    before = module.full_state_dict()
    for of in (module, copy.deepcopy(module)):
        with pytest.raises(
            RuntimeStateError, match=r"cannot be assigned data \(p\.data = \.\.\.\)"
        ):
            of.body.weight.data = data(of.body.weight)
        for name, value in of.full_state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    module(X).backward()


def test_vector_to_parameters_is_refused(module: Any) -> None:
    values = torch.zeros(sum(p.numel() for p in module.parameters()))
    with pytest.raises(RuntimeStateError, match="cannot be assigned data"):
        nn.utils.vector_to_parameters(values, module.parameters())


def test_an_assignment_to_the_data_of_a_replaced_parameter_is_refused(module: Any) -> None:
    kept = module.body.weight
    module.body.weight = nn.Parameter(
        distribute_tensor(torch.eye(8), kept.device_mesh, kept.placements)
    )
    with pytest.raises(RuntimeStateError, match="cannot be assigned data"):
        module.body.weight.data = torch.zeros(8, 8)


def test_an_assignment_to_the_data_of_a_gradient_is_refused(module: Any) -> None:
    module(X).backward()
    gradient = module.body.weight.grad
    with pytest.raises(RuntimeStateError, match="for a gradient, assign"):
        gradient.data = gradient.data * 0
    module.body.weight.grad = gradient.data * 0
    assert module.body.weight.grad.norm().item() == 0.0


def test_a_parameter_accepts_its_own_data(module: Any) -> None:
    before = module(X).item()
    for p in module.parameters():
        p.data = p.data.contiguous()
    assert module(X).item() == before


@pytest.mark.parametrize(
    "write",
    [
        lambda g: g.data.clamp_(-0.01, 0.01),
        lambda g: g.data.zero_(),
        lambda g: g.data.mul_(0.5),
        lambda g: g.data.copy_(torch.ones(g.shape)),
        lambda g: g.data[0].zero_(),
    ],
    ids=["clamp", "zero", "mul", "copy", "row"],
)
def test_in_place_functions_of_the_data_of_gradients_change_the_step(
    module: Any, write: Callable[[Any], object]
) -> None:
    plain = Net()
    plain.load_state_dict(module.full_state_dict())
    for each in (plain, module):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        each(X).backward()
        for p in each.parameters():
            write(p.grad)
        optimizer.step()
    for name, value in module.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


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
