"""Likelihoods other than cross entropy over the last dim are decomposed and equal those of torch,
with ignored labels and class weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture, execute

aten = torch.ops.aten
WHOLE = {
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_backward.default,
}


Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Model(nn.Module):
    """A model with one parameter per logit, class weights, and a loss."""

    def __init__(self, shape: tuple[int, ...], loss: Loss, weight: Tensor | None) -> None:
        super().__init__()
        self.loss, self.logits = loss, nn.Parameter(torch.randn(shape, dtype=torch.float64))
        self.register_buffer("weight", weight)

    def forward(self, labels: Tensor) -> Tensor:
        return self.loss(self.logits * 2, labels, self.weight)


def check(shape: tuple[int, ...], labels: Tensor, loss: Loss, weight: Tensor | None = None) -> None:
    torch.manual_seed(0)
    model = Model(shape, loss, weight)
    trace = capture(model, (labels,), {})
    assert not WHOLE & {node.target for node in trace.graph.nodes}
    outputs, gradients = execute(
        trace, dict(model.named_parameters()), dict(model.named_buffers()), [labels]
    )[:2]
    expected = model(labels)
    expected.backward()
    torch.testing.assert_close(outputs[0], expected.detach(), equal_nan=True)
    torch.testing.assert_close(gradients["logits"], model.logits.grad, equal_nan=True)


PIXELS = torch.tensor([[[0, 1, 2], [2, -100, 1]], [[4, 3, -100], [0, 0, 3]]])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.25], dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_cross_entropy_with_one_class_per_pixel(reduction: str, weight: Tensor | None) -> None:
    check(
        (2, 5, 2, 3), PIXELS, lambda x, y, w: F.cross_entropy(x, y, w, reduction=reduction), weight
    )


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_cross_entropy_with_label_smoothing(weight: Tensor | None) -> None:
    check(
        (4, 5),
        torch.tensor([0, 3, -100, 4]),
        lambda x, y, w: F.cross_entropy(x, y, w, label_smoothing=0.1),
        weight,
    )


def test_cross_entropy_without_reduction() -> None:
    check(
        (2, 5, 2, 3),
        PIXELS,
        lambda x, y, _: (
            F.cross_entropy(x, y, reduction="none") * torch.arange(3.0).double()
        ).sum(),
    )


def test_an_ignored_row_may_contain_a_logit_of_minus_infinity() -> None:
    impossible = torch.tensor([[0.0, 0, 0], [-torch.inf, 0, 0]], dtype=torch.float64)
    check(
        (2, 3),
        torch.tensor([1, -100]),
        lambda x, y, w: F.nll_loss(x.log_softmax(1) + w, y),
        impossible,
    )


def test_only_ignored_labels_give_the_nan_loss_and_the_gradient_of_torch() -> None:
    check((2, 5, 2, 3), torch.full((2, 2, 3), -100), F.cross_entropy)


def test_labels_are_counted_in_the_dtype_of_the_sum_without_a_second_cast() -> None:
    """bfloat16 cannot represent large counts, and a second cast would cost a kernel."""
    model = Model((2, 5, 2, 3), lambda x, y, _: F.cross_entropy(x.to(torch.bfloat16), y), None)
    nodes = [
        node
        for node in capture(model, (PIXELS,), {}).graph.nodes
        if node.target is aten._to_copy.default
    ]
    counted = [node for node in nodes if node.args[0].meta["val"].dtype == torch.bool]
    assert [node.meta["val"].dtype for node in counted] == [torch.float32]
    assert not any(node.target is aten._to_copy.default for cast in counted for node in cast.users)
