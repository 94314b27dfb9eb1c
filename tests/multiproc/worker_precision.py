"""Run by processes: training with parameters stored in fp32 and read in bf16, compared with a
reference that casts them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import zoo_small

import autopar
from autopar.plans import Plan

NUM_LAYERS = {"llama": 1, "gpt2": 2}  # as many as there are stages
STEPS, LEARNING_RATE, MAX_NORM = 4, 0.1, 0.5


def run(rank: int, plans: dict[str, str]) -> dict[str, Any]:
    return {name: follow(name.split()[0], Plan.loads(text)) for name, text in plans.items()}


def follow(kind: str, plan: Plan) -> dict[str, Any]:
    """Relative errors of loss and norm, what gradients and weights are, and how far weights are
    from the reference's."""
    model, batch = getattr(zoo_small, kind)(num_layers=NUM_LAYERS[kind])
    plain = copy.deepcopy(model)
    module = autopar.compile(model, plan.mesh, example_inputs=batch, plan=plan)
    facts: dict[str, Any] = {"loss": [], "norm": [], "dtypes": set()}
    ours, theirs = (
        torch.optim.SGD(m.parameters(), lr=LEARNING_RATE, momentum=0.9) for m in (module, plain)
    )  # Adam would use only the signs
    for _ in range(STEPS):
        loss = module(**batch).loss
        loss.backward()
        named = {name: p.to(torch.bfloat16) for name, p in plain.named_parameters()}
        expected = torch.func.functional_call(plain, named, (), batch).loss
        expected.backward()
        facts["dtypes"] |= {
            str(x.dtype) for p in module.parameters() for x in (p, p.grad) if x is not None
        }
        norm = float(module.clip_grad_norm_(MAX_NORM))  # type: ignore[operator]
        wanted = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM))
        facts["loss"].append(abs(loss.item() - expected.item()) / expected.item())
        facts["norm"].append(abs(norm - wanted) / wanted)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    whole = dict(plain.named_parameters())
    pairs = [
        (p.detach().full_tensor(), whole[name].detach()) for name, p in module.named_parameters()
    ]  # of this rank's stage
    moved = max(
        float((q.detach() - p).abs().max())
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    facts["away"] = max(float((p - q).abs().max()) for p, q in pairs) / moved
    facts["sharded"] = sum(
        not all(x.is_replicate() for x in p.placements) for p in module.parameters()
    )
    facts["last"] = expected.item()
    return facts
