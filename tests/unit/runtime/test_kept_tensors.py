"""Parameters and buffers of a compiled module cannot be removed or untied."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import RuntimeStateError

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
        self.inner[0].weight = self.first.weight
        self.register_buffer("shift", torch.ones(4))
        self.inner.register_buffer("again", self.shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(self.first(x)) * self.shift + self.inner.again).square().mean()


@pytest.mark.parametrize("change", ["weight_norm", "spectral_norm", "del", "pop", "clear"])
def test_a_refused_removal_of_a_parameter_changes_nothing(change: str) -> None:
    changes: dict[str, Callable[[Any], Any]] = {
        "weight_norm": torch.nn.utils.weight_norm,  # removes the parameter from the dict itself
        "spectral_norm": torch.nn.utils.spectral_norm,
        "del": lambda part: part._parameters.__delitem__("weight"),
        "pop": lambda part: part._parameters.pop("weight"),
        "clear": lambda part: part._parameters.clear(),
    }
    torch.manual_seed(0)
    model = Tied()
    module: Any = autopar.compile(model, example_inputs=(X,), hardware="cpu-gloo")
    before, names = module(X).item(), list(module.state_dict())
    with warnings.catch_warnings(), pytest.raises(RuntimeStateError, match="cannot be removed"):
        warnings.simplefilter("ignore")
        changes[change](module.first)
    assert list(module.state_dict()) == names
    for each in (module, copy.deepcopy(module)):
        assert each(X).item() == before
    assert module.first._parameters.pop("absent", None) is None


def test_a_tied_tensor_cannot_be_replaced_under_one_of_its_names() -> None:
    torch.manual_seed(0)
    module: Any = autopar.compile(Tied(), example_inputs=(X,), hardware="cpu-gloo")
    before = module(X).item()
    for part, name, other in (
        (module.inner[0], "weight", "first.weight"),
        (module.first, "weight", "inner.0.weight"),
        (module, "shift", "inner.again"),
        (module.inner, "again", "shift"),
    ):
        held = getattr(part, name)
        value = held.detach().clone()
        value = nn.Parameter(value) if isinstance(held, nn.Parameter) else value
        with pytest.raises(RuntimeStateError, match=f"is the same tensor as '{other}'"):
            setattr(part, name, value)
        with pytest.raises(RuntimeStateError, match="cannot be removed"):
            delattr(part, name)
        setattr(part, name, held)  # as tie_weights does
        assert module(X).item() == before
    held = module.inner[0].weight
    module.inner[0]._parameters["weight"] = nn.Parameter(held.detach().clone())
    with pytest.raises(RuntimeStateError, match=r"'inner\.0\.weight' was replaced, but"):
        module(X)
    module.inner[0]._parameters["weight"] = held
    with torch.no_grad():
        held.mul_(2.0)
    plain = Tied()
    plain.load_state_dict(module.full_state_dict())
    assert module(X).item() == pytest.approx(plain(X).item())
