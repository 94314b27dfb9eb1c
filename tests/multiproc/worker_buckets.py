"""Run by processes: a plan with and without buckets in turns, compared with the plain model and the
predicted memory."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import zoo_small
from worker_overlap import error, measured

from autopar.capture import capture
from autopar.emit import emit
from autopar.plans import Plan
from autopar.program.peak_memory import trace_peak
from autopar.runtime.device_mesh import device_mesh
from autopar.runtime.module import ParallelModule


def run(rank: int, plans: dict[str, str]) -> dict[str, Any]:
    return {name: follow(name.split()[0], Plan.loads(text), rank) for name, text in plans.items()}


def follow(kind: str, plan: Plan, rank: int) -> dict[str, Any]:
    """Return whether gradients are bitwise equal to those without buckets, their largest relative
    error, and both peaks in bytes."""
    model, batch = getattr(zoo_small, kind)(num_layers=1, dtype=torch.float64)
    plain = copy.deepcopy(model)
    trace, mesh = capture(model, (), batch), device_mesh(plan.mesh)
    programs = [emit(trace, each) for each in (plan, replace(plan, buckets=()))]
    modules = [
        ParallelModule(program, mesh, copy.deepcopy(model), outputs="dtensor")
        for program in programs
    ]
    for module in (*modules, plain):
        module(**batch).loss.backward()
    together, alone = (
        {name: p.grad.full_tensor() for name, p in m.named_parameters() if p.grad is not None}
        for m in modules
    )
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    predicted = trace_peak(
        programs[0].stages[0], outputs="dtensor", coordinate=plan.mesh.coordinate(rank)
    ).peak_bytes
    return {
        "missing": sorted(theirs.keys() - together.keys()),
        "equal": all(torch.equal(together[name], x) for name, x in alone.items()),
        "gradients": max(error(together[name], x) for name, x in theirs.items()),
        "peaks": (predicted, measured(modules[0], batch)),
        "collectives": [len(program.stages[0].collectives) for program in programs],
    }
