"""Run by processes: one rank changes gradients, parameters or its optimizer with other numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.constraints import ddp, fsdp
from autopar.errors import RankError

PLANS: dict[str, Any] = {"ddp": ddp(), "fsdp": fsdp()}


class Net(nn.Module):
    """A model with two layers and the mean square as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def scale_each(module: nn.Module, factor: float) -> None:
    for gradient in gradients(module):
        gradient.mul_(factor)


@torch.no_grad()
def decay(module: nn.Module, weight: float) -> None:
    for parameter in module.parameters():
        parameter.lerp_(torch.zeros_like(parameter), weight)


def clip(**options: Any) -> Callable[[Any, float], object]:
    return lambda module, limit: nn.utils.clip_grad_norm_(module.parameters(), limit, **options)


CHANGES: dict[str, Callable[[Any, float], object]] = {
    "clip_grad_norm_ of torch": clip(),
    "clip_grad_norm_ of torch, one by one": clip(foreach=False),
    "clip_grad_norm_ of the module": lambda module, limit: module.clip_grad_norm_(limit),
    "order of the norm": lambda module, limit: module.clip_grad_norm_(1.0, 1.0 + limit),
    "clip_grad_value_": lambda module, limit: nn.utils.clip_grad_value_(module.parameters(), limit),
    "mul_ of gradients": scale_each,
    "mul_ of all gradients": lambda module, x: torch._foreach_mul_(gradients(module), x),
    "lerp_ of parameters": decay,
}


def remove_gradient(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][0].grad = None


OPTIMIZERS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "no state": lambda optimizer: optimizer.state.clear(),
    "no gradient": remove_gradient,
    "weight_decay": lambda optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
    "two steps": lambda optimizer: optimizer.step(),
}


def run(rank: int, plan: str) -> dict[str, str]:
    """Return by change the error of this rank at the next call, if rank 1 makes another change."""
    torch.manual_seed(0)
    batch = torch.randn(8, 8)
    module: Any = autopar.compile(
        Net(), example_inputs=(batch,), hardware="cpu-gloo", constraints=[PLANS[plan]]
    )
    told: dict[str, str] = {}

    def train(change: Callable[[torch.optim.Optimizer, bool], object], alone: bool) -> str:
        """Take two steps, the second one with the change. Return the error of the next call."""
        optimizer = torch.optim.Adam(module.parameters(), 1e-3)
        try:
            for number in range(3):
                module(batch).backward()
                if number == 1:
                    change(optimizer, alone and rank == 1)
                optimizer.step()
                optimizer.zero_grad()
        except RankError as error:
            optimizer.zero_grad()
            return str(error)
        return ""

    for name, change in CHANGES.items():
        for alone in (False, True):
            told[f"{name} {alone}"] = train(
                lambda _, other, change=change: change(module, 0.25 if other else 0.125), alone
            )
    for name, edit in OPTIMIZERS.items():
        told[f"{name} True"] = train(
            lambda optimizer, other, edit=edit: edit(optimizer) if other else None, True
        )
    scale = float(sum(p.detach().square().sum() for p in module.parameters()))
    told["computed False"] = train(lambda *_: scale_each(module, scale * (1 + 1e-7 * rank)), True)
    return told
