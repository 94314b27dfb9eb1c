"""The root model may read tensors in class attributes, and in closures and defaults of its
methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import RuntimeStateError

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


class Net(nn.Module):
    """A model whose method scales its input; the root holds a parameter and a buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.ones(8)), nn.Buffer(torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        return self.scaled(x * self.weight + self.shift).square().mean()

    def scaled(self, x: Tensor) -> Any:
        raise NotImplementedError


def of_class(table: Tensor) -> Net:
    class Of(Net):
        held = table

        def scaled(self, x: Tensor) -> Tensor:
            return x * self.held

    return Of()


def of_closure(table: Tensor) -> Net:
    class Of(Net):
        def scaled(self, x: Tensor) -> Tensor:
            return x * table

    return Of()


def of_inherited_closure(table: Tensor) -> Net:
    made: Net = type("Derived", (type(of_closure(table)),), {})()
    return made


def of_default(table: Tensor) -> Net:
    class Of(Net):
        def scaled(self, x: Tensor, held: Tensor = table) -> Tensor:
            return x * held

    return Of()


def of_static_method(table: Tensor) -> Net:
    class Of(Net):
        @staticmethod
        def double(x: Tensor) -> Tensor:
            return 2 * x * table

        def scaled(self, x: Tensor) -> Tensor:
            return self.double(x)

    return Of()


WATCHED = (of_class, of_closure, of_inherited_closure)


@pytest.mark.parametrize("make", [*WATCHED, of_default, of_static_method])
def test_tensors_of_the_roots_class_are_constants(make: Callable[[Tensor], Net]) -> None:
    table = torch.arange(8.0)
    model = make(table)
    module: Any = autopar.compile(model, example_inputs=(X,), hardware="cpu-gloo")
    plain = make(table)
    wanted, found = plain(X), module(X)
    torch.testing.assert_close(found, wanted)
    wanted.backward()
    found.backward()
    torch.testing.assert_close(module.weight.grad.full_tensor(), plain.weight.grad)
    if make in WATCHED:
        table.add_(1)
        with pytest.raises(RuntimeStateError, match="was written since the model was captured"):
            module(X)


def test_attributes_that_forward_sets_are_not_set_on_the_model() -> None:
    class Counting(nn.Module):
        table = torch.arange(8.0)

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.seen = self.layer(x) * self.table
            return hidden.mean()

    model = Counting()
    autopar.plan(model, 2, example_inputs=(X,), hardware="cpu-gloo")
    assert model.seen is None
