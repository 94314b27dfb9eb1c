"""Buffers of a pipeline: each change happens in the single stage that has the buffer, or the model
is not cut there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.planning import plan_model
from autopar.constraints import pipeline
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError

LINE = Mesh({"a": 2})


class SharedNorm(nn.Module):
    """A batch norm that is used after each layer, so that its statistics change four times per
    step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = nn.BatchNorm1d(8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x)).relu()
        return x.pow(2).mean()


class Spectral(nn.Module):
    """A weight divided by its largest singular value, whose power iteration keeps vectors in
    buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 12)),
            nn.Linear(12, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).pow(2).mean()


class Traced(nn.Module):
    """A running mean of the results of two layers that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x.pow(2).mean()


class Replaced(nn.Module):
    """A buffer that the second layer overwrites and nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x).tanh())
        self.last.copy_(x.detach().mean(0))
        return x.pow(2).mean()


def planned(make: Any) -> tuple[Any, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = make(), {"x": torch.randn(6, 8)}
    return (
        plan_model(
            model,
            LINE,
            example_inputs=batch,
            hardware="cpu-gloo",
            constraints=(pipeline("a", microbatches=1),),
        )[1],
        model,
        batch,
    )


@pytest.mark.parametrize("make", [SharedNorm, Spectral, Replaced])
def test_a_buffer_changes_in_the_only_stage_that_has_it(make: Any) -> None:
    made, model, batch = planned(make)
    stages = made.program.stages
    assert len(stages) == 2
    changed = [name for stage in stages for name in stage.mutated]
    assert sorted(changed) == sorted(dict(model.named_buffers()))
    for stage in stages:
        assert set(stage.mutated) == {t.name for t in stage.buffers}
    assert autopar.verify(made.plan, model, batch).ok
    assert autopar.check(made.plan, model, batch).ok


def test_no_cut_separates_layers_that_change_the_same_buffer() -> None:
    said = (
        r"cannot be cut into stages: buffer 'mean' is read in stage 0 but updated"
        r" in stage 1(.|\n)*test_stage_buffers"
    )
    with pytest.raises(ConstraintError, match=said):
        planned(Traced)
