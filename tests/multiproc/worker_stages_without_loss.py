"""Run by several processes: stages of a model without a loss, compared with the plain model."""

from __future__ import annotations

import copy
import math
from typing import Any

import no_loss
import torch
from least_peak import least_peak
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from worker_outer_loss import largest

import autopar
from autopar import constraints
from autopar.errors import RuntimeStateError
from autopar.plans import Plan

Wish = tuple[str, dict[str, int], tuple[Any, ...]]
PLANS: dict[str, Wish] = {
    "four, tied": ("gpt2", {"stage": 2}, (constraints.pipeline("stage", microbatches=4),)),
    "four stages": ("layers", {"stage": 4}, (constraints.pipeline("stage", microbatches=4),)),
}
FURTHER: dict[str, Wish] = {
    "one microbatch": ("layers", {"stage": 2}, (constraints.pipeline("stage", microbatches=1),)),
    "two, sharded": (
        "layers",
        {"stage": 2, "data": 2},
        (constraints.pipeline("stage", microbatches=2), constraints.fsdp(axes="data")),
    ),
}
STEPS = 3


def run(rank: int, names: list[str]) -> dict[str, Any]:
    return {name: follow(*(PLANS | FURTHER)[name]) for name in names}


def follow(kind: str, axes: dict[str, int], asked: tuple[Any, ...]) -> dict[str, Any]:
    """Errors over some steps with clipping, and of an evaluation of another batch; the peak,
    measured and predicted."""
    plain, batch = built(kind)
    module: Any = autopar.compile(
        copy.deepcopy(plain),
        autopar.Mesh(axes),
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=asked,
    )
    losses: list[list[float]] = [[], []]
    for model, seen in zip((plain, module), losses, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            loss = loss_of(model(**batch))
            loss.backward()
            clip = (
                model.clip_grad_norm_
                if model is module
                else lambda most: torch.nn.utils.clip_grad_norm_(plain.parameters(), most)
            )
            norm = clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.item(), float(norm)]
    facts: dict[str, Any] = {
        "losses": losses,
        "moved": losses[0][0] - losses[0][-2],
        "parameters": worst(module, plain),
    }
    facts["held"] = sum(isinstance(p, DTensor) for p in module.parameters()) < len(
        list(plain.parameters())
    )
    facts["second"] = _refusal_of_second_derivatives(module, batch)
    smaller = {name: x[:4] for name, x in batch.items()}
    with torch.no_grad():
        ours, theirs = named(module.eval()(**smaller)), named(plain.eval()(**smaller))
    facts["evaluated"] = largest((ours[name] - x).abs().max() for name, x in theirs.items())
    variant = module.variants.known[-1].plan
    facts["forward alone"] = variant.options["inference"] and variant.pipeline is not None
    facts["peak"] = _peak(module.train(), batch)
    return facts


def _refusal_of_second_derivatives(module: Any, batch: dict[str, Tensor]) -> str:
    trained = [p for p in module.parameters() if p.requires_grad]
    try:
        torch.autograd.grad(loss_of(module(**batch)), trained, create_graph=True, allow_unused=True)
    except RuntimeStateError as error:
        return error.what
    return ""


