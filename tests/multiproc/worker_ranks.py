"""Run by processes: one rank departs from the others, all ranks raise an error, and continue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.constraints import ddp, fsdp, pipeline, tensor_parallel
from autopar.errors import AutoparError, RankError

PLANS: dict[str, Any] = {
    "ddp": ddp(),
    "fsdp": fsdp(),
    "tensor": tensor_parallel("1d", axes="gpu"),
    "stages": pipeline("gpu", microbatches=2),
}
Action = Callable[[], object]


class Net(nn.Module):
    """A model with two layers and the mean square as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x if scale is None else x * scale).square().mean()


class Training:
    """A compiled module, its optimizer and a batch."""

    def __init__(self, plan: str) -> None:
        torch.manual_seed(0)
        self.batch = torch.randn(12, 8)
        self.module: Any = autopar.compile(
            Net(), example_inputs=(self.batch,), hardware="cpu-gloo", constraints=[PLANS[plan]]
        )
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.1)

    def step(self, batch: Tensor | None = None, **kwargs: Any) -> None:
        """Run one step with the usual or another batch."""
        self.module(self.batch if batch is None else batch, **kwargs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        """Call the model without gradients."""
        with torch.no_grad():
            self.module(self.batch)


def refusal(action: Action) -> tuple[str, tuple[int, ...]]:
    """Return the error of a rank, and the ranks that it names."""
    try:
        action()
    except RankError as error:
        return str(error), error.ranks
    return "", ()


def run(rank: int, plan: str, other: int, folder: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the errors of each rank if the rank `other` departs, by its operation."""
    training, checkpoints = Training(plan), autopar.Checkpoints(Path(folder))
    module, batch, told = training.module, training.batch, {}

    def unlike(name: str, alone: Action, usual: Action = training.step) -> None:
        told[name] = refusal(alone if rank == other else usual)
        for _ in range(2):  # so the next one is known to follow on a step
            training.step()

    def without_step() -> None:
        module(batch).backward()
        training.step()

    def twice() -> None:
        training.step()
        training.step()

    def clipped() -> None:
        module(batch).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)

    def scaled() -> None:
        module.loss_scale = 4.0
        try:
            training.step()
        finally:
            module.loss_scale = 1.0

    def with_dampening() -> None:  # it has no effect without momentum
        training.optimizer.param_groups[0]["dampening"] = 0.5
        try:
            twice()
        finally:
            training.optimizer.param_groups[0]["dampening"] = 0

    def accumulated() -> None:
        module(batch).backward()
        training.optimizer.step()
        try:
            training.step()
        finally:
            module.zero_grad()

    def frozen() -> None:
        module.layers[0].bias.requires_grad_(False)
        try:
            training.step()
        finally:
            module.layers[0].bias.requires_grad_(True)

    for _ in range(3):
        training.step()
    told["alike"] = refusal(training.step)
    told["reads shapes"] = refusal(
        lambda: (
            {k: v.shape for k, v in module.state_dict().items()} if rank == other else None,
            training.step(),
        )
    )
    unlike("size", lambda: training.step(batch[:6]))
    unlike("dtype", lambda: training.step(batch.double()))
    unlike("keywords", lambda: training.step(batch, scale=torch.ones(8)))
    unlike("evaluation", training.evaluate)
    unlike("save", lambda: checkpoints.save(1, module, training.optimizer))
    unlike("async_save", lambda: checkpoints.async_save(1, module, training.optimizer))
    unlike("clip", lambda: module.clip_grad_norm_(1.0))
    unlike("compile", lambda: Training(plan))
    if plan == "fsdp":  # with ddp every rank has the whole, and may read it alone
        unlike("gather", lambda: module.layers[0].weight.full_tensor())
        unlike("torch's norm", clipped, twice)
        module.zero_grad()
    unlike("factor", lambda: (module(batch) * 2.0).backward())
    unlike("loss_scale", scaled)
    if plan != "stages":  # whose ranks hold different parameters
        unlike("settings", with_dampening, twice)
        unlike("accumulates", accumulated, twice)
        unlike("frozen", frozen)
    unlike("no backward", lambda: (module(batch), training.step()))
    module.zero_grad()
    unlike("no step", without_step, twice)
    return told


REQUESTS: dict[str, dict[str, Any]] = {
    "num_microbatches=2": {"num_microbatches": 2},
    "outputs='full'": {"outputs": "full"},
    "precision='bf16'": {"precision": "bf16"},
    "optimizer='sgd'": {"optimizer": "sgd"},
    "constraints=[pipeline(microbatches=2)]": {"constraints": [pipeline(microbatches=2)]},
}


def compile_unlike(rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the errors of each rank if rank 1 compiles with another option, by the option."""
    batch = torch.ones(12, 8)
    told = {}
    for name, options in REQUESTS.items():
        told[name] = refusal(
            lambda options=options: autopar.compile(  # type: ignore[misc]
                Net(),
                example_inputs=(batch,),
                hardware="cpu-gloo",
                **(options if rank else {}),
            )
        )
    return told


class Unlike(Net):
    """A model whose forward raises an error on some ranks, or whose layers have other sizes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "width":
            self.layers = nn.ModuleList((nn.Linear(8, 16), nn.Linear(16, 8)))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.kind == "raise":
            raise ValueError("sample 17 is broken")
        return super().forward(x, scale)


FAILURES = ("raise", "width", "batch", "plan", "optimizer")


def compile_failing(rank: int, other: int) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """Return the class, the text and the ranks of each rank's error if compiling fails only on the
    rank `other`, which continues to run, by the reason."""
    told = {}
    for kind in FAILURES:
        is_other = rank == other
        options: dict[str, Any] = {
            "example_inputs": (torch.ones(6 if is_other and kind == "batch" else 12, 8),),
            "hardware": "cpu-gloo",
        }
        if is_other and kind in ("plan", "optimizer"):
            options[kind] = "missing"
        try:
            autopar.compile(Unlike(kind if is_other else ""), **options)
            told[kind] = ("", "", ())
        except AutoparError as error:
            told[kind] = (type(error).__name__, str(error), getattr(error, "ranks", ()))
        Training("ddp").step()  # all ranks can go on
    return told
