"""Functions and classes of a model do not keep it alive after it is compiled, and run the modules
of a copy."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import autopar
from autopar.runtime.closures import Rebound, rebind_copy

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


@pytest.fixture(autouse=True, scope="module")
def captures() -> Iterator[None]:
    """Trace every model, since captures that tests share keep the classes of models alive."""
    yield


class Own(nn.Module):
    """A model with functions over itself, in an attribute and in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.apply_layer = lambda x: self.layer(x)
        self.steps = [lambda x: self.apply_layer(x)]
        self.named = {"step": lambda x: self.layer(x)}

    def forward(self, x: Tensor) -> Tensor:
        return (self.steps[0](x) + self.named["step"](x)).square().mean()


def parametrized(how: Callable[..., nn.Module]) -> nn.Module:
    return nn.Sequential(how(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: parametrized(parametrizations.weight_norm),
    "spectral norm": lambda: parametrized(parametrizations.spectral_norm),
    "weight norm of the whole model": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "own functions": Own,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
def test_the_plain_model_is_not_kept_alive(make: Callable[[], nn.Module]) -> None:
    plain = make()
    weights = {name: weakref.ref(p) for name, p in plain.named_parameters()}
    module = autopar.compile(plain, example_inputs=(X,), hardware="cpu-gloo")
    del plain
    gc.collect()
    assert [name for name, weight in weights.items() if weight() is not None] == []
    assert isinstance(module(X), Tensor)


@pytest.mark.parametrize("name", ["weight norm", "own functions"])
def test_a_program_for_another_batch_reads_the_parameters_of_the_compiled_module(name: str) -> None:
    torch.manual_seed(0)
    plain = MODELS[name]()
    other = copy.deepcopy(plain)
    for p in other.parameters():
        p.data.mul_(2.0)
    module: Any = autopar.compile(plain, example_inputs=(X,), hardware="cpu-gloo")
    module.load_state_dict(other.state_dict())
    plain.load_state_dict(other.state_dict())
    del other
    for x in (X, X[:2]):
        torch.testing.assert_close(module(x), plain(x))


def test_a_rebound_copy_runs_its_own_modules() -> None:
    plain, memo = Own(), dict[int, Any]()
    copied = copy.deepcopy(plain, memo)
    rebind_copy(plain, copied, memo)
    with torch.no_grad():
        copied.layer.weight.zero_(), copied.layer.bias.zero_()
    assert copied(X).item() == 0.0 != plain(X).item()


def test_a_rebound_class_keeps_super_and_recursion() -> None:
    part = nn.Linear(4, 4)

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part

        @property
        def used(self) -> Any:
            return part

        @staticmethod
        def helper() -> Any:
            return part

        def extra_repr(self) -> str:
            return super().extra_repr() + "own"

    def countdown(number: int) -> Any:
        return countdown(number - 1) if number else part

    model, other = Local(), object()
    rebound = Rebound(model)
    cls: Any = rebound.class_of(model)
    again = rebound.function(countdown)
    rebound.fill(lambda module: other if module is part else module)
    model.__class__ = cls
    assert cls is not Local and cls is rebound.class_of(model) and repr(cls) == repr(Local)
    assert model.used is other is model.helper() is again(3)
    assert countdown(3) is part and model.extra_repr() == "own"


def test_functions_and_classes_without_modules_are_not_copied() -> None:
    scale = 2.0
    model = Own()

    def double(x: Tensor) -> Tensor:
        return x * scale

    rebound = Rebound(model)
    assert rebound.function(double) is double and rebound.function(len) is len
    assert rebound.class_of(model) is Own
