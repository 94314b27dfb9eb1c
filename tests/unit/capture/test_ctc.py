"""The CTC loss of forward is that of torch, in loss and gradients, whatever way its targets are
passed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.errors import AutoparError, CaptureError
from benchmarks.common import load_profile

SAMPLES, FRAMES, CLASSES = 4, 12, 6
LENGTHS = [4, 1, 2, 3]


class Net(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.loss = nn.Linear(5, CLASSES), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.up(x).log_softmax(-1).transpose(0, 1), labels)


def padded(x: Tensor, labels: Tensor) -> Tensor:
    return F.ctc_loss(
        x, labels.clamp(min=1), torch.full((len(labels),), FRAMES), (labels > 0).sum(-1)
    )


def of_plain_lengths(x: Tensor, labels: Tensor) -> Tensor:
    return nn.CTCLoss(blank=5, reduction="sum")(
        x, labels.clamp(0, 4), (FRAMES,) * SAMPLES, tuple(LENGTHS)
    )


def picked(x: Tensor, labels: Tensor) -> Tensor:
    """As transformers do."""
    mask = labels > 0
    with torch.backends.cudnn.flags(enabled=False):
        return F.ctc_loss(
            x,
            labels.masked_select(mask),
            torch.full((len(labels),), FRAMES),
            mask.sum(-1),
            zero_infinity=True,
        )


def of_each(x: Tensor, labels: Tensor) -> Tensor:
    """The second has fewer frames than it needs: its loss is infinite, and counts as none."""
    frames = torch.tensor([FRAMES, 0, 3, 9])
    return (
        F.ctc_loss(
            x,
            labels.clamp(min=1),
            frames,
            torch.tensor(LENGTHS),
            reduction="none",
            zero_infinity=True,
        )
        .square()
        .sum()
    )


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(1, 5, (SAMPLES, 4), generator=generator)
    return torch.randn(SAMPLES, FRAMES, 5, generator=generator), labels.where(
        torch.arange(4) < torch.tensor(LENGTHS)[:, None], -100
    )


@pytest.mark.parametrize("loss", [padded, of_plain_lengths, picked, of_each])
def test_it_is_torchs(loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = Net(loss)
    plan = autopar.plan(
        model,
        {"a": 2, "b": 2},
        example_inputs=batch(),
        hardware=load_profile("cpu-gloo-frictionless"),
    )
    assert autopar.verify(plan, model, batch()).ok


def test_what_is_picked_is_split_by_samples() -> None:
    """Targets of one sample need no other's, so a plan may have microbatches, and ranks their
    own samples."""
    options = {"constraints": [autopar.constraints.ddp()], "num_microbatches": 2}
    plan = autopar.plan(Net(picked), 2, example_inputs=batch(), hardware="cpu-gloo", **options)  # type: ignore[arg-type]
    assert plan.pipeline is not None and plan.pipeline.num_microbatches == 2


def test_targets_picked_otherwise_are_refused() -> None:
    def by_other_lengths(x: Tensor, labels: Tensor) -> Tensor:
        counted = (labels > 0) & (x[:4, :, 0].t() > 0)  # follows from values of a floating input
        return F.ctc_loss(
            x,
            labels.masked_select(counted),
            torch.full((len(labels),), FRAMES),
            (labels > 1).sum(-1),
        )

    with pytest.raises(CaptureError, match="shape of a result"):
        capture(Net(by_other_lengths), batch())


def test_lengths_that_do_not_fit_are_refused() -> None:
    x, labels = torch.randn(3, 2, CLASSES).log_softmax(-1), torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(AutoparError, match="a length of 5, but targets has only 4 labels"):
        autopar.ops.ctc(x, labels, torch.tensor([3, 3]), torch.tensor([5, 1]), 0, False)
