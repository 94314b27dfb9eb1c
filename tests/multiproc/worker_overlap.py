"""Run by two processes: plans with overlapped communication, compared with the plain model, and
their memory compared with the prediction."""

from __future__ import annotations

import copy
from typing import Any

import torch
import zoo_small
from least_peak import least_peak
from torch import nn

from autopar.capture import capture
from autopar.emit import emit
from autopar.kernels import collectives as steps
from autopar.plans import Plan
from autopar.program.peak_memory import trace_peak
from autopar.runtime.device_mesh import device_mesh
from autopar.runtime.module import ParallelModule


def run(rank: int, plans: dict[str, str]) -> dict[str, Any]:
    """Run by name: the kind of model, and its dtype if it is not float64."""
    dtypes = {name: torch.float32 if "float32" in name else torch.float64 for name in plans}
    return {
        name: follow(name.split()[0], Plan.loads(text), rank, dtypes[name])
        for name, text in plans.items()
    }


def follow(kind: str, plan: Plan, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return relative errors of loss and gradients, the number of early steps, and both peaks."""
    model, batch = getattr(zoo_small, kind)(num_layers=1, dtype=dtype)
    plain = copy.deepcopy(model)
    program = emit(capture(model, (), batch), plan)
    module = ParallelModule(program, device_mesh(plan.mesh), model, outputs="dtensor")
    loss, expected = module(**batch).loss, plain(**batch).loss
    loss.backward()
    expected.backward()
    theirs = dict(plain.named_parameters())
    errors = {
        name: error(p.grad.full_tensor(), theirs[name].grad)
        for name, p in module.named_parameters()
        if p.grad is not None
    }
    names = {name for name, p in theirs.items() if p.grad is not None}
    predicted = trace_peak(
        program.stages[0], outputs="dtensor", coordinate=plan.mesh.coordinate(rank)
    ).peak_bytes
    return {
        "loss": abs(loss.item() - expected.item()) / expected.item(),
        "gradients": max(errors.values()),
        "missing": sorted(names - errors.keys()),
        "starts": sum(
            node.target is steps.start
            for g in (program.stages[0].forward, program.stages[0].backward)
            for node in g.graph.nodes
        ),
        "peaks": (predicted, measured(module, batch)),
    }


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))


def measured(module: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Live bytes at their most in a step whose outputs are held until backward ends, as in a
    training loop."""

    def step() -> Any:
        result = module(**batch)
        result.loss.backward()
        return result

    held = [*module.parameters(), *module.buffers(), *batch.values()]
    return least_peak(held, step, before=lambda: module.zero_grad(set_to_none=True), times=5)
