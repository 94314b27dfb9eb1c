"""Run by two and four processes: pipelines on the schedules of torch, compared with the plain
model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import zoo_small
from least_peak import least_peak
from torch.distributed.tensor import DTensor

import autopar
from autopar.plans import Plan

STEPS, LEARNING_RATE, MAX_NORM = 3, 1e-3, 0.5


def run(rank: int, plans: dict[str, tuple[str, str]]) -> dict[str, Any]:
    return {name: follow(kind, Plan.loads(text)) for name, (kind, text) in plans.items()}


def built(kind: str) -> zoo_small.Built:
    """Build a float64 model by name: ``llama``, or ``llama:4`` for another number of layers."""
    name, _, layers = kind.partition(":")
    return getattr(zoo_small, name)(num_layers=int(layers or 2), dtype=torch.float64)  # type: ignore[no-any-return]


def follow(kind: str, plan: Plan) -> dict[str, Any]:
    """Errors of loss, norm and parameters over some steps, and what the module does beside
    training."""
    model, batch = built(kind)
    plain = copy.deepcopy(model)
    module: Any = autopar.compile(model, plan.mesh, example_inputs=batch, plan=plan, outputs="full")
    facts: dict[str, Any] = {"loss": [], "norm": []}
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE) for m in (module, plain))
    for _ in range(STEPS):
        loss, expected = module(**batch).loss, plain(**batch).loss
        loss.backward()
        expected.backward()
        norm, wanted = (
            float(module.clip_grad_norm_(MAX_NORM)),
            float(torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)),
        )
        facts["loss"].append(abs(loss.item() - expected.item()) / expected.item())
        facts["norm"].append(abs(norm - wanted) / wanted)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    facts["clipped"] = wanted > MAX_NORM
    named = dict(plain.named_parameters(remove_duplicate=False))
    mine = dict(module.named_parameters(remove_duplicate=False))
    facts["parameters"] = max(
        float((p.full_tensor() - named[name]).abs().max())
        for name, p in mine.items()
        if isinstance(p, DTensor)
    )
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, sorted(mine))
    facts["all held"], facts["not all here"] = (
        set().union(*held) == set(named),
        len(mine) < len(named),
    )
    with torch.inference_mode():
        got, expected_out = module(**batch), plain(**batch)
        facts["logits"] = float(
            (got.logits - expected_out.logits).abs().max() / expected_out.logits.abs().max()
        )
    facts["scaled"] = _scaled(module, batch)
    model, _ = built(kind)
    facts["peak"] = _peak(
        autopar.compile(model, plan.mesh, example_inputs=batch, plan=plan), batch, plan
    )
    facts["state"] = _round_trip(kind, plan, batch, module)
    return facts


def _scaled(module: Any, batch: dict[str, Any]) -> float:
    """The error of gradients whose loss was scaled, as a gradient scaler does, against twice the
    plain ones."""
    module(**batch).loss.backward()
    once = [p.grad.to_local().clone() for p in module.parameters()]
    module.zero_grad()
    module.loss_scale = 4.0
    (module(**batch).loss * 2.0).backward()
    module.loss_scale = 1.0
    error = max(
        float((p.grad.to_local() - 2.0 * g).abs().max())
        for p, g in zip(module.parameters(), once, strict=True)
    )
    module.zero_grad()
    return error


def _peak(module: Any, batch: dict[str, Any], plan: Plan) -> tuple[int, int]:
    """Return the peak live bytes of a step, measured and predicted, without optimizer state."""
    assert plan.pipeline is not None
    ranks = len(plan.pipeline.stages) // plan.pipeline.num_chunks
    chunks = [stage.prediction for stage in plan.pipeline.stages[module._stage_rank :: ranks]]
    predicted = (
        plan.pipeline.rank_bytes[module._stage_rank]
        if plan.pipeline.rank_bytes
        else chunks[0].peak_bytes
    )
    held = [*module.parameters(), *module.buffers(), *batch.values()]
    peak = least_peak(
        held, lambda: module(**batch), before=lambda: module.zero_grad(set_to_none=True), times=5
    )
    return peak, predicted - sum(p.memory_bytes["optimizer"] for p in chunks)


def _round_trip(kind: str, plan: Plan, batch: dict[str, Any], module: Any) -> bool:
    """Load the state into a new module with other weights, and check that the loss is the same."""
    other, _ = built(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
        fresh: Any = autopar.compile(other, plan.mesh, example_inputs=batch, plan=plan)
        before = fresh(**batch).loss.item()
        fresh.load_state_dict(module.state_dict())
        return before != module(**batch).loss.item() == fresh(**batch).loss.item()
