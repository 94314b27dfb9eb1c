"""Closure variables of layers are constants of the program, also for folded layers that were not
captured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from same_trace import assert_same_trace
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.trace import OutsideValue
from autopar.errors import RuntimeStateError

N = 10
X = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


def scaled(scale: float) -> Any:
    def activation(x: Tensor) -> Tensor:
        return torch.tanh(x) * scale

    def set_scale(value: float) -> None:
        nonlocal scale
        scale = value

    activation.set_scale = set_scale  # type: ignore[attr-defined]
    return activation


def around(inner: Callable[[Tensor], Tensor], sign: float) -> Callable[[Tensor], Tensor]:
    return lambda x: inner(x) * sign


def shifted(x: Tensor, by: Callable[[Tensor], Tensor]) -> Tensor:
    return x + by(x)


class Layer(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), held

    def forward(self, x: Tensor) -> Tensor:
        held = (
            self.held[0]
            if isinstance(self.held, list)
            else self.held["f"]
            if isinstance(self.held, dict)
            else self.held
        )
        return x + held(self.linear(x))


class Stack(nn.Module):
    def __init__(self, held: Callable[[int], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(held(position)) for position in range(N))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


SHARED = scaled(2.0)
HELD: dict[str, Callable[[int], Any]] = {
    "a function": lambda _: scaled(2.0),
    "in a list": lambda _: [scaled(2.0)],
    "in a dict": lambda _: {"f": scaled(2.0)},
    "of a function in a closure": lambda _: around(scaled(2.0), -1.0),
    "of an argument": lambda _: functools.partial(shifted, by=scaled(2.0)),
    "two in turn": lambda position: scaled(2.0 + position % 2),
    "one of all": lambda _: SHARED,
}


def _variables(model: nn.Module, *, fold: bool) -> set[tuple[Any, ...]]:
    trace = capture(model, (X,), fold=fold)
    assert bool(trace.folding.runs) == fold, trace.folding
    return {
        (each.name, id(each.holder), each.steps, each.value)
        for each in trace.attributes
        if isinstance(each, OutsideValue)
    }


@pytest.mark.parametrize("how", HELD)
def test_folded_layers_have_the_closure_variables_of_a_full_capture(how: str) -> None:
    model = Stack(HELD[how])
    found = _variables(model, fold=True)
    assert found == _variables(model, fold=False)
    assert len(found) == {"one of all": 1, "of a function in a closure": 3 * N}.get(how, N)


@pytest.mark.parametrize("position", [0, 4, N - 1])
def test_a_changed_closure_variable_of_any_layer_is_refused(position: int) -> None:
    model = Stack(lambda _: scaled(2.0))
    module: Any = autopar.compile(model, example_inputs=(X,), hardware="cpu-gloo")
    module(X)
    held: Any = model.layers[position].held
    held.set_scale(3.0)
    with pytest.raises(
        RuntimeStateError,
        match=r"variable scale around scaled\.<locals>\.activation is 3\.0, but was 2\.0",
    ):
        module(X)
    held.set_scale(2.0)
    assert module(X).item() == pytest.approx(model(X).item(), rel=1e-6)


def test_closure_tensors_with_the_same_name_are_watched_separately() -> None:
    """The layers are not folded, because each has its own tensor."""

    def made(weight: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: x * weight

    weights = [torch.full((4,), 0.5) for _ in range(3)]
    model = nn.Sequential(*(Layer(made(weight)) for weight in weights))
    module: Any = autopar.compile(model, example_inputs=(X,), hardware="cpu-gloo")
    module(X)
    weights[0].mul_(2.0)
    with pytest.raises(RuntimeStateError, match=r"variable weight around .* was written since"):
        module(X)


class Processor:
    """An object without attributes in each layer, as in the attention of diffusers."""

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * getattr(self, "scale", 2.0)


class Slotted:
    __slots__ = ("__dict__", "scale")

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale


def test_layers_with_objects_without_attributes_are_folded() -> None:
    model = Stack(lambda _: Processor())
    folded = capture(model, (X,))
    assert "10 layers" in str(folded.folding)
    assert_same_trace(folded, capture(model, (X,), fold=False))


def test_layers_with_objects_that_have_attributes_or_slots_are_not_folded() -> None:
    def with_scale(position: int) -> Processor:
        processor = Processor()
        processor.scale = 1.0 + position  # type: ignore[attr-defined]
        return processor

    for held in (with_scale, lambda position: Slotted(1.0 + position)):
        assert "differ in 'held'" in str(capture(Stack(held), (X,)).folding)


class Delegating(Stack):
    """A model with a custom ``__getattr__``, as the models of diffusers have."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


def test_a_model_with_a_custom_getattr_is_folded() -> None:
    model = Delegating(lambda _: Processor())
    folded = capture(model, (X,))
    assert "10 layers" in str(folded.folding)
    assert_same_trace(folded, capture(model, (X,), fold=False))
    modules = {node.meta["module"] for node in folded.graph.nodes if "module" in node.meta}
    assert "layers.0.linear" in modules
    assert not any("_modules" in module for module in modules)
