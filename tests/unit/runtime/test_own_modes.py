"""A model that overrides `train` has the same modes of submodules as a compiled module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Frozen(nn.Module):
    """A model that keeps its batch norm in eval mode and its first layer frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        self.first.bias.requires_grad_(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.first(x))).square().sum(1).mean()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("before", ["nothing", "train", "eval"])
def test_an_overridden_train_sets_the_modes_of_submodules_as_in_the_plain_model(
    before: str, deferred: bool
) -> None:
    torch.manual_seed(0)
    model = Frozen()
    if before != "nothing":
        getattr(model, before)()
    plain = copy.deepcopy(model)
    example = {} if deferred else {"example_inputs": (X,)}
    module: Any = autopar.compile(model, hardware="cpu-gloo", **example)
    for each in (module, plain):
        each.train()
    for way in ("", "train", "eval", "train"):
        for each in (module, plain) if way else ():
            getattr(each, way)()
        loss, expected = module(X), plain(X)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        if plain.training:
            loss.backward()
            expected.backward()
        assert {path: part.training for path, part in plain.named_modules()} == {
            path: module.get_submodule(path).training for path, _ in plain.named_modules()
        }
        assert not module.get_parameter("first.bias").requires_grad
        torch.testing.assert_close(module.get_buffer("norm.running_mean"), plain.norm.running_mean)
    torch.testing.assert_close(
        module.get_parameter("first.weight").grad.full_tensor(), plain.first.weight.grad
    )
