"""Losses whose backward counts samples: each microbatch uses the count of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.analysis import microbatches
from autopar.analysis.microbatch_sites import Edge
from autopar.analysis.microbatches import Given, raise_operands, take_given
from autopar.api import tracing
from autopar.capture import Trace
from autopar.constraints import pipeline
from autopar.errors import CoupledError, VerificationError

Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0], dtype=torch.float64)


class Classifier(nn.Module):
    """Three layers, a head, and a loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head, self.loss = nn.Linear(8, 5), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.softmax(layer(x), -1) + x
        return self.loss(self.head(x), y)


def two_targets(z: Tensor, y: Tensor) -> Tensor:
    scores = z.log_softmax(-1)
    return F.nll_loss(scores, y) + 0.5 * F.nll_loss(scores, (y + 1) % 5)


def weighted_and_mean(z: Tensor, y: Tensor) -> Tensor:
    scores = z.log_softmax(-1)
    return F.nll_loss(scores, y, weight=WEIGHT) - 0.1 * scores.mean()


def unlikelihood(z: Tensor, y: Tensor) -> Tensor:
    scores, counted = z.log_softmax(-1), y != 2
    unlikely = (1 - scores.exp()).clamp(min=1e-5).log() * counted[:, None]
    return F.nll_loss(scores, y, ignore_index=2) - unlikely.sum() / counted.sum()


def of_images(z: Tensor, y: Tensor) -> Tensor:
    pixels, labels = z[:, :, None, None].expand(-1, -1, 2, 2), y[:, None, None].expand(-1, 2, 2)
    return F.cross_entropy(pixels, labels, ignore_index=2, label_smoothing=0.1)


def of_tokens(z: Tensor, y: Tensor) -> Tensor:
    scores, labels = z.view(-1, 2, 5), y.view(-1, 2)  # the shapes of a language model
    return F.cross_entropy(
        scores.flatten(0, 1), labels.flatten(), label_smoothing=0.1, ignore_index=2
    )


def of_opposites(z: Tensor, y: Tensor) -> Tensor:
    scores = z.log_softmax(-1)
    ignored = (y.view(-1, 2) == 2).view(-1)
    smooth = -scores.mean(-1).masked_fill(ignored, 0.0).sum() / ignored.logical_not().sum().view(1)
    return F.nll_loss(scores, y, ignore_index=2) + 0.1 * smooth.sum()


LOSSES: dict[str, Loss] = {
    "label smoothing": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "with ignored labels": lambda z, y: F.cross_entropy(z, y, ignore_index=2, label_smoothing=0.1),
    "with weights": lambda z, y: F.cross_entropy(z, y, WEIGHT, ignore_index=1, label_smoothing=0.1),
    "two targets": two_targets,
    "weighted and mean": weighted_and_mean,
    "unlikelihood": unlikelihood,
    "of images": of_images,
    "of tokens": of_tokens,
    "of opposites": of_opposites,
}


