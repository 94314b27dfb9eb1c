"""Run by four processes: `autopar.compile` on real models with given plans, compared with the plain
model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import zoo_small

import autopar
from autopar.plans import Plan
from autopar.runtime.module import ParallelModule

STEPS, LEARNING_RATE, MAX_NORM = 3, 1e-3, 0.5


def run(rank: int, plans: dict[str, str], num_layers: int = 2) -> dict[str, Any]:
    """By name of a plan, of which the first word is the model's kind."""
    return {
        name: follow(name.split()[0], Plan.loads(text), num_layers) for name, text in plans.items()
    }


def follow(kind: str, plan: Plan, num_layers: int) -> dict[str, Any]:
    """Relative errors of loss, norm and parameters over some steps; the state dict in a fresh
    module."""
    model, batch = getattr(zoo_small, kind)(num_layers=num_layers, dtype=torch.float64)
    plain = copy.deepcopy(model)
    module = autopar.compile(model, plan.mesh, example_inputs=batch, plan=plan)
    facts: dict[str, Any] = {"hash": module.plan.hash, "loss": [], "norm": []}  # type: ignore[operator, union-attr]
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE) for m in (module, plain))
    for _ in range(STEPS):
        loss, expected = module(**batch).loss, plain(**batch).loss
        loss.backward()
        expected.backward()
        norm = float(module.clip_grad_norm_(MAX_NORM))  # type: ignore[operator]
        wanted = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM))
        facts["loss"].append(abs(loss.item() - expected.item()) / expected.item())
        facts["norm"].append(abs(norm - wanted) / wanted)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    facts["last"] = expected.item()
    facts["clipped"] = wanted > MAX_NORM
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    facts["parameters"] = max((p.full_tensor() - q).abs().max().item() for p, q in pairs)
    facts["sharded"] = sum(
        not all(x.is_replicate() for x in p.placements) for p in module.parameters()
    )
    facts["meshes"] = sorted({str(p.device_mesh.mesh_dim_names) for p in module.parameters()})
    facts["state"] = _round_trip(kind, num_layers, batch, module)
    return facts


def _round_trip(
    kind: str, num_layers: int, batch: dict[str, torch.Tensor], module: Any
) -> dict[str, Any]:
    """Load the state into a new module with other weights, and check that the loss is the same."""
    other, _ = getattr(zoo_small, kind)(num_layers=num_layers, dtype=torch.float64)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    fresh = ParallelModule(module.program, module.device_mesh, other)
    with torch.no_grad():
        wanted, before = module(**batch).loss.item(), fresh(**batch).loss.item()
        told = fresh.load_state_dict(module.state_dict())
        return {
            "keys": str(told),
            "apart": before != wanted,
            "same": fresh(**batch).loss.item() == wanted,
        }
