"""Run by processes: models and batches that differ between ranks."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.constraints import ddp, fsdp, pipeline, tensor_parallel
from autopar.errors import RuntimeStateError

CONSTRAINTS = {"ddp": [ddp()], "fsdp": [fsdp()], "stages": [pipeline("gpu", microbatches=2)]}


class Net(nn.Module):
    """A model with two layers, a buffer, and the mean square as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.scale).square().mean()


def run(rank: int) -> dict[str, Any]:
    """Return per constraint the loss, the values of this rank, the model of rank 0, the warnings,
    and the errors for batches."""
    facts: dict[str, Any] = {}
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    for name, constraints in CONSTRAINTS.items():
        torch.manual_seed(rank)
        model, told = Net(), _Told()
        first = {key: x.clone() for key, x in model.state_dict().items()}
        logging.getLogger("autopar").addHandler(told)
        made = autopar.compile(
            model,
            autopar.Mesh({"gpu": 2}),
            example_inputs=batch,
            hardware="cpu-gloo",
            constraints=constraints,
        )
        logging.getLogger("autopar").removeHandler(told)
        loss = made(batch).detach().item()
        held = {
            key: x.full_tensor() if isinstance(x, DTensor) else x
            for key, x in made.state_dict().items()
        }
        facts[name] = {"loss": loss, "told": told.lines, "expected": _loss(rank, first, batch)}
        facts[name] |= {
            "held": {key: x.tolist() for key, x in held.items()},
            "own": {key: x.tolist() for key, x in first.items()},
        }
        facts[name]["refusal"] = _refusal(model, batch, constraints, rank)
        facts[name]["later"] = _refusal(model, batch, constraints, rank, after=3)
        facts[name]["random"] = _refuse_random_states(constraints, rank)
    return facts


def run_parts(rank: int) -> dict[str, dict[str, str]]:
    """Return per constraint the error for local batches that differ between ranks that must have
    equal ones."""
    torch.manual_seed(0)
    whole, model = torch.randn(8, 8), Net()
    mesh = autopar.Mesh({"data": 2, "tensor": 2})
    facts: dict[str, dict[str, str]] = {}
    layouts = {
        "tensor": [ddp(axes="data"), tensor_parallel("1d", axes="tensor")],
        "whole": [tensor_parallel("1d", axes=("data", "tensor"))],
        "data": [ddp()],
    }
    for name, constraints in layouts.items():
        pm = autopar.compile(
            model,
            mesh,
            example_inputs=whole,
            hardware="cpu-gloo",
            constraints=constraints,
            batch="local",
        )
        splitters = pm.input_layouts["0"].splitters(0)
        num_parts, part = {0: (1, 0), 1: (2, rank // 2), 2: (4, rank)}[len(splitters)]
        own = whole.chunk(num_parts)[part]
        facts[name] = {"splitters": str(splitters), "same": _message(pm, own)}
        facts[name]["other"] = _message(pm, own.flip(0) if rank == 3 else own)
    constraints = layouts["whole"]
    pm = autopar.compile(
        model, mesh, example_inputs=whole, hardware="cpu-gloo", constraints=constraints
    )
    facts["whole"]["remedy"] = _message(pm, whole)
    return facts


def run_weights(rank: int) -> dict[str, list[str]]:
    """Return per constraint the errors of six training steps in which only rank 1 changes a
    parameter before the third step, the fourth step, or never."""
    facts: dict[str, list[str]] = {}
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    for name, constraints in CONSTRAINTS.items():
        facts[name] = []
        for change in (2, 3, None):
            torch.manual_seed(0)
            pm = autopar.compile(
                Net(),
                autopar.Mesh({"gpu": 2}),
                example_inputs=batch,
                hardware="cpu-gloo",
                constraints=constraints,
            )
            optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
            said = ""
            for step in range(6):
                if rank == 1 and step == change:
                    parameter = next(pm.parameters())
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    local.data.mul_(1.5)
                try:
                    pm(batch) if name == "stages" else pm(batch).backward()
                except RuntimeStateError as error:
                    said = f"{step}: {error}"
                    break
                optimizer.step()
                optimizer.zero_grad()
            facts[name].append(said)
    return facts


class Dropping(Net):
    """The same model with a dropout before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


def _refuse_random_states(constraints: Any, rank: int) -> dict[str, Any]:
    """Return the error for random states that differ between ranks, and the losses with equal
    ones."""
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    mesh = autopar.Mesh({"gpu": 2})
    torch.manual_seed(0)
    pm = autopar.compile(
        Dropping(), mesh, example_inputs=batch, hardware="cpu-gloo", constraints=constraints
    )
    pm.manual_seed(3 + rank)
    found: dict[str, Any] = {"seed": _message(pm, batch)}
    pm.manual_seed(3)
    found["losses"] = [pm(batch).item() for _ in range(3)]
    pm.random_state += rank
    found["state"] = _message(pm, batch)
    pm.manual_seed(3)
    found["again"] = [pm(batch).item() for _ in range(3)]
    return found


def _message(pm: nn.Module, batch: torch.Tensor) -> str:
    """Return the error of a call, or an empty string."""
    try:
        pm(batch)
    except RuntimeStateError as error:
        return str(error)
    return ""


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _loss(rank: int, state: dict[str, torch.Tensor], batch: torch.Tensor) -> float:
    plain = Net()
    plain.load_state_dict(state)
    return plain(batch).item() if rank == 0 else float("nan")


def _refusal(
    model: nn.Module, batch: torch.Tensor, constraints: Any, rank: int, *, after: int = 0
) -> str:
    """Return the error for a batch that differs between ranks, after a number of equal batches."""
    made = autopar.compile(
        model,
        autopar.Mesh({"gpu": 2}),
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=constraints,
    )
    for _ in range(after):
        made(batch)
    try:
        made(batch if rank == 0 else batch.flip(0))
    except RuntimeStateError as error:
        return str(error)
    return ""
