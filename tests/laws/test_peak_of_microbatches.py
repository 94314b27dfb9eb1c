"""With several microbatches on one device, the peak of a step equals the prediction exactly.

Parts of a batch are views of it. The outputs of all microbatches exist until the end, when they are
joined.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import zoo_small
from torch import Tensor, nn

import autopar
from autopar.program.abstract_executor import LiveBytes

BATCH = 24


class Returning(nn.Module):
    """Returns its loss and an output that a microbatch has in full, shares with others, or has a
    part of."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layer, self.weight = what, nn.Linear(8, 64), nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.layer(x)
        loss = (hidden[:, 0] - y).pow(2).mean() + 0 * self.weight.sum()
        match self.what:
            case "large":
                return {"loss": loss, "made": hidden.exp()}
            case "a view of something large":
                return {"loss": loss, "made": hidden[:, :1]}
            case "two views of the same":
                return {"loss": loss, "made": hidden, "again": hidden.view(-1, 8, 8)}
            case "a sum":
                return {"loss": loss, "made": hidden.sum(0)}
            case "a parameter":
                return {"loss": loss, "made": self.weight.t()}
            case "the batch":
                return {"loss": loss, "made": x[:, 1:], "again": x}
        return {"loss": loss, "made": self.weight * 2}


RETURNED = (
    "large",
    "a view of something large",
    "two views of the same",
    "a sum",
    "a parameter",
    "the batch",
    "what is whole in each",
)


def peaks(model: nn.Module, batch: dict[str, Any], **options: Any) -> tuple[int, int]:
    """Return the predicted and measured peak of a step in bytes. Both include the batch and exclude
    the optimizer states."""
    pm = autopar.compile(
        model, 1, example_inputs=batch, hardware="h100-sxm", optimizer="none", **options
    )
    (stage,) = pm.plan.pipeline.stages
    assert autopar.check(pm.plan, model, batch).ok
    pm(**batch)  # constants of a graph exist from the second run on
    with LiveBytes() as memory:
        memory.register([*pm.parameters(), *pm.buffers(), *batch.values()])
        memory.reset_peak()
        pm(**batch)
        return stage.prediction.peak_bytes, memory.peak_bytes


@pytest.mark.parametrize(("num", "outputs"), [(2, "loss"), (4, "full")])
@pytest.mark.parametrize("kind", ["gpt2", "vit"])
def test_the_predicted_peak_of_microbatches_equals_the_measured_peak(
    kind: str, num: int, outputs: str
) -> None:
    model, batch = getattr(zoo_small, kind)()
    predicted, measured = peaks(model, batch, num_microbatches=num, outputs=outputs)
    assert predicted == measured


@pytest.mark.parametrize("num", [2, 8])
@pytest.mark.parametrize("what", RETURNED)
def test_the_peak_includes_the_outputs_of_all_microbatches(what: str, num: int) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(BATCH, 8), "y": torch.randn(BATCH)}
    predicted, measured = peaks(Returning(what), batch, num_microbatches=num, outputs="full")
    assert predicted == measured
    if what == "large":
        assert measured > 2 * 4 * math.prod((BATCH, 64)), "as collected, and as put together"


@pytest.mark.slow
def test_the_predicted_peak_with_a_precision_equals_the_measured_peak() -> None:
    model, batch = zoo_small.vit()
    predicted, measured = peaks(model, batch, num_microbatches=4, outputs="full", precision="bf16")
    assert predicted == measured
