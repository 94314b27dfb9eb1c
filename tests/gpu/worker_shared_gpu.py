"""Run by processes that share one GPU: plans with collective-overlap kernels, trained beside the plain model."""

from __future__ import annotations

import copy
import logging
import os
from typing import Any

import torch
import zoo_small

import autopar
from autopar.plans import Plan

STEPS = 3


def run(rank: int, plans: dict[str, tuple[str, torch.dtype]]) -> dict[str, Any]:
    """By name of the plan: the largest relative errors of losses and parameters after some steps, and what the kernels' log says."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar.kernels").addHandler(handler)
    facts = {name: trained(Plan.loads(text), dtype) for name, (text, dtype) in plans.items()}
    return {**facts, "messages": messages}


def trained(plan: Plan, dtype: torch.dtype) -> dict[str, float]:
    model, batch = zoo_small.llama(num_layers=1, dtype=dtype)
    plain, batch = copy.deepcopy(model).cuda(), {name: x.cuda() for name, x in batch.items()}
    ours = autopar.compile(model.cuda(), plan.mesh, example_inputs=batch, plan=plan)
    losses: list[list[float]] = []
    for each in (ours, plain):
        optimizer, seen = torch.optim.SGD(each.parameters(), lr=0.1), []
        for _ in range(STEPS):
            loss = each(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        losses.append(seen)
    theirs = dict(plain.named_parameters())
    errors = [error(p.full_tensor(), theirs[name]) for name, p in ours.named_parameters()]
    apart = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    return {"losses": apart, "parameters": max(errors), "fell": losses[1][0] - losses[1][-1]}


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))