def _peak(module: Any, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Return the peak live bytes of a step, measured and predicted, without optimizer state."""

    def step() -> None:
        outputs = [x for x in named(module(**batch)).values() if x.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])

    plan: Plan = module.plan
    assert plan.pipeline is not None
    prediction = plan.pipeline.stages[module._stage_rank].prediction
    held = [*module.parameters(), *module.buffers(), *batch.values()]
    peak = least_peak(held, step, before=lambda: module.zero_grad(set_to_none=True), times=5)
    return peak, prediction.peak_bytes - prediction.memory_bytes["optimizer"]


def built(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    plain, batch = getattr(no_loss, kind)()
    return plain.double().train(), batch


def named(returned: Any) -> dict[str, Tensor]:
    return {
        name: x for name, x in returned.items() if isinstance(x, Tensor) and x.is_floating_point()
    }


def loss_of(returned: Any) -> Tensor:
    """Return a scalar with a different weight per element."""
    terms = []
    for x in named(returned).values():
        weights = torch.linspace(-1, 1, math.prod(x.shape), dtype=x.dtype).reshape(x.shape)
        terms.append((weights * x).sum() / math.prod(x.shape) + x.pow(2).mean())
    return torch.stack(terms).sum()


def worst(module: Any, plain: nn.Module, *, gradients: bool = False) -> float:
    """The largest error of a parameter that is here, or of its gradient; infinite where one has
    none and the other has one."""
    theirs = dict(plain.named_parameters())
    errors = [torch.zeros((), dtype=torch.float64)]
    for name, p in module.named_parameters():
        if not isinstance(p, DTensor):
            continue
        mine, wanted = (p.grad, theirs[name].grad) if gradients else (p, theirs[name])
        if (mine is None) != (wanted is None):
            return math.inf
        if mine is not None and wanted is not None:
            errors.append((mine.full_tensor() - wanted).abs().max())
    return largest(errors)


def parts(rank: int) -> dict[str, Any]:
    """Errors of gradients where the loss leaves out outputs and where calls share a backward, one
    stage training nothing; and what is said where what backward reads was changed, and where it
    comes twice."""
    plain, batch = built("layers")
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not name.startswith(("embedding", "layers.0", "layers.1")))
    asked = (constraints.pipeline("stage", microbatches=2, cuts=["layers.2"]),)
    options: dict[str, Any] = {
        "example_inputs": batch,
        "hardware": "cpu-gloo",
        "constraints": asked,
    }
    module: Any = autopar.compile(copy.deepcopy(plain), autopar.Mesh({"stage": 2}), **options)
    told: dict[str, Any] = {}
    for which in ("logits", "size"):
        told[which] = _gradients(
            module, plain, batch, lambda found, which=which: found[0][which].pow(2).sum()
        )
    told["two calls"] = _gradients(
        module, plain, batch, lambda found: (found[0]["logits"] * found[1]["logits"]).sum()
    )
    told["nothing trained here"] = not any(
        p.requires_grad for p in module.parameters() if isinstance(p, DTensor)
    )
    found = module(**batch)["logits"]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1)
    told["changed"] = _said(lambda: found.sum().backward())
    again = module(**batch)["logits"].sum()
    again.backward(retain_graph=True)
    told["twice"] = _said(again.backward)
    return told


class Gated(nn.Module):
    """One of its outputs has an infinite derivative; its parts have names that a module of
    autopar might have."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.finish, self.kept = (
            nn.Linear(8, 8),
            nn.Linear(8, 4),
            nn.Parameter(torch.zeros(8)),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.begin(x)) * (1 + self.kept)
        return {
            "out": self.finish(hidden),
            "gate": self.kept.pow(2).sqrt(),
            "early": hidden.pow(2).sqrt(),
        }


def unused(rank: int) -> list[float]:
    """Errors of gradients, in one microbatch and in two, where what has infinite ones has no
    part in the loss."""
    errors = []
    for num in (1, 2):
        torch.manual_seed(0)
        plain, batch = Gated().double(), {"x": torch.randn(4, 8, dtype=torch.float64)}
        asked = (constraints.pipeline("stage", microbatches=num, cuts=["finish"]),)
        options: dict[str, Any] = {"hardware": "cpu-gloo", "constraints": asked}
        module: Any = autopar.compile(
            copy.deepcopy(plain), autopar.Mesh({"stage": 2}), example_inputs=batch, **options
        )
        for _ in range(2):
            errors.append(
                _gradients(
                    module, plain, batch, lambda found: (found[0]["out"] * found[1]["out"]).sum()
                )
            )
    return errors


