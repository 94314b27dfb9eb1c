"""Run by two processes: read outputs other than the loss in evaluation and in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError

PLANS = {
    "data parallel": (autopar.constraints.ddp(),),
    "tensor parallel": (autopar.constraints.tensor_parallel("1d", axes="gpu"),),
    "stages": (autopar.constraints.pipeline("gpu", microbatches=2),),
}


class Classifier(nn.Module):
    """A model that returns its loss and its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.last(torch.relu(self.first(x)))
        return nn.functional.cross_entropy(logits, y), logits


def model_and_batch() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Classifier(), (torch.randn(8, 4), torch.randint(0, 4, (8,)))


def metrics(logits: Any, y: Tensor) -> list[float]:
    """Compute metrics as a script written for one process."""
    return [
        logits.argmax(-1).float().mean().item(),
        float((logits.argmax(-1) == y).float().mean()),
        logits.sum().item(),
    ]


def evaluation(
    rank: int, plan: str, *, inference: bool = False, **options: Any
) -> tuple[list[float], str]:
    """Return the metrics of an evaluation, and the form of outputs in its plan."""
    model, batch = model_and_batch()
    options = {
        "constraints": PLANS[plan],
        "hardware": "cpu-gloo",
        "inference": inference,
        **options,
    }
    module: Any = autopar.compile(
        model, autopar.Mesh({"gpu": 2}), example_inputs=batch, **options
    ).eval()
    with torch.no_grad():
        found = metrics(module(*batch)[1], batch[1])
    made = module.plan if inference else module.variants.known[-1].plan
    return found, made.options["outputs"]


def inference(rank: int, plan: str) -> tuple[list[float], str]:
    return evaluation(rank, plan, inference=True)


def scarce(rank: int) -> tuple[bool, str, Any]:
    """An evaluation whose whole outputs do not fit: whether its logits are a DTensor all the
    same, and how its plan says they come."""
    torch.manual_seed(0)
    model, batch = Wide(), (torch.randn(8, 4),)
    options: dict[str, Any] = {
        "constraints": PLANS["data parallel"],
        "hardware": "cpu-gloo",
        "memory_bytes": 400_000,
    }
    module: Any = autopar.compile(
        model, autopar.Mesh({"gpu": 2}), example_inputs=batch, **options
    ).eval()
    with torch.no_grad():
        logits = module(*batch)[1]
    made = module.variants.known[-1].plan
    return (
        isinstance(logits, torch.distributed.tensor.DTensor),
        made.options["outputs"],
        made.prediction.peak_bytes,
    )


class Wide(nn.Module):
    """A model whose output is its largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        return hidden.pow(2).mean(), hidden.expand(8, 10_000).relu()


def training(rank: int) -> list[str]:
    """What a script is told that reads logits in training as if they were whole; gathered, they
    are right."""
    model, batch = model_and_batch()
    options: dict[str, Any] = {"constraints": PLANS["data parallel"], "hardware": "cpu-gloo"}
    wanted = [*metrics(model(*batch)[1], batch[1])]
    module: Any = autopar.compile(model, autopar.Mesh({"gpu": 2}), example_inputs=batch, **options)
    loss, logits = module(*batch)
    told = []
    for read in (
        lambda: logits.argmax(-1).float().mean().item(),
        lambda: logits.argmax(-1) == batch[1],
        lambda: float(logits.sum()),
    ):
        try:
            read()
        except AutoparError as error:
            told.append(str(error))
    torch.testing.assert_close(metrics(logits.full_tensor(), batch[1]), wanted)
    assert torch.equal(logits.softmax(-1).full_tensor().argmax(-1), logits.full_tensor().argmax(-1))
    loss.backward()
    return told
