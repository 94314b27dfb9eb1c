"""Runs in processes that share one GPU: trains plans and the plain model, and sends rows of experts
between processes."""

from __future__ import annotations

import copy
import logging
import math
import os
from typing import Any

import torch
import torch.distributed as dist
import zoo_small
from staged_collectives import stage_collectives
from worker_dispatch import EXPERTS, NUM, PICKS, Said, operands

import autopar
from autopar import ops
from autopar.kernels import dispatched
from autopar.kernels.collectives import AxisGroup
from autopar.kernels.peers import peers_of
from autopar.plans import Plan

STEPS = 3


def share() -> torch.library.Library:
    """Use one GPU for all processes. The caller keeps the returned object alive."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    return stage_collectives()


def train(
    rank: int, plans: dict[str, tuple[str, str, torch.dtype]], joins: bool = True
) -> dict[str, Any]:
    """Train plans by name, each with its model and dtype. Return the largest relative errors after
    some steps, and the log messages of the kernels.

    Args:
        joins: whether this version of torch can gather all parameters, so that they can be
            compared.
    """
    library, handler = share(), Said()
    logging.getLogger("autopar.kernels").addHandler(handler)
    facts = {
        name: train_plan(Plan.loads(text), kind, dtype, joins)
        for name, (text, kind, dtype) in plans.items()
    }
    del library
    return {**facts, "said": handler.messages}


def train_plan(plan: Plan, kind: str, dtype: torch.dtype, joins: bool) -> dict[str, float]:
    model, batch = getattr(zoo_small, kind)(num_layers=1, dtype=dtype)
    plain, batch = copy.deepcopy(model).cuda(), {name: x.cuda() for name, x in batch.items()}
    ours = autopar.compile(
        model, plan.mesh, example_inputs=batch, plan=plan
    )  # the weights of `model` are on the CPU
    losses: list[list[float]] = []
    for each in (ours, plain):
        optimizer, values = torch.optim.SGD(each.parameters(), lr=0.1), []
        for _ in range(STEPS):
            loss = each(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        losses.append(values)
    expected = dict(plain.named_parameters())
    errors = (
        [error(p.full_tensor(), expected[name]) for name, p in ours.named_parameters()]
        if joins
        else [math.nan]
    )
    difference = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    return {"losses": difference, "parameters": max(errors), "fell": losses[1][0] - losses[1][-1]}


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))


def dispatch(rank: int) -> dict[str, Any]:
    """Return the results and gradients of expert layers that differ from the layers on one process,
    and the reason why no kernels send the rows, if there is one."""
    library, device = share(), torch.device("cuda", 0)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    starts, wrong = [i * EXPERTS // NUM for i in range(NUM)], []
    for how in ("any", "one", "none", "again"):
        grad, x, ids, gates, up, down = (t.to(device) for t in operands(how))
        whole = ops.experts(x, ids, gates, up, down, "relu", EXPERTS)
        whole_grads = ops.experts_backward(grad, x, ids, gates, up, down, "relu", EXPERTS)
        parts = [whole, *whole_grads]
        expected = [t.tensor_split([4, 8, 12])[rank] for t in parts[:3]] + [
            t.chunk(NUM)[rank] for t in parts[3:]
        ]
        mine = [t.tensor_split([4, 8, 12])[rank] for t in (grad, x, ids, gates)] + [
            t.chunk(NUM)[rank] for t in (up, down)
        ]
        for routed in (False, True):
            settings = (NUM, name, rank, routed)
            output = dispatched.experts_bound(
                *mine[1:], "relu", EXPERTS, starts, 4 * PICKS, *settings
            )
            grads = dispatched.experts_backward_bound(
                *mine, "relu", EXPERTS, starts, 4 * PICKS, *settings
            )
            wrong += [
                (how, routed, i)
                for i, (a, b) in enumerate(zip((output, *grads), expected, strict=True))
                if not torch.equal(a, b)
            ]
    del library
    return {"wrong": wrong, "why_not": peers_of(AxisGroup(name, NUM, rank), device)[1]}
