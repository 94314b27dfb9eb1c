"""Programs for the remedies of stages, of memory, and of ops without a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar import Mesh, constraints, rules
from autopar.ops.vocabulary import ctc_loss
from tests.support.remedy_programs import Called, Program, planned

X = torch.ones(8, 4)
_LINE = Mesh({"stage": 2})
_OUTPUTS = Called(lambda layer, x: layer(x))
_DEEP = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Traced(nn.Module):
    """Two layers. A running mean of both results, or of the first one, is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x.square().mean()


def _staged(
    model: Any = None, batch: Any = None, num: int = 2, cuts: Any = None, **options: Any
) -> Callable[[], object]:
    """Plan two stages with a number of microbatches."""
    pipeline = (constraints.pipeline("stage", microbatches=num, cuts=cuts),)
    return planned(model, batch, _LINE, constraints=pipeline, **options)


@torch.library.custom_op(
    "remedies::tangled", mutates_args=(), tags=(torch.Tag.data_dependent_output,)
)
def tangled(x: Tensor) -> Tensor:
    """An op that can have no rule because of its tag."""
    return x * 2


@tangled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("remedies::doubled", mutates_args=("x",))
def doubled(x: Tensor) -> None:
    """An op that writes into its operand."""
    x.mul_(2)


@torch.library.custom_op("remedies::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    """An op that accepts only large numbers."""
    if float(x.min()) < 100:
        raise ValueError("too small")
    return x / 2


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("remedies::twofold", mutates_args=())
def twofold(x: Tensor) -> Tensor:
    """An op that depends only on its arguments."""
    return x * 2


@twofold.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _registered(op: Any, **options: Any) -> Callable[[], object]:
    def program() -> None:
        rules.register(op, "m n -> m n", **options)
        rules.unregister(op)

    return program


def _tangles(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(tangled(x)).square().mean()


def _ctc(lengths: list[int]) -> Callable[[], object]:
    """Compute the loss of two samples whose targets have three positions."""
    log_probs, targets = torch.randn(6, 2, 4).log_softmax(-1), torch.ones(2, 3, dtype=torch.int64)
    return lambda: ctc_loss(log_probs, targets, torch.tensor([6, 6]), torch.tensor(lengths))


PROGRAMS: dict[str, Program] = {
    "planner/pipeline/pipeline_request.py PipelineRequest.cuts 0": Program(
        _staged(cuts=["layers.7"]), "the model can be cut at layers.1", _staged(cuts=["layers.1"])
    ),
    "stages/cutting.py usable_points 0": Program(
        _staged(Traced(), (X,), num=1),
        "remove constraints.pipeline(): the axis is then used for data",
        planned(Traced(), (X,)),
    ),
    "planner/pipeline/pipeline_request.py PipelineRequest.resolve 0": Program(
        _staged(_DEEP, (X,), outputs="dtensor"),
        'pass outputs="full"',
        _staged(_DEEP, (X,), outputs="full"),
    ),
    "planner/pipeline/step_schedule.py _all_forwards_first 1": Program(
        planned(_OUTPUTS, (X,), num_microbatches=2),
        "use one microbatch",
        planned(_OUTPUTS, (X,), num_microbatches=1),
    ),
    "planner/pipeline/step_schedule.py _all_forwards_first 1 | loss": Program(
        planned(_OUTPUTS, (X,), num_microbatches=2),
        "let forward compute and return the loss",
        planned(num_microbatches=2),
    ),
    "planner/search.py finish_search 0": Program(
        planned(Called(_tangles), (X,), strict=True),
        "pass strict=False",
        planned(Called(_tangles), (X,), strict=False),
    ),
    "solve/solver.py shortage 0": Program(
        planned(memory_bytes=1000), "pass a larger memory_bytes", planned(memory_bytes=10_000)
    ),
    "solve/solver.py shortage 0 | devices": Program(
        planned(memory_bytes=2000, mesh=1), "use more devices", planned(memory_bytes=2000, mesh=2)
    ),
    "api/shortage.py find_low_memory_plan 0": Program(
        planned(memory_bytes=1400),
        "stages were not tried: pass constraints=(autopar.constraints.pipeline(),)",
        planned(memory_bytes=1400, constraints=(constraints.pipeline(),)),
    ),
    "rules/registration.py _check_target 2": Program(
        _registered(doubled), "a pure function of its arguments", _registered(twofold)
    ),
    "rules/registration.py _generate_trials 0": Program(
        _registered(halved),
        "pass examples=[(tensor, ...), ...] with arguments of the op",
        _registered(halved, examples=[(torch.full((8, 8), 200.0),)]),
    ),
    "ops/vocabulary.py _ctc 0": Program(
        _ctc([3, 4]), "pass target_lengths of at most", _ctc([3, 2])
    ),
}
