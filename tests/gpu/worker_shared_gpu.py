"""Run by processes that share one GPU: plans trained beside the plain model, and experts' rows
sent from one to the other."""

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
    """One GPU for all processes; what it returns is to be held."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    return stage_collectives()


def train(
    rank: int, plans: dict[str, tuple[str, str, torch.dtype]], joins: bool = True
) -> dict[str, Any]:
    """Of plans by name, each with its model and dtype: the largest relative errors after some
    steps; and what the kernels' log says.

    `joins`: whether this torch joins all parameters, so that they can be compared, too.
    """
    held, said = share(), Said()
    logging.getLogger("autopar.kernels").addHandler(said)
    facts = {
        name: trained(Plan.loads(text), kind, dtype, joins)
        for name, (text, kind, dtype) in plans.items()
    }
    del held
    return {**facts, "said": said.messages}


def trained(plan: Plan, kind: str, dtype: torch.dtype, joins: bool) -> dict[str, float]:
    model, batch = getattr(zoo_small, kind)(num_layers=1, dtype=dtype)
    plain, batch = copy.deepcopy(model).cuda(), {name: x.cuda() for name, x in batch.items()}
    ours = autopar.compile(
        model, plan.mesh, example_inputs=batch, plan=plan
    )  # its weights wait on the CPU
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
    errors = (
        [error(p.full_tensor(), theirs[name]) for name, p in ours.named_parameters()]
        if joins
        else [math.nan]
    )
    apart = max(abs(a - b) / b for a, b in zip(*losses, strict=True))
    return {"losses": apart, "parameters": max(errors), "fell": losses[1][0] - losses[1][-1]}


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))


def dispatch(rank: int) -> dict[str, Any]:
    """What of experts and their gradients is not as where nothing is split, and why rows are not
    sent by kernels if they are not."""
    held, device = share(), torch.device("cuda", 0)
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
            made = dispatched.experts_bound(
                *mine[1:], "relu", EXPERTS, starts, 4 * PICKS, *settings
            )
            grads = dispatched.experts_backward_bound(
                *mine, "relu", EXPERTS, starts, 4 * PICKS, *settings
            )
            wrong += [
                (how, routed, i)
                for i, (a, b) in enumerate(zip((made, *grads), expected, strict=True))
                if not torch.equal(a, b)
            ]
    del held
    return {"wrong": wrong, "why_not": peers_of(AxisGroup(name, NUM, rank), device)[1]}
