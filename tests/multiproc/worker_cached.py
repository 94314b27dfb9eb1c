"""Run by processes: ranks with separate caches, of which only some have the plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.cache import store


class Net(nn.Module):
    """A model with two layers and the mean square as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def run(rank: int, folder: str) -> list[dict[str, Any]]:
    """Compile with empty caches, with an empty cache on rank 1, with an empty cache on rank 0, and
    with full caches."""
    os.environ.update(AUTOPAR_CACHE_DIR=str(Path(folder) / str(rank)), AUTOPAR_CACHE="rules,plans")
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    facts = []
    for emptied in (None, 1, 0, None):
        if emptied == rank:
            store.clear()
        torch.manual_seed(0)
        model = Net()
        plain = model(batch)
        module = autopar.compile(model, {"gpu": 2}, example_inputs=batch, hardware="cpu-gloo")
        loss = module(batch)
        loss.backward()
        facts.append(
            {"plan": module.plan.hash, "loss": loss.item(), "expected": plain.item(), "rank": rank}
        )
    return facts
