"""Run by any number of processes: an epoch with batches of several lengths and sizes, and
evaluation."""

from __future__ import annotations

from typing import Any

import torch

import autopar
from autopar.api import cached_captures
from autopar.errors import AutoparError, RuntimeStateError
from benchmarks.common import load_profile
from benchmarks.zoo import build

PLANS: dict[str, tuple[tuple[Any, ...], dict[str, int]]] = {
    "free": ((), {"gpu": 2}),
    "fully sharded": ((autopar.constraints.fsdp(),), {"gpu": 2}),
    "tensor parallel": ((autopar.constraints.tensor_parallel("1d", axes="gpu"),), {"gpu": 2}),
    "zero 1": ((autopar.constraints.megatron(dp=2, zero=1),), {"gpu": 2}),
    "stages": ((autopar.constraints.pipeline("gpu", microbatches=2),), {"gpu": 2}),
    "stages of two": (
        (
            autopar.constraints.pipeline("stage", schedule="interleaved_1f1b"),
            autopar.constraints.fsdp(),
        ),
        {"stage": 2, "gpu": 2},
    ),
    "uneven": ((autopar.constraints.fsdp(),), {"gpu": 3}),
    "free in stages": ((autopar.constraints.pipeline(),), {"node": 2, "gpu": 2}),
}
CALLS = ((8, 16), (8, 12), (6, 16), (8, 16), (6, 16))


def batch_of(samples: int, tokens: int) -> dict[str, torch.Tensor]:
    _, batch = build("gpt2", batch=samples, seq=tokens, seed=samples + tokens)
    return {name: x for name, x in batch.items() if isinstance(x, torch.Tensor)}


def train(module: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the loss of each call, and after each step that of another batch in eval mode."""
    losses = []
    for samples, tokens in CALLS:
        module.train()
        loss = module(**batch_of(samples, tokens)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        module.eval()
        with torch.no_grad():
            losses.append(module(**batch_of(4, 16)).loss.item())
    return losses


def model_of(plan: str = "") -> torch.nn.Module:
    return build("gpt2", dropout=0.0, n_layer=4 if "stages" in plan else 1)[0]


def epoch(rank: int, plan: str) -> dict[str, Any]:
    """Losses here, and what programs there are."""
    constraints, mesh = PLANS[plan]
    options: dict[str, Any] = {
        "hardware": load_profile("cpu-gloo-frictionless"),
        "outputs": "loss",
        "constraints": constraints,
    }
    module: Any = autopar.compile(
        model_of(plan), autopar.Mesh(mesh), example_inputs=batch_of(8, 16), **options
    )
    own = {id(p) for p in module.parameters()}
    losses = train(module, torch.optim.SGD(module.parameters(), lr=0.5))
    same = all({id(p) for p in each.parameters()} <= own for each in module.variants.known)
    return {"losses": losses, "programs": 1 + len(module.variants.known), "same": same}


def apart(rank: int) -> str:
    """Return the error of ranks that pass batches of different shapes."""
    module: Any = autopar.compile(
        model_of(),
        autopar.Mesh({"gpu": 2}),
        example_inputs=batch_of(8, 16),
        hardware="cpu-gloo",
        outputs="loss",
    )
    try:
        module(**batch_of(4 + rank, 16))
    except RuntimeStateError as error:
        return str(error)
    return ""


def captures(rank: int, num_microbatches: int) -> list[tuple[int, bool]]:
    """The samples of each capture of this rank, and whether it has gradients: of a call in train
    mode, of one in eval mode, and of a larger batch."""
    made: list[tuple[int, bool]] = []
    capture = cached_captures.capture

    def counting(model: Any, args: Any, kwargs: Any, **how: Any) -> Any:
        made.append((kwargs["input_ids"].shape[0], not how["inference"]))
        return capture(model, args, kwargs, **how)

    cached_captures.capture = counting
    module: Any = autopar.compile(
        model_of(),
        autopar.Mesh({"gpu": 2}),
        hardware="cpu-gloo",
        outputs="loss",
        num_microbatches=num_microbatches,
    )
    module(**batch_of(8, 16)).loss.backward()
    module.eval()
    with torch.no_grad():
        module(**batch_of(8, 16))
    module.train()
    module(**batch_of(12, 16)).loss.backward()
    return made


def refused(rank: int) -> str:
    """Return the error on this rank if the model cannot be captured."""
    model = model_of()
    model.forward = lambda input_ids, labels: {}[str(input_ids)]  # type: ignore[assignment]
    try:
        autopar.compile(model, autopar.Mesh({"gpu": 2}), example_inputs=batch_of(8, 16))
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def unable(rank: int) -> float:
    """Return the loss of a batch of one sample, which data parallelism cannot split."""
    constraints = (autopar.constraints.ddp(),)
    options: dict[str, Any] = {
        "hardware": "cpu-gloo",
        "outputs": "loss",
        "constraints": constraints,
    }
    module: Any = autopar.compile(
        model_of(), autopar.Mesh({"gpu": 2}), example_inputs=batch_of(8, 16), **options
    )
    return float(module(**batch_of(1, 16)).loss.item())
