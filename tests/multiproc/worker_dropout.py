"""Run by one or more processes: some training steps of a model with dropout, from one seed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import autopar
from autopar.plans import Plan

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.zoo import build


def run(rank: int, plan: str | None) -> list[float]:
    """Return the losses. Ranks start with different seeds of torch, and that of rank 0 is used."""
    model, batch = build("gpt2", dropout=0.2, dtype=torch.float64, n_layer=1)
    torch.manual_seed(7 + rank)
    loaded = Plan.loads(plan) if plan else None
    module = autopar.compile(
        model, loaded.mesh if loaded else dist.get_world_size(), example_inputs=batch, plan=loaded
    )
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-3), []
    for _ in range(3):
        loss = module(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
