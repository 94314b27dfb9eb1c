"""Run by any number of processes: methods of the model on a compiled module, and the remedies of
their errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from hosts import quick_hosts
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import autopar
from autopar.errors import RuntimeStateError

X = torch.linspace(-1.0, 1.0, 128, dtype=torch.float64).reshape(8, 16)


class Net(nn.Module):
    """A model with methods that training scripts call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, 16),
        )
        self._scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.norm(torch.tanh(self.first(x)))).square().mean()

    def decode(self, z: Tensor) -> Tensor:
        return self.second(z)

    def configure_optimizers(self, lr: float) -> torch.optim.Optimizer:
        named = dict(self.named_parameters())
        groups = [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr)

    def get_num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [p for p in self.parameters() if p.dim() >= 2], "lr": 0.1}]

    def get_num_untied(self) -> int:
        return sum({p.data_ptr(): p.numel() for p in self.parameters()}.values())

    def estimate_mfu(self, seconds: float) -> float:
        return 6 * self.get_num_params() / seconds

    def scaled(self) -> float:
        return self._scale

    def penalty(self) -> Tensor:
        return self.first.weight.square().sum() * self.scaled()

    def initialize(self) -> None:
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)

    def evaluate(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self(x)

    def crop(self, size: int) -> None:
        self.second.weight = nn.Parameter(self.second.weight[:size])

    @property
    def num(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @staticmethod
    def words() -> str:
        return "of the class"


def made(stages: bool = False) -> tuple[Any, Any]:
    """Return a plain model and the compiled one."""
    torch.manual_seed(0)
    plain = Net().double()
    cut = autopar.constraints.pipeline("gpu", microbatches=1)
    constraints = (cut if stages else autopar.constraints.fsdp(),)
    return plain, autopar.compile(
        copy.deepcopy(plain), example_inputs=(X,), hardware=quick_hosts(), constraints=constraints
    )


def step(module: Any, optimizer: torch.optim.Optimizer) -> None:
    module(X).backward()
    optimizer.step()
    optimizer.zero_grad()


def called(rank: int) -> dict[str, Any]:
    """Return the results of methods, as the largest differences from the plain model for
    numbers."""
    plain, module = made()
    for each in (plain, module):
        optimizer = each.configure_optimizers(0.05)
        for _ in range(2):
            step(each, optimizer)
    found = {
        "trained": apart(module, plain),
        "params": module.get_num_params() - plain.get_num_params(),
        "untied": module.get_num_untied() - plain.get_num_untied(),
        "rate": module.estimate_mfu(2.0) - plain.estimate_mfu(2.0),
        "penalty": module.penalty().item() - plain.penalty().item(),
        "evaluated": module.evaluate(X).item() - plain.evaluate(X).item(),
    }
    module.penalty().backward()
    plain.penalty().backward()
    found["gradient"] = (
        (module.first.weight.grad.full_tensor() - plain.first.weight.grad).abs().max().item()
    )
    module.initialize()
    plain.initialize()
    return {
        **found,
        "initialized": apart(module, plain),
        "words": module.words(),
        "private": hasattr(module, "_scale"),
    }


def apart(module: Any, plain: nn.Module) -> float:
    state = module.full_state_dict()
    return max(
        (state[name].double() - x.double()).abs().max().item()
        for name, x in plain.state_dict().items()
    )


def refused(rank: int, stages: bool) -> dict[str, Any]:
    """Return the errors and the results of their remedies."""
    model, module = made(stages)
    optimizer = module.configure_optimizers(0.05)
    step(module, optimizer)
    average = AveragedModel(module)
    average.update_parameters(module)
    said = {
        "decode": _refusal(lambda: module.decode(X)),
        "part": _refusal(lambda: module.second(X)),
        "crop": _refusal(lambda: module.crop(8)),
        "update_bn": _refusal(lambda: update_bn([X, X], average)),
        "count": _refusal(module.get_num_params),
        "rate": _refusal(lambda: module.estimate_mfu(1.0)),
        "num": _refusal(lambda: module.num),
    }
    plain = copy.deepcopy(model)
    plain.load_state_dict(module.full_state_dict(), assign=True)
    found = {
        "loss": abs(plain(X).item() - module(X).item()),
        "decoded": tuple(plain.decode(X).shape),
    }
    plain = copy.deepcopy(model)
    plain.load_state_dict(average.module.full_state_dict(), assign=True)
    update_bn([X, X], plain)
    average.module.load_state_dict(plain.state_dict())
    found["statistics"] = apart(average.module, plain)
    step(module, optimizer)
    return {**said, **found, "groups": len(module.groups()[0]["params"])}


def _refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except RuntimeStateError as error:
        return str(error)
    return ""
