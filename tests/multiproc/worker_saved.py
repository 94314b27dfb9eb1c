"""Run by some number of processes: a model with dropout is trained, saved, and goes on among another number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.errors import RuntimeStateError
from benchmarks.common import load_profile
from benchmarks.zoo import build

SEED, LEARNING_RATE = 5, 1e-2
TRAINED, ALL_STEPS = 3, 6


def run(rank: int, folder: str, steps: int, stages: bool = False) -> dict[str, Any]:
    """Train up to so many steps, from where the newest checkpoint ends; what was seen on the way."""
    model, batch = build("gpt2", dropout=0.2, dtype=torch.float64)
    constraints = (autopar.constraints.pipeline("gpu", microbatches=1),) if stages else ()
    options: dict[str, Any] = {"hardware": load_profile("cpu-gloo-frictionless"), "outputs": "loss", "num_microbatches": "auto"}
    module: Any = autopar.compile(model, example_inputs=batch, constraints=constraints, **options)
    module.manual_seed(SEED)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    checkpoints = autopar.Checkpoints(folder, keep=1)
    start = checkpoints.load(module, optimizer, scheduler=scheduler)
    losses = []
    for step in range(start, steps):
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        checkpoints.save(step + 1, module, optimizer, scheduler=scheduler)
    sharded = sum(not all(x.is_replicate() for x in p.placements) for p in module.parameters())
    return {
        "start": start, "losses": losses, "sharded": sharded, "rate": optimizer.param_groups[0]["lr"], "mesh": str(module.plan.mesh),
        "steps": checkpoints.steps(), "plan": checkpoints.plan() == module.plan.dumps(), "state": module.random_state,
    }  # fmt: skip


def blind(rank: int, folder: str) -> str:
    """A rank that does not see the folder, as where nodes do not share it."""
    model, batch = build("gpt2")
    module = autopar.compile(model, example_inputs=batch, hardware="cpu-gloo")
    checkpoints = autopar.Checkpoints(Path(folder) / "mine", keep=1)
    checkpoints.save(1, module)
    if dist.get_rank() == 1:
        checkpoints = autopar.Checkpoints(Path(folder) / "elsewhere")
    try:
        checkpoints.load(module)
    except RuntimeStateError as error:
        return str(error)
    return ""
