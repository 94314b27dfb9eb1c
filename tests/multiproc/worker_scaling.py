"""Run by several processes: gradient scalers with stages and microbatches, compared with one
process and the plain model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.constraints import Constraint, ddp, fsdp, megatron, pipeline
from autopar.errors import RankError

SIZE = 16
LAYOUTS: dict[str, tuple[int | None, list[Constraint]]] = {
    "whole batches": (1, [fsdp()]),
    "sharded in two": (2, [fsdp()]),
    "replicated in three": (3, [ddp()]),
    "tensor parallel in two": (2, [megatron(tp=2)]),
    "stages in one": (None, [pipeline(microbatches=1)]),
    "stages in two": (None, [pipeline(microbatches=2)]),
    "stages in three": (None, [pipeline(microbatches=3)]),
    "interleaved": (None, [pipeline(microbatches=2, schedule="interleaved_1f1b")]),
}


class Net(nn.Module):
    """Four residual layers in float16 and a loss in float32, which may be tiny; `noise` draws
    and `normed` changes buffers."""

    def __init__(
        self,
        factor: float = 1.0,
        *,
        noise: float = 0.0,
        normed: bool = False,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE)) for _ in range(4)
        )
        self.drop, self.norm = nn.Dropout(noise), nn.BatchNorm1d(SIZE) if normed else nn.Identity()
        self.out, self.factor, self.dtype = nn.Linear(SIZE, SIZE), factor, dtype

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            for layer in self.layers:
                x = x + layer(self.drop(x))
            x = self.out(self.norm(x))
        return ((x.float() - y) ** 2).mean() * self.factor


class Spiked(nn.Module):
    """Of float32; the gradients of the last layer, and of that alone, are as large as `y`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = (
            nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4)),
            nn.Linear(SIZE, 1),
        )
        with torch.no_grad():
            self.out.weight.mul_(1e-3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return ((self.out(x) - y[:, :1]) ** 2).mean()


class Columns(nn.Module):
    """Of float32; the gradient of the last element of `weight`, and of that alone, is as large
    as `y`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1.0, SIZE))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (torch.cat([x[:, :-1], y[:, -1:]], 1) * self.weight).mean()


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12, SIZE, generator=generator), torch.randn(12, SIZE, generator=generator)


def made(build: Callable[[], nn.Module], name: str, **options: Any) -> tuple[nn.Module, Any]:
    """Return the plain model and a compiled copy."""
    num, asked = LAYOUTS[name]
    torch.manual_seed(0)
    plain = build()
    options |= {} if num is None else {"num_microbatches": num}
    module = autopar.compile(
        copy.deepcopy(plain),
        example_inputs=batch(),
        hardware="h100-sxm",
        constraints=asked,
        **options,
    )
    return plain, module


def apart(module: Any, plain: nn.Module, *, gradients: bool = False) -> float:
    """The largest error of a parameter that is here, or of its gradient, relative to its largest
    element."""
    theirs, worst = dict(plain.named_parameters()), 0.0
    for name, p in module.named_parameters():
        if not isinstance(p, DTensor):
            continue
        mine, wanted = (p.grad, theirs[name].grad) if gradients else (p, theirs[name].detach())
        assert mine is not None and wanted is not None
        whole = mine.detach().full_tensor()
        if not torch.equal(whole.isfinite(), wanted.isfinite()):
            return math.inf
        known = wanted.isfinite()
        worst = max(
            worst,
            float((whole - wanted)[known].abs().max() / (wanted[known].abs().max() + 1e-30))
            if known.any()
            else 0.0,
        )
    return worst


def scaler_of(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**24, **options})


def first_gradients(rank: int, names: list[str], *, by_precision: bool = False) -> dict[str, float]:
    """Errors of the gradients of a tiny loss after the first call, which nothing came before.

    Args:
        by_precision: whether the plan reads fp32 parameters in fp16; else the model casts by
            itself.
    """
    found = {}
    for name in names:
        options: dict[str, Any] = {"precision": "fp16"} if by_precision else {}
        plain, module = made(
            lambda: Net(1e-7, dtype=torch.float32 if by_precision else torch.float16),
            name,
            **options,
        )
        for model in (plain, module):
            scaler, optimizer = scaler_of(), torch.optim.SGD(model.parameters(), 0.0)
            scaler.scale(model(*batch())).backward()
            scaler.unscale_(optimizer)
        found[name] = apart(module, plain, gradients=True)
    return found


Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return one optimizer for matrices and another for vectors."""
    own = [list(p for p in model.parameters() if (p.dim() > 1) == wide) for wide in (True, False)]
    return [torch.optim.SGD(own[0], 0.02), torch.optim.AdamW(own[1], 1e-3)]


def by_stage(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One for the first layers and one for the last: a stage has no parameter in one of them."""
    named = list(model.named_parameters())
    early = [p for name, p in named if name.startswith(("layers.0", "layers.1"))]
    late = [p for name, p in named if name.startswith("out")]
    groups = ({"params": early}, {"params": late})
    return [torch.optim.SGD([group, {"params": []}], 0.02) for group in groups]


OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)],
    "foreach": lambda model: [torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)],
    "fused": lambda model: [torch.optim.AdamW(model.parameters(), 1e-3, fused=True)],
    "two optimizers": halves,
    "an optimizer for each stage": by_stage,
}


Loop = tuple[Callable[[], nn.Module], str, float, int, bool]
"""The model, which optimizers, the scale to begin with, over how many batches gradients are
added up, and whether they are clipped."""
LOOPS: dict[str, Loop] = {
    "momentum": (Net, "momentum", 2.0**15, 1, True),
    "foreach": (Net, "foreach", 2.0**15, 1, True),
    "fused": (Net, "fused", 2.0**15, 1, True),
    "fused, not clipped": (Net, "fused", 2.0**15, 1, False),
    "two optimizers": (Net, "two optimizers", 2.0**15, 1, True),
    "accumulation": (Net, "momentum", 2.0**15, 2, True),
    "normed": (lambda: Net(normed=True), "momentum", 2.0**15, 1, True),
    "one stage overflows": (Spiked, "momentum", 2.0**118, 1, True),
    "one stage overflows, fused": (Spiked, "fused", 2.0**118, 1, False),
    "one stage overflows, foreach": (Spiked, "foreach", 2.0**118, 1, False),
    "one shard overflows": (Columns, "momentum", 2.0**118, 1, True),
    "one shard overflows, fused": (Columns, "fused", 2.0**118, 1, False),
    "an optimizer for each stage": (Spiked, "an optimizer for each stage", 2.0**118, 1, True),
}


def train(model: Any, loop: Loop, *, clip: Callable[[], Any]) -> list[float]:
    """The scales of an ordinary loop, whose scaler grows after two steps; in the third of six
    steps a batch makes gradients overflow."""
    _, kind, init_scale, every, clips = loop
    optimizers, scaler, scales = (
        OPTIMIZERS[kind](model),
        scaler_of(init_scale=init_scale, growth_interval=2),
        [],
    )
    for step in range(6 * every):
        x, y = batch(step)
        loss = model(x, y * 1e6 if step // every == 2 else y) / every
        scaler.scale(loss).backward()
        if (step + 1) % every:
            continue
        for optimizer in optimizers if clips else ():
            scaler.unscale_(optimizer)
        if clips:
            clip()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def loops(rank: int, layout: str, names: list[str]) -> dict[str, Any]:
    """The scales of each loop on one process and here, and the error of the parameters after it."""
    told = {}
    for name in names:
        plain, module = made(LOOPS[name][0], layout)
        wanted = train(
            plain, LOOPS[name], clip=partial(nn.utils.clip_grad_norm_, [*plain.parameters()], 1.0)
        )
        found = train(module, LOOPS[name], clip=partial(module.clip_grad_norm_, 1.0))
        told[name] = wanted, found, apart(module, plain)
    return told


def usual(rank: int) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
    """The most common ones: gradients of autocast and of a precision, and loops."""
    narrow = first_gradients(rank, ["stages in two"], by_precision=True)
    gradients = first_gradients(rank, ["sharded in two", "stages in two"])
    return (
        gradients,
        narrow,
        loops(rank, "stages in two", ["momentum", "one stage overflows, fused"]),
    )


def narrow_gradients(rank: int) -> dict[str, float]:
    """Of a precision, in every layout."""
    return first_gradients(rank, [*LAYOUTS], by_precision=True)


def unequal_scalers(rank: int) -> tuple[float, str]:
    """Step an unrelated model with a scaler on rank 0 only, then a compiled one on rank 0 only.

    Returns:
        The step of the unrelated model, and the error of the compiled one.
    """
    _, module = made(Net, "stages in two")
    other = nn.Linear(1, 1, bias=False)
    before = other.weight.item()
    if rank == 0:
        optimizer, scaler = torch.optim.SGD(other.parameters(), 1.0), torch.amp.GradScaler("cpu")
        scaler.scale(other(torch.ones(1, 1)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    try:
        scaler.scale(module(*batch())).backward()
        if rank == 0:
            scaler.step(optimizer)
        module(*batch())
    except RankError as error:
        return before - other.weight.item(), str(error)
    return before - other.weight.item(), ""
