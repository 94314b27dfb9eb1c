"""Losses and outputs that are multiplied or divided by the number of samples are equal to those of
the batch, also with a loss by rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.analysis.microbatches import find_microbatching, ready
from autopar.api.tracing import by_rows, microbatch_of
from autopar.capture import Trace, capture
from autopar.constraints import pipeline
from autopar.emit.program_builder import microbatches_of
from autopar.program.program import Microbatches
from autopar.validation import validate_microbatches

Result = Any
Loss = Callable[[Tensor, Tensor, nn.Linear], Result]
SAMPLES, ROWS = 12, 5


class Net(nn.Module):
    """Two layers and the results of a function of the logits, the labels and the last layer."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.up, self.loss = nn.Linear(4, 6), loss
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Result:
        return self.loss(self.head(self.up(x).tanh()), y, self.head)


def built(loss: Loss) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    labels = torch.randint(0, 5, (SAMPLES,))
    labels[:5] = -100  # microbatches have different numbers of valid labels
    return Net(loss).double(), {"x": torch.randn(SAMPLES, 4, dtype=torch.float64), "y": labels}


def mean(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y)


def total(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum")


def of_each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


def parts(loss: Loss, num: int, rows: int = 0) -> tuple[Trace, Trace, Microbatches]:
    """Return the trace of the batch, the trace of a microbatch, and how microbatches form the
    batch."""
    model, batch = built(loss)
    whole = capture(model, (), batch)
    part = capture(model, *microbatch_of((), batch, num))
    part, how = ready(part, find_microbatching(whole, part, num))
    return by_rows(whole, rows), by_rows(part, rows), microbatches_of(part, how)


SCALED: dict[str, Loss] = {
    "mean times samples": lambda z, y, w: mean(z, y) * len(y),
    "sum times samples": lambda z, y, w: total(z, y) * y.numel(),
    "mean times half the samples": lambda z, y, w: mean(z, y) * (len(y) * 0.5),
    "mean times samples twice": lambda z, y, w: mean(z, y) * len(y) * len(y),
    "mean over samples": lambda z, y, w: mean(z, y) / z.numel(),
    "with a penalty": lambda z, y, w: (mean(z, y) + w.weight.square().sum()) * len(y),
    "of each sample": lambda z, y, w: (of_each(z, y) * len(y)).sum(),
    "other outputs": lambda z, y, w: {
        "loss": mean(z, y) * len(y),
        "logits": z * len(y),
        "more": mean(z, y) * len(y) * 3.0 * len(y),
        "less": total(z, y) / len(y),
    },
    "not the loss": lambda z, y, w: {
        "loss": z.square().mean(),
        "sum": mean(z, y) * len(y),
        "detached": (z * len(y)).detach(),
    },
    "read in both phases": lambda z, y, w: (z * len(y)).sin().sum(),
    "read and returned": lambda z, y, w: {"loss": (z * len(y)).sin().sum(), "at": z * len(y)},
}


@pytest.mark.parametrize("name", SCALED)
def test_products_with_the_number_of_microbatches_have_their_phase_and_their_own_key(
    name: str,
) -> None:
    _, part, _ = parts(SCALED[name], 2)
    calls = [node for node in part.graph.nodes if node.op == "call_function"]
    assert max(Counter(node.meta["key"] for node in calls).values()) == 1
    results = list(part.graph.nodes)[-1].args[0][: len(part.outputs)]
    assert {node.meta["phase"] for node in results} == {"forward"}
    later = [node.meta["phase"] == "backward" for node in calls]
    assert later == sorted(later)


def assert_equal(loss: Loss, mesh: Any, **options: Any) -> None:
    model, batch = built(loss)
    plan = autopar.plan(model, mesh, example_inputs=batch, hardware="cpu-gloo", **options)
    found = autopar.verify(plan, model, batch)
    assert found.ok and found.max_error < 1e-12, str(found)


FAST = ("mean times samples", "other outputs", "read in both phases")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in SCALED]
)
def test_results_scaled_by_the_number_of_samples_are_those_of_the_batch(name: str) -> None:
    assert_equal(SCALED[name], 1, num_microbatches=3, outputs="full")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALED)
def test_scaled_results_of_stages_are_those_of_the_batch(name: str) -> None:
    stages = [pipeline("pp", microbatches=2)]
    assert_equal(SCALED[name], autopar.Mesh({"pp": 2}), constraints=stages, outputs="full")


BY_ROWS: dict[str, Loss] = {
    "a mean and a penalty": lambda z, y, w: mean(z, y) + w.weight.square().sum(),
    "a scaled mean": lambda z, y, w: mean(z, y) * len(y),
    "a quotient and a penalty": lambda z, y, w: (
        total(z, y) / y.ne(-100).sum() + w.weight.square().sum()
    ),
    "a sum of counts": lambda z, y, w: total(z, y) / (y.ne(-100).sum() + y.eq(3).sum()),
    "a share and a penalty": lambda z, y, w: total(z, y) / len(y) + w.weight.square().sum(),
}


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("name", BY_ROWS)
def test_microbatches_with_a_loss_by_rows_are_valid(name: str, num: int) -> None:
    assert not validate_microbatches(*parts(BY_ROWS[name], num, ROWS)).unproven


@pytest.mark.parametrize(
    "name",
    [n if n == "a sum of counts" else pytest.param(n, marks=pytest.mark.slow) for n in BY_ROWS],
)
def test_losses_by_rows_over_microbatches_are_those_of_the_batch(name: str) -> None:
    assert_equal(BY_ROWS[name], 1, num_microbatches=2, loss_rows=ROWS, outputs="loss")