def make_plan(loss: Loss, **options: Any) -> tuple[autopar.Plan, nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x, y = torch.randn(12, 8, dtype=torch.float64), torch.randint(0, 5, (12,))
    y[:6] = torch.tensor([2, 2, 1, 1, 2, 2])  # the microbatches count different numbers of labels
    model, mesh = (
        Classifier(loss).double(),
        autopar.Mesh({"gpu": 2 if "constraints" in options else 1}),
    )
    plan = autopar.plan(
        model, mesh, example_inputs=(x, y), hardware="cpu-gloo", outputs="loss", **options
    )
    return plan, model, (x, y)


@pytest.mark.parametrize(
    "options",
    [{"num_microbatches": 3}, {"constraints": [pipeline(microbatches=2)]}],
    ids=["microbatches", "stages"],
)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_microbatches_equal_those_of_the_batch(
    name: str, options: dict[str, Any]
) -> None:
    found = autopar.verify(*make_plan(LOSSES[name], **options))
    assert found.ok and found.max_error < 1e-12, str(found)


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_gradients_are_wrong_if_a_microbatch_uses_its_own_count(
    left_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_out(part: Trace, given: Sequence[Given]) -> Trace:
        assert len(given) == 3
        return take_given(part, [g for number, g in enumerate(given) if number != left_out])

    monkeypatch.setattr(microbatches, "take_given", leave_out)
    with pytest.raises(CoupledError, match=r"does not add up|departs|does not follow") as found:
        make_plan(LOSSES["label smoothing"], num_microbatches=2)
    assert "label smoothing" in str(found.value)  # the source line of the loss
    assert_wrong("label smoothing", monkeypatch)


@pytest.mark.parametrize("raised", ["all", "forward", "backward"])
def test_gradients_are_wrong_if_terms_keep_their_weights(
    raised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_out(part: Trace, edges: Mapping[Edge, int], num: int) -> Trace:
        phases = {edge: part.node(edge[0]).meta["phase"] for edge in edges}
        assert set(phases.values()) == {"forward", "backward"}
        kept = {e: power for e, power in edges.items() if raised not in ("all", phases[e])}
        return raise_operands(part, kept, num)

    monkeypatch.setattr(microbatches, "raise_operands", leave_out)
    with pytest.raises(CoupledError, match="does not add up"):
        make_plan(LOSSES["weighted and mean"], num_microbatches=2)
    assert_wrong("weighted and mean", monkeypatch)


def assert_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that, without validation, the results differ from the plain model."""
    monkeypatch.setattr(tracing, "validate_before_run", lambda *_: None)
    monkeypatch.setattr(tracing, "refuse_unproven", lambda *_, **__: None)
    with pytest.raises(VerificationError):
        autopar.verify(*make_plan(LOSSES[name], num_microbatches=2))


class CountedOtherwise(torch.autograd.Function):
    """A masked mean whose backward counts the labels differently from its forward."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(z, y)
        counted = y != 2
        return (z.square().sum(-1) * counted).sum() / counted.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        z, y = ctx.saved_tensors
        count = len(y) - (y == 2).to(z.dtype).sum()
        return gradient * 2 * z * (y != 2)[:, None] / count, None


def test_a_count_in_another_form_is_the_count_of_the_batch() -> None:
    found = autopar.verify(*make_plan(CountedOtherwise.apply, num_microbatches=2))
    assert found.ok and found.max_error < 1e-12, str(found)


class Normalised(torch.autograd.Function):
    """A sum over samples whose backward divides by the norm of all scores."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        return gradient * 2 * z / (1 + z.square().sum()), None


def test_samples_that_are_coupled_only_in_backward_are_refused() -> None:
    with pytest.raises(CoupledError, match=r"at head/div.Tensor/backward/0 it reads") as refusal:
        make_plan(Normalised.apply, num_microbatches=2)
    assert (
        "the values of microbatches do not determine the value of the batch" in refusal.value.what
    )
    assert refusal.value.where is not None
    assert "test_counts_in_backward.py" in refusal.value.where.source


class WithParts(Classifier):
    """Returns the loss and both of its terms: an average, and a sum divided by a count."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        scores = self.head(self.layers[1](self.layers[0](x)))
        counted, mean = F.cross_entropy(scores, y, ignore_index=2), 0.1 * scores.square().mean()
        return {"loss": counted + mean, "counted": counted.detach(), "mean": mean.detach()}


def test_outputs_divided_by_the_count_of_the_batch_are_returned() -> None:
    torch.manual_seed(0)
    model = WithParts(two_targets).double()
    batch = {"x": torch.randn(12, 8, dtype=torch.float64), "y": torch.randint(0, 5, (12,))}
    plan = autopar.plan(
        model, 2, example_inputs=batch, hardware="cpu-gloo", constraints=[pipeline(microbatches=2)]
    )
    found = autopar.verify(plan, model, batch)
    assert found.ok and found.max_error < 1e-12, str(found)
