"""Hooks on parameters are called as on those of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar

BATCH = {"x": torch.linspace(-1.0, 1.0, 32).reshape(4, 8)}


class Net(nn.Module):
    """A model with a parameter that does not affect the loss, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return hidden.square().mean(), self.head(hidden)


def register_on_gradients(model: nn.Module, called: list[str]) -> None:
    for name, parameter in model.named_parameters():

        def note(gradient: Tensor, name: str = name) -> Tensor:
            called.append(name)
            return gradient * 0.5

        parameter.register_hook(note)


def register_after_accumulation(model: nn.Module, called: list[str]) -> None:
    """Step inside backward, and free the gradient."""
    for name, parameter in model.named_parameters():

        def note(parameter: Tensor, name: str = name) -> None:
            called.append(name)
            assert parameter.grad is not None
            with torch.no_grad():
                parameter.add_(parameter.grad, alpha=-0.5)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(note)


@pytest.mark.parametrize("register", [register_on_gradients, register_after_accumulation])
@pytest.mark.parametrize("num", [1, 2])
def test_hooks_of_parameters_without_a_gradient_are_not_called(
    num: int, register: Callable[[nn.Module, list[str]], None]
) -> None:
    torch.manual_seed(0)
    plain = Net()
    options: dict[str, Any] = {"num_microbatches": num, "outputs": "full"}
    module = autopar.compile(
        copy.deepcopy(plain), example_inputs=BATCH, hardware="cpu-gloo", **options
    )
    called: dict[str, list[str]] = {"plain": [], "compiled": []}
    register(plain, called["plain"])
    register(module, called["compiled"])
    for model in (plain, module):
        for _ in range(2):
            model(**BATCH)[0].backward()
    assert sorted(called["compiled"]) == sorted(called["plain"]) != []
    assert not any("unused" in name or "head" in name for name in called["compiled"])
    found = module.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value)
    for name, parameter in plain.named_parameters():
        gradient = module.get_parameter(name).grad
        assert (gradient is None) == (parameter.grad is None)
        if gradient is not None:
            torch.testing.assert_close(gradient.full_tensor(), parameter.grad)
