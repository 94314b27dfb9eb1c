"""The summary of a plan names axes along which nothing is sharded."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.shared_options import as_flags
from autopar.constraints import ddp, pipeline
from autopar.constraints.text import parse_constraint
from autopar.plans import idle_axes


class Small(nn.Module):
    """A model that is so small that sharding makes it slower."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).pow(2).mean()


class Summed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.model(input).pow(2).mean()


def test_a_plan_names_the_axes_along_which_nothing_is_sharded() -> None:
    mesh, batch = autopar.Mesh({"node": 2, "gpu": 2}), (torch.randn(4, 2),)
    free = autopar.plan(Small(), mesh, example_inputs=batch, hardware="cpu-gloo")
    assert idle_axes(free) == ("node", "gpu")
    told = (
        "not parallelized over node and gpu: on cpu-gloo communication would cost more than it"
        " saves. To force sharding: "
    )
    assert any(told in line for line in autopar.explain(free).summary())
    asked = autopar.plan(
        Small(),
        mesh,
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=[autopar.constraints.ddp(axes="gpu")],
    )
    assert idle_axes(asked) == ("node",)


@pytest.mark.parametrize(
    ("axes", "asked", "advice"),
    [
        ({"node": 2, "gpu": 2}, (), "To force sharding: --constraint 'fsdp()'"),
        ({"node": 2, "gpu": 2}, (ddp("node"),), "To force sharding: --constraint 'fsdp(\"gpu\")'"),
        (
            {"node": 2, "gpu": 2, "one": 1},
            (pipeline("node", microbatches=2),),
            "along node: --constraint 'fsdp(\"gpu\")'",
        ),
        (
            {"node": 2, "a": 2, "b": 2},
            (pipeline("node", microbatches=2),),
            'along node: --constraint \'fsdp(["a", "b"])\'',
        ),
    ],
    ids=("free", "one axis", "stages", "stages and two axes"),
)
def test_the_advised_constraint_is_compatible_and_has_the_stated_effect(
    axes: dict[str, int], asked: tuple[Any, ...], advice: str
) -> None:
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"input": torch.randn(16, 4)}
    made = autopar.plan(
        Summed(model), axes, example_inputs=batch, hardware="cpu-gloo", constraints=asked
    )
    (line,) = (
        line
        for line in map(as_flags, autopar.explain(made).summary())
        if "not parallelized" in line
    )
    assert line.endswith(advice)
    advised = parse_constraint(shlex.split(line.split("--constraint ")[1])[0])
    again = autopar.plan(
        Summed(model),
        axes,
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=(*asked, advised),
    )
    assert idle_axes(again) == () and not any(
        "not parallelized" in line for line in autopar.explain(again).summary()
    )
