"""A script that any launcher starts: ``python worker_launched.py FOLDER`` trains a model on all
processes, and every process writes what it saw to FOLDER."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar

STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.down(torch.relu(self.up(x))), labels)


def batch() -> dict[str, Tensor]:
    """Return the batch of all processes."""
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(8, 16, generator=generator, dtype=torch.float64),
        "labels": torch.randint(0, 4, (8,), generator=generator),
    }


def build() -> Net:
    """Return the model with its initial weights."""
    torch.manual_seed(0)
    return Net().double()


def losses(model: nn.Module) -> list[float]:
    """Return the loss of each step of training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    values = []
    for _ in range(STEPS):
        loss = model(**batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(float(loss.detach()))
    return values


def main(folder: str) -> None:
    """Train on all launched processes, with parameters that are split over them."""
    constraints = [autopar.constraints.fsdp()]
    pm = autopar.compile(build(), example_inputs=batch(), constraints=constraints)
    rank = dist.get_rank()
    result = {
        "losses": losses(pm),
        "world_size": dist.get_world_size(),
        "local_rank": os.environ.get("LOCAL_RANK"),
        "split": pm.up.weight.to_local().shape != pm.up.weight.shape,
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
