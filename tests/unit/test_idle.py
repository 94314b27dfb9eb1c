"""Axes along which a plan shares nothing are told."""

from __future__ import annotations

import torch
from torch import nn

import autopar
from autopar.plans import idle_axes


class Small(nn.Module):
    """So small that sharing it takes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).pow(2).mean()


def test_a_plan_that_shares_nothing_along_an_axis_says_so() -> None:
    mesh, batch = autopar.Mesh({"node": 2, "gpu": 2}), (torch.randn(4, 2),)
    free = autopar.plan(Small(), mesh, example_inputs=batch, hardware="cpu-gloo")
    assert idle_axes(free) == ("node", "gpu")
    told = "not parallelized over node and gpu: on cpu-gloo communication would cost more than it saves. To force it: "
    assert any(told in line for line in autopar.explain(free).summary())
    asked = autopar.plan(Small(), mesh, example_inputs=batch, hardware="cpu-gloo", constraints=[autopar.constraints.ddp(axes="gpu")])
    assert idle_axes(asked) == ("node",)
