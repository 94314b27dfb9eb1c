"""Run by processes: pipelines whose stages share parameters of which some stage has no gradient."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.constraints import pipeline


class Siamese(nn.Module):
    """One encoder of two inputs; the gradient of what both stages hold is made in one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return (self.encoder(u) - self.encoder(v)).pow(2).mean()


def run(rank: int, frozen: bool) -> dict[str, Any]:
    """Return losses and weights after some steps, compared with the plain model."""
    torch.manual_seed(0)
    model, batch = Siamese(), {"u": torch.randn(6, 8), "v": torch.randn(6, 8)}
    model.encoder[0].weight.requires_grad_(not frozen)
    plain, facts = copy.deepcopy(model), {"loss": []}
    module = autopar.compile(
        model,
        autopar.Mesh({"a": 2}),
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=(pipeline("a", microbatches=3),),
    )
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain))
    for _ in range(3):
        losses = module(**batch), plain(**batch)
        for loss, optimizer in zip(losses, (ours, theirs), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        facts["loss"].append(abs(losses[0].item() - losses[1].item()))
    whole = dict(plain.named_parameters())
    held = {name: p.detach().full_tensor() for name, p in module.named_parameters()}
    return {
        **facts,
        "away": max(float((p - whole[name].detach()).abs().max()) for name, p in held.items()),
        "held": sorted(held),
    }
