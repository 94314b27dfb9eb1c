"""An argument that is not a tensor is part of a program: another value never runs that program."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.core.same_values import is_same, text_of
from autopar.errors import RuntimeStateError

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Mode(enum.Enum):
    A = 1
    B = 2


class Alias(enum.Enum):
    A = 1


class Parts(enum.Flag):
    ONE = 1
    TWO = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Batch:
    shift: Tensor
    mode: Mode


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, given: Any, mode: Mode = Mode.A) -> Tensor:
        hidden = self.layer(x).square().mean() * (1 if mode is Mode.A else 7)
        if isinstance(given, Batch):
            return (hidden + given.shift).sum() * (1 if given.mode is Mode.A else 100)
        if isinstance(given, float):
            return hidden / given
        return hidden * (1 if given in (Mode.A, Parts.ONE) else 100)


def compiled(given: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net()
    return model, autopar.compile(model, example_inputs=(X, given), hardware="cpu-gloo")


PAIRS: dict[str, tuple[Any, Any]] = {
    "enum": (Mode.A, Mode.B),
    "flag": (Parts.ONE, Parts.ONE | Parts.TWO),
    "in a dataclass": (Batch(torch.ones(4), Mode.A), Batch(torch.ones(4), Mode.B)),
    "negative zero": (0.0, -0.0),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_another_value_has_its_own_program(kind: str) -> None:
    first, second = PAIRS[kind]
    model, module = compiled(first)
    for given in (second, first, second):
        assert module(X, given).item() == model(X, given).item()
    assert len(module.variants.known) == 1


def test_a_default_that_is_an_enum_member_uses_the_same_program() -> None:
    model, module = compiled(Mode.A)
    assert module(X, Mode.A, Mode.A).item() == module(X, Mode.A).item()
    assert not module.variants.known
    assert module(X, Mode.A, mode=Mode.B).item() == model(X, Mode.A, mode=Mode.B).item()


def test_another_object_of_a_class_without_a_known_equality_is_refused() -> None:
    given = torch.Generator()
    model, module = compiled(given)
    assert module(X, given).item() == model(X, given).item()
    says = r"argument '1' is Generator, but the program was compiled for another object"
    with pytest.raises(RuntimeStateError, match=says):
        module(X, torch.Generator())
    assert not module.variants.known


def test_numbers_are_compared_by_type_and_bits_and_enum_members_by_identity() -> None:
    for value in (math.nan, -0.0, complex(0.0, -0.0), complex(math.nan, 1.0), "a", 1 << 70):
        assert is_same(value, type(value)(value))
    different = [
        (0.0, -0.0),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        (math.nan, -math.nan),
        (1, True),
        (1, 1.0),
        (1, Level.LOW),
        (Mode.A, Mode.B),
        (Mode.A, Alias.A),
        (Parts.ONE, Parts.ONE | Parts.TWO),
        (torch.Generator(), torch.Generator()),
    ]
    for left, right in different:
        assert not is_same(left, right)
        assert not is_same(right, left)
    texts = [text_of(each) for each in (Mode.A, Mode.B, Parts.ONE | Parts.TWO, Parts(0), Level.LOW)]
    assert texts == ["Mode.A", "Mode.B", "Parts.ONE|TWO", "Parts.0", "Level.LOW"]