def interleaved(rank: int) -> tuple[float, float, bool]:
    """Errors of a model with a loss in two stages a rank: of gradients, and of an evaluation,
    which is planned as forward alone."""
    plain, (_, batch) = WithLoss().double(), built("layers")
    asked = (constraints.pipeline("stage", microbatches=2, schedule="interleaved_1f1b"),)
    options: dict[str, Any] = {
        "example_inputs": batch,
        "hardware": "cpu-gloo",
        "constraints": asked,
    }
    module: Any = autopar.compile(copy.deepcopy(plain), autopar.Mesh({"stage": 2}), **options)
    for model in (plain, module):
        model(**batch).backward()
    with torch.no_grad():
        error = abs(float(module.eval()(**batch) - plain.eval()(**batch)))
    alone = module.variants.known[-1].plan.options["inference"]
    return worst(module, plain, gradients=True), error, alone


def large(rank: int) -> tuple[int, int]:
    """Live bytes of a forward alone whose outputs are the largest tensors, and not contiguous,
    measured and predicted."""
    torch.manual_seed(0)
    model, batch = Transposed(), (torch.randn(16, 8),)
    asked = (constraints.pipeline("stage", microbatches=1),)
    options: dict[str, Any] = {
        "example_inputs": batch,
        "hardware": "cpu-gloo",
        "constraints": asked,
        "inference": True,
    }
    module: Any = autopar.compile(model, autopar.Mesh({"stage": 2}), **options)
    held = [*module.parameters(), *module.buffers(), *batch]
    return least_peak(held, lambda: module(*batch), times=5), module.plan.pipeline.stages[
        rank
    ].prediction.peak_bytes


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 512)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.last(torch.relu(self.first(x)))
        return found.t(), found + 1


def changed(rank: int) -> str:
    """Return the error for a changed output that backward of the first stage reads."""
    plain, batch = built("layers")
    asked = (constraints.pipeline("stage", microbatches=1, cuts=["layers.3"]),)
    module: Any = autopar.compile(
        plain,
        autopar.Mesh({"stage": 2}),
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=asked,
    )
    found = module(**batch)["early"]
    found.detach().mul_(2)
    return _said(lambda: found.sum().backward())


def apart(rank: int) -> str:
    """Return the error of a loss that differs between ranks."""
    plain, batch = built("layers")
    asked = (constraints.pipeline("stage", microbatches=2),)
    module: Any = autopar.compile(
        plain,
        autopar.Mesh({"stage": 2}),
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=asked,
    )
    found = module(**batch)["logits"]
    torch.manual_seed(100 + rank)
    return _said(lambda: nn.functional.dropout(found).sum().backward())


def _gradients(module: Any, plain: nn.Module, batch: dict[str, Tensor], loss: Any) -> float:
    for model in (plain, module):
        model.zero_grad(set_to_none=True)
        loss([model(**batch), model(**batch)]).backward()
    return worst(module, plain, gradients=True)


def _said(run: Any) -> str:
    try:
        run()
    except RuntimeStateError as error:
        return str(error)
    return ""


class WithLoss(nn.Module):
    """The same layers, of which the first stage's are frozen, with a loss of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, _ = no_loss.layers()
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(not name.startswith(("embedding", "layers.0", "layers.1")))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)["logits"].pow(2).mean()  # type: ignore[no-any-return]


def frozen(rank: int) -> tuple[bool, float]:
    """Whether nothing is trained here, and the error of gradients, where the model has a loss of
    its own."""
    plain, (_, batch) = WithLoss().double(), built("layers")
    asked = (constraints.pipeline("stage", microbatches=2, cuts=["net.layers.2"]),)
    options: dict[str, Any] = {
        "example_inputs": batch,
        "hardware": "cpu-gloo",
        "constraints": asked,
    }
    module: Any = autopar.compile(copy.deepcopy(plain), autopar.Mesh({"stage": 2}), **options)
    for model in (plain, module):
        model(**batch).backward()
    here = any(p.requires_grad for p in module.parameters() if isinstance(p, DTensor))
    return not here, worst(module, plain, gradients=True)
