"""A compiled model whose class is a container is indexed and iterated over like the plain model."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import RuntimeStateError
from autopar.runtime.module import ParallelModule

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Listed(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Named(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        return self["out"](self["first"](x))


def layers() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]


def compiled(model: nn.Module) -> Any:
    return autopar.compile(model, example_inputs=(X,), hardware="cpu-gloo")


def paths(modules: Any) -> list[str]:
    return [name for name, _ in modules.named_parameters()]


@pytest.mark.parametrize("kind", ["sequential", "named", "list"])
def test_a_sequence_has_the_length_items_and_slices_of_the_plain_one(kind: str) -> None:
    names = ("first", "act", "last")
    plain: Any = {
        "sequential": lambda: nn.Sequential(*layers()),
        "named": lambda: nn.Sequential(OrderedDict(zip(names, layers(), strict=True))),
        "list": lambda: Listed(layers()),
    }[kind]()
    for module in (pm := compiled(plain), copy.deepcopy(pm)):
        assert isinstance(module, ParallelModule)
        assert type(module).__name__ == "ParallelModule"
        assert len(module) == len(plain) == 3
        assert module[0] is next(iter(module))
        assert module[-1] is list(module)[2]
        assert module[2] in module
        assert [type(part).__name__ for part in module] == ["Linear", "ReLU", "Linear"]
        assert paths(module[1:]) == paths(plain[1:])
        assert type(module[1:]).__name__ == ("ModuleList" if kind == "list" else "Sequential")
        assert module[1:][1] is module[2]
        for wrong in (3, -4):
            with pytest.raises(IndexError):
                module[wrong]
        torch.testing.assert_close(module(X), plain(X))


def test_a_mapping_has_the_keys_and_items_of_the_plain_one() -> None:
    first, _, out = layers()
    plain = Named({"first": first, "out": out})
    module = compiled(plain)
    assert list(module) == list(module.keys()) == list(plain)
    assert "out" in module
    assert "absent" not in module
    assert module["first"] is next(iter(module.values()))
    assert [name for name, _ in module.items()] == list(plain)
    torch.testing.assert_close(module(X), plain(X))


def test_a_model_that_is_no_container_is_true_and_has_no_length() -> None:
    module = compiled(nn.Linear(4, 2))
    assert module
    assert type(module) is ParallelModule
    assert not hasattr(module, "__len__")


def test_a_container_that_is_planned_at_its_first_call_is_indexed_afterwards() -> None:
    module: Any = autopar.compile(nn.Sequential(*layers()), hardware="cpu-gloo")
    with pytest.raises(RuntimeStateError, match="before the first call"):
        module[0]
    module(X)
    assert len(module) == 3
    assert module[0] is next(iter(module))
