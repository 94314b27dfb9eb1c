"""Layers that are equal in forward but not in backward, because everything before the first
adapter is frozen: plans recompute only what backward reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.core.mesh import Mesh
from autopar.sharding import combine_groupings, frozen_starts
from benchmarks.common import load_profile


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank product."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out).requires_grad_(False)
        self.down, self.up = (
            nn.Parameter(torch.randn(2, width) * 0.1),
            nn.Parameter(torch.randn(out, 2) * 0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Layer(nn.Module):
    """Frozen attention and an MLP with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.attention = (
            nn.LayerNorm(8),
            nn.LayerNorm(8),
            nn.MultiheadAttention(8, 2, batch_first=True),
        )
        self.requires_grad_(False)
        self.up, self.down = Adapted(8, 32), Adapted(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.second(x))))


class Net(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8).requires_grad_(False)
        self.layers, self.head = (
            nn.ModuleList(Layer() for _ in range(num_layers)),
            nn.Linear(8, 16, bias=False),
        )
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def built(num_layers: int) -> tuple[Net, dict[str, Any]]:
    torch.manual_seed(0)
    return Net(num_layers), {name: torch.randint(0, 16, (6, 4)) for name in ("ids", "labels")}


@pytest.mark.slow
def test_the_first_layer_with_an_adapter_has_separate_decisions() -> None:
    model, batch = built(3)
    assert frozen_starts(capture(model, (), batch)) == {
        "layers": (1, 2)
    }  # backward does not read the result of the last layer
    model.requires_grad_(True)
    assert frozen_starts(capture(model, (), batch)) == {}


def test_groups_separate_layers_that_differ_in_forward_or_backward() -> None:
    assert combine_groupings({"a": (1,), "b": (2,)}, {"a": (1, 3), "c": (4,)}) == {
        "a": (1, 3),
        "b": (2,),
        "c": (4,),
    }
    assert combine_groupings({}, {"a": (2,)}) == combine_groupings({"a": (2,)}, {}) == {"a": (2,)}


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.9, 0.8])
@pytest.mark.parametrize("num_layers", [2, 3])
def test_plans_for_any_budget_recompute_exactly_what_they_list(
    num_layers: int, share: float
) -> None:
    model, batch = built(num_layers)
    mesh, hardware = Mesh({"a": 2}), load_profile("cpu-gloo-frictionless")
    ample = autopar.plan(model, mesh, example_inputs=batch, hardware=hardware).prediction.peak_bytes
    plan = autopar.plan(
        model, mesh, example_inputs=batch, hardware=hardware, memory_bytes=int(ample * share)
    )
    found = autopar.check(plan, model, batch, hardware=hardware)
    assert found.ok, str(found)
    assert autopar.verify(plan, model, batch).ok
    assert plan.starts["layers"][0] == 1
