"""Run by several processes: input gradients, compared with the plain model."""

from __future__ import annotations

import copy
from typing import Any

import given_back
import torch
from torch import Tensor, nn

import autopar
from autopar import constraints
from autopar.errors import RuntimeStateError
from autopar.program.splitting import local_part

PLANS: dict[str, tuple[str, dict[str, int], tuple[Any, ...]]] = {
    "shifted ddp": ("shifted", {"a": 2}, (constraints.ddp(),)),
    "convolutions fsdp": ("convolutions", {"a": 2}, (constraints.fsdp(),)),
    "llama grid": (
        "llama",
        {"a": 2, "b": 2},
        (constraints.fsdp(axes="a"), constraints.tensor_parallel("1d", axes="b")),
    ),
}
STEPS, LEARNING_RATE = 3, 0.05


def run(rank: int, plan: str) -> dict[str, float]:
    """Return the largest errors of input gradients for global batches, and for local batches if
    there is a loss."""
    kind, axes, asked = PLANS[plan]
    plain, batch = getattr(given_back, kind)()
    plain, batch = (
        plain.double(),
        {name: x.detach().double() if x.is_floating_point() else x for name, x in batch.items()},
    )
    wanted = gradients(plain, batch)
    options: dict[str, Any] = {
        "hardware": "cpu-gloo",
        "constraints": asked,
        "example_inputs": asking(batch),
    }
    told = {}
    for way in ("global", "local") if kind != "convolutions" else ("global",):
        module: Any = autopar.compile(
            copy.deepcopy(plain), autopar.Mesh(axes), batch=way, **options
        )
        sizes, place = tuple(module.device_mesh.shape), module.device_mesh.get_coordinate()

        def part(
            name: str,
            x: Tensor,
            way: str = way,
            module: Any = module,
            sizes: Any = sizes,
            place: Any = place,
        ) -> Tensor:
            return (
                x
                if way == "global"
                else local_part(x, module.input_layouts[name], sizes, x.shape, place)
            )

        found = gradients(module, {name: part(name, x) for name, x in batch.items()})
        assert found.keys() == wanted.keys() != set()
        told[way] = max(
            float((x - part(name, wanted[name])).abs().max()) for name, x in found.items()
        )
        told[f"{way} split"] = float(
            any(not layout.is_replicated for layout in module.input_layouts.values())
        )
    return told


def asking(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in batch.items()}


def gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    given = asking(batch)
    found = model(**given)
    loss = found if isinstance(found, Tensor) else found.loss
    (loss if loss.ndim == 0 else loss.square().sum()).backward()
    return {name: x.grad for name, x in given.items() if x.grad is not None}


def apart(rank: int) -> str:
    """Return the error if the input requires a gradient on only one of the ranks."""
    module: Any = autopar.compile(
        nn.Linear(4, 4),
        autopar.Mesh({"a": 2}),
        example_inputs=(torch.ones(8, 4),),
        hardware="cpu-gloo",
    )
    try:
        module(torch.ones(8, 4, requires_grad=rank == 0))
    except RuntimeStateError as error:
        return str(error)
    return "nothing"


def adversaries(rank: int) -> dict[str, list[float]]:
    """Return the losses of a generator and a discriminator that are trained against each other,
    plain and compiled separately."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6)).double()
    discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()
    noise, real = torch.randn(STEPS, 8, 4).double(), torch.randn(STEPS, 8, 6).double()
    mesh, options = (
        autopar.Mesh({"a": 2}),
        {"hardware": "cpu-gloo", "constraints": (constraints.fsdp(),)},
    )
    ours = (
        autopar.compile(copy.deepcopy(generator), mesh, example_inputs=(noise[0],), **options),
        autopar.compile(
            copy.deepcopy(discriminator),
            mesh,
            example_inputs=(real[0].clone().requires_grad_(),),
            **options,
        ),
    )
    told = {
        "plain": played(generator, discriminator, noise, real),
        "ours": played(*ours, noise, real),
    }
    pairs = [
        (p, q)
        for mine, plain in zip(ours, (generator, discriminator), strict=True)
        for p, q in _pairs(mine, plain)
    ]
    told["parameters"] = [float((p.full_tensor() - q).abs().max()) for p, q in pairs]
    told["sharded"] = [float(any(not x.is_replicate() for x in p.placements)) for p, _ in pairs]
    return told


def _pairs(mine: Any, plain: nn.Module) -> Any:
    return zip(mine.parameters(), plain.parameters(), strict=True)


def played(generator: Any, discriminator: Any, noise: Tensor, real: Tensor) -> list[float]:
    optimizers = [
        torch.optim.Adam(m.parameters(), lr=LEARNING_RATE) for m in (generator, discriminator)
    ]
    losses: list[float] = []
    for z, x in zip(noise, real, strict=True):
        with torch.no_grad():
            fake = generator(z)
        score = (
            nn.functional.softplus(-discriminator(x)).mean()
            + nn.functional.softplus(discriminator(fake)).mean()
        )
        score.backward()
        optimizers[1].step()
        fooled = nn.functional.softplus(-discriminator(generator(z))).mean()
        fooled.backward()
        optimizers[0].step()
        losses += [score.item(), fooled.item()]
        for (
            optimizer
        ) in optimizers:  # the discriminator also has gradients of the loss of the generator
            optimizer.zero_grad()
    return losses
