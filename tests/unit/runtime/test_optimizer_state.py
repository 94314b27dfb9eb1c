"""A warning reports once if the optimizer state has another size than the plan reserves, with both
sizes and a correct remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

import autopar
from autopar.cost.priced import OPTIMIZERS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).pow(2).mean()


class Signs(Optimizer):
    """A custom optimizer with one state tensor per parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            p.sub_(momentum.mul_(0.9).add_(p.grad).sign(), alpha=1e-4)


Make = Callable[[Any], Optimizer]
CASES: dict[str, tuple[str, Make, str]] = {
    "as planned": ("adamw", AdamW, ""),
    "SGD as planned": ("sgd", lambda p: SGD(p, 0.1), ""),
    "less": (
        "adamw",
        lambda p: SGD(p, 0.1),
        "holds 0 bytes of state .* reserves 130 KiB .*compile with optimizer='sgd'",
    ),
    "half": (
        "adamw",
        lambda p: SGD(p, 0.1, momentum=0.9),
        "SGD holds 64.8 KiB .*optimizer='momentum'",
    ),
    "more": ("sgd", AdamW, "holds 130 KiB .*reserves 0 bytes .*compile with optimizer='adamw'"),
    "more than any": (
        "adamw",
        lambda p: Adam(p, amsgrad=True),
        "holds 194 KiB .*memory_bytes smaller by 64.8 KiB",
    ),
    "of the user's own": ("adamw", Signs, "Signs holds 64.8 KiB .*optimizer='momentum'"),
    "none planned": (
        "none",
        lambda p: AdamW(p, fused=True),
        "reserves 0 bytes .*optimizer='adamw'",
    ),
    "little": ("adamw", Adafactor, "Adafactor holds .*optimizer='sgd'"),
}


@pytest.mark.parametrize("case", CASES)
def test_optimizer_state_of_another_size_than_planned_warns_once_and_the_remedy_works(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    planned, make, words = CASES[case]
    said = said_of(planned, make, caplog)
    assert len(said) == bool(words)
    if not words:
        return
    assert re.search(words, said[0])
    name = next(
        (each for each in OPTIMIZERS if f"compile with optimizer={each!r}" in said[0]), None
    )
    if name is not None:
        assert said_of(name, make, caplog) == []


def said_of(planned: str, make: Make, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    module: Any = autopar.compile(
        Net(),
        {"gpu": 1},
        example_inputs=(torch.randn(8, 64),),
        hardware="h100-sxm",
        optimizer=planned,
    )
    optimizer = make(module.parameters())
    for _ in range(5):
        module(torch.randn(8, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [
        record.getMessage() for record in caplog.records if "of state for" in record.getMessage()
    ]
