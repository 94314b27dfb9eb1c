"""A pipeline without named cuts skips illegal ones, and its stages compute what the plain model
computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.capture import capture
from autopar.errors import ConstraintError
from autopar.planner.pipeline import stage_memory_bound
from autopar.stages import cut_points, find_refusal, usable_points
from autopar.stages.placing import CutError


class Autocast(nn.Module):
    """The gradient of the input of the last layer has another dtype than the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = (
            nn.ModuleList(nn.Linear(32, 32) for _ in range(4)),
            nn.Linear(32, 32),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            for layer in self.layers:
                x = x + layer(x)
            x = self.out(x)
        return ((x.float() - y) ** 2).mean()


class Classes(nn.Module):
    """Three linear layers with label smoothing and class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("weight", torch.rand(32))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.c(functional.relu(self.b(functional.relu(self.a(x)))))
        return functional.cross_entropy(logits, y, label_smoothing=0.1, weight=self.weight)


class Universal(nn.Module):
    """One residual layer that is applied four times."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(4):
            x = x + functional.relu(self.layer(self.norm(x)))
        return functional.mse_loss(x, y)


class Streams(nn.Module):
    """Two residual streams of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = (
            nn.ModuleList(nn.Linear(32, 32) for _ in range(3)),
            nn.ModuleList(nn.Linear(32, 16) for _ in range(3)),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = x[:, :16]
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x, z = x + wide(torch.cat([z, z], 1)), z * narrow(x).tanh()
        return (x.sum(1) * z.sum(1) - y[:, 0]).square().mean()


class Skips(nn.Module):
    """A U-Net of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(32 >> i, 16 >> i) for i in range(3))
        self.up = nn.ModuleList(nn.Linear(16 >> i, 32 >> i) for i in reversed(range(3)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        held = []
        for layer in self.down:
            held.append(x)
            x = functional.relu(layer(x))
        for layer in self.up:
            x = functional.relu(layer(x)) + held.pop()
        return (x - y).square().mean()


def floats() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 32), torch.randn(8, 32)


CASES: dict[str, tuple[type[nn.Module], Any]] = {
    "autocast": (Autocast, floats),
    "universal": (Universal, floats),
    "classes": (Classes, lambda: (torch.randn(8, 32), torch.randint(0, 32, (8,)))),
    "streams": (Streams, floats),
    "skips": (Skips, floats),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b"])
def test_cuts_are_found_and_stages_equal_the_plain_model(name: str, schedule: str) -> None:
    build, make = CASES[name]
    batch, chunks = make(), {"chunks": 2} if schedule == "interleaved_1f1b" else {}
    wish = autopar.constraints.pipeline(microbatches=2, schedule=schedule, **chunks)
    few = {"classes": "3 parts", "universal": "2 parts"}
    if name in few and chunks:
        with pytest.raises(ConstraintError, match=few[name]):
            autopar.plan(build(), 2, example_inputs=batch, hardware="h100-sxm", constraints=[wish])
        return
    plan = autopar.plan(build(), 2, example_inputs=batch, hardware="h100-sxm", constraints=[wish])
    assert plan.pipeline is not None
    report = autopar.verify(plan, build(), batch)
    assert report.ok, str(report)


def test_a_cut_whose_gradient_cannot_be_transferred_is_skipped() -> None:
    trace = capture(Autocast(), floats(), {})
    names = {point.module: find_refusal(trace, [point.position]) for point in cut_points(trace)}
    illegal = {name for name, refusal in names.items() if refusal is not None}
    assert illegal and {point.module for point in usable_points(trace)[0]} == names.keys() - illegal


def test_the_nearest_legal_cuts_are_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = capture(Streams(), floats(), {})
    points = usable_points(trace)[0]
    position = points[1].position
    no = CutError("no")
    monkeypatch.setattr(
        stage_memory_bound,
        "find_refusal",
        lambda _, positions: no if position in positions else None,
    )
    assert stage_memory_bound.nearest_legal(trace, points, (2, 4)) in {(1, 4), (3, 4)}
    monkeypatch.setattr(stage_memory_bound, "find_refusal", lambda _, __: no)
    with pytest.raises(ConstraintError, match="into 3 stages found: no"):
        stage_memory_bound.nearest_legal(trace, points, (2, 4))
