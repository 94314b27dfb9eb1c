"""The CTC loss and its gradients equal those of torch for all ways to pass the targets."""

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
    """Compute the loss with targets selected by a mask, as transformers do."""
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
    """Compute the losses of samples. The second has too few frames, so its loss is infinite and
    counts as zero."""
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
def test_the_ctc_loss_equals_that_of_torch(loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = Net(loss)
    plan = autopar.plan(
        model,
        {"a": 2, "b": 2},
        example_inputs=batch(),
        hardware=load_profile("cpu-gloo-frictionless"),
    )
    assert autopar.verify(plan, model, batch()).ok


def test_masked_targets_can_be_split_by_samples() -> None:
    """The targets of a sample do not depend on other samples, so a plan can split the batch."""
    options = {"constraints": [autopar.constraints.ddp()], "num_microbatches": 2}
    plan = autopar.plan(Net(picked), 2, example_inputs=batch(), hardware="cpu-gloo", **options)  # type: ignore[arg-type]
    assert plan.pipeline is not None and plan.pipeline.num_microbatches == 2


def test_targets_selected_by_a_mask_of_data_are_refused() -> None:
    def by_other_lengths(x: Tensor, labels: Tensor) -> Tensor:
        counted = (labels > 0) & (
            x[:4, :, 0].t() > 0
        )  # depends on values of a floating-point input
        return F.ctc_loss(
            x,
            labels.masked_select(counted),
            torch.full((len(labels),), FRAMES),
            (labels > 1).sum(-1),
        )

    with pytest.raises(CaptureError, match="shape of a result"):
        capture(Net(by_other_lengths), batch())


def test_target_lengths_beyond_the_targets_are_refused() -> None:
    x, labels = torch.randn(3, 2, CLASSES).log_softmax(-1), torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(AutoparError, match="a length of 5, but targets has only 4 labels"):
        autopar.ops.ctc(x, labels, torch.tensor([3, 3]), torch.tensor([5, 1]), 0, False)
