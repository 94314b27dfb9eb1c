"""Run by several processes: an outer loss computed on every rank, compared with the plain
model."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import no_loss
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import constraints
from autopar.core.layout import local_shape
from autopar.errors import RuntimeStateError
from autopar.program.splitting import local_part

PLANS: dict[str, tuple[str, dict[str, int], tuple[Any, ...]]] = {
    "several ddp": ("several", {"a": 2}, (constraints.ddp(),)),
    "several fsdp uneven": ("several", {"a": 3}, (constraints.fsdp(),)),
    "convolutions fsdp": ("convolutions", {"a": 2}, (constraints.fsdp(),)),
    "llama heads": ("llama_layer", {"a": 2}, (constraints.tensor_parallel("1d", axes="a"),)),
    "llama grid": (
        "llama_layer",
        {"a": 2, "b": 2},
        (constraints.fsdp(axes="a"), constraints.tensor_parallel("1d", axes="b")),
    ),
}
OUTPUTS = ("auto", "dtensor", "local")
STEPS, LEARNING_RATE = 3, 0.1


def run(rank: int, plan: str) -> dict[str, Any]:
    """Per way in which outputs come: losses, the largest error of a parameter, and that of the
    outputs of an evaluation."""
    return {outputs: follow(plan, outputs) for outputs in OUTPUTS}


def follow(plan: str, outputs: str) -> dict[str, Any]:
    kind, axes, asked = PLANS[plan]
    plain, batch = getattr(no_loss, kind)()
    plain = plain.double()
    batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    mesh = autopar.Mesh(axes)
    options: dict[str, Any] = {"hardware": "cpu-gloo", "constraints": asked, "outputs": outputs}
    module: Any = autopar.compile(copy.deepcopy(plain), mesh, example_inputs=batch, **options)
    losses: list[list[float]] = [[], []]
    for model, seen in zip((plain, module), losses, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for _ in range(STEPS):
            found = _named(model(**batch))
            in_parts = outputs == "local" and model is module
            loss = (
                _loss_of_parts(module, found)
                if in_parts
                else loss_of({name: _full(x) for name, x in found.items()})
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    facts = {
        "losses": losses,
        "parts": [t.shape != _shape(module, t) for t in module.program.outputs],
    }
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    facts["parameters"] = largest((p.full_tensor() - q).abs().max() for p, q in pairs)
    facts["sharded"] = sum(
        not all(x.is_replicate() for x in p.placements) for p in module.parameters()
    )
    facts["moved"] = losses[0][0] - losses[0][-1]
    if outputs != "local":
        with torch.no_grad():
            ours, theirs = _named(module.eval()(**batch)), _named(plain.eval()(**batch))
        facts["evaluated"] = largest(
            (_full(ours[name]) - x).abs().max() for name, x in theirs.items()
        )
    return facts


def largest(errors: Iterable[Tensor]) -> float:
    """Return the largest value, or NaN if one is NaN, which `max` of Python would skip."""
    return float(torch.stack(list(errors)).max())


def loss_of(found: dict[str, Tensor]) -> Tensor:
    """Return a scalar that depends on every differentiable output, with a different weight per
    element."""
    return torch.stack(
        [
            (weights(name, x.shape).to(x) * x).sum() + x.pow(2).sum() / math.prod(x.shape)
            for name, x in found.items()
        ]
    ).sum()


def weights(name: str, shape: Any) -> Tensor:
    return torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).reshape(
        tuple(shape)
    ) / math.prod(shape)


def _loss_of_parts(module: Any, found: dict[str, Tensor]) -> Tensor:
    """The same of this rank's parts: what a part of the whole loss' gradient is, whatever the
    other ranks hold."""
    terms = []
    sizes, place = tuple(module.device_mesh.shape), module.device_mesh.get_coordinate()
    for t in module.program.outputs:
        if t.has_gradient:
            mine = local_part(weights(t.name, t.shape), t.layout, sizes, t.view, place)
            terms.append(
                (mine * found[t.name]).sum() + found[t.name].pow(2).sum() / math.prod(t.shape)
            )
    return torch.stack(terms).sum()


def _named(returned: Any) -> dict[str, Tensor]:
    """Return the differentiable outputs by path."""
    pairs = returned.items() if hasattr(returned, "items") else [("", returned)]
    return {name: x for name, x in pairs if isinstance(x, Tensor) and x.is_floating_point()}


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _shape(module: Any, tensor: Any) -> tuple[int, ...]:
    return local_shape(
        tensor.shape,
        tensor.layout,
        tuple(module.device_mesh.shape),
        module.device_mesh.get_coordinate(),
    )


class Heads(nn.Module):
    """A model with two heads. A loss may use only one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.body(x))
        return self.left(hidden), self.right(hidden)


def heads(rank: int) -> list[Any]:
    """Return errors of gradients with one head, both heads and the other head, and the parameters
    without a gradient."""
    torch.manual_seed(0)
    plain, x = Heads().double(), torch.randn(8, 8, dtype=torch.float64)
    options: dict[str, Any] = {"hardware": "cpu-gloo", "constraints": (constraints.ddp(),)}
    module: Any = autopar.compile(
        copy.deepcopy(plain), autopar.Mesh({"a": 2}), example_inputs=(x,), **options
    )
    told: list[Any] = []
    for used in ((0,), (0, 1), (1,)):
        for model in (plain, module):
            model.zero_grad()
            found = model(x)
            torch.stack(
                [found[place].pow(2).sum() + found[place].sum() for place in used]
            ).sum().backward()
        pairs = list(zip(module.named_parameters(), plain.parameters(), strict=True))
        none = [name for (name, p), _ in pairs if p.grad is None]
        assert none == [name for (name, _), q in pairs if q.grad is None]
        errors = (
            (p.grad.full_tensor() - q.grad).abs().max() for (_, p), q in pairs if q.grad is not None
        )
        told.append((none, largest(errors)))
    return told


def expanded(rank: int) -> float:
    """Return the error of gradients that begin with an expanded scalar."""
    torch.manual_seed(0)
    plain, x = nn.Linear(8, 4), torch.randn(8, 8)
    module: Any = autopar.compile(
        copy.deepcopy(plain), autopar.Mesh({"a": 2}), example_inputs=(x,), hardware="cpu-gloo"
    )
    for model in (plain, module):
        model(x).sum().backward()
    return float((module.weight.grad.full_tensor() - plain.weight.grad).abs().max())


def apart(rank: int) -> str:
    """Return the error of a loss that differs between ranks."""
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    module: Any = autopar.compile(
        Heads(), autopar.Mesh({"a": 2}), example_inputs=(x,), hardware="cpu-gloo"
    )
    left, _ = module(x)
    torch.manual_seed(100 + rank)
    try:
        nn.functional.dropout(left).sum().backward()
    except RuntimeStateError as error:
        return str(error)
    return ""
