"""Microbatching of joint graphs: operands that are raised, values that are given, and ops that need
a promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.analysis.microbatches import Microbatching, find_microbatching, ready
from autopar.api.tracing import microbatch_of
from autopar.capture import Trace, capture
from autopar.capture.execute import execute
from autopar.emit.program_builder import microbatches_of
from autopar.errors import CoupledError
from autopar.rules import operands_of

NUM, SAMPLES, WIDTH, CLASSES = 2, 8, 6, 5
Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Two linear layers and a loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.up, self.head, self.loss = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.head(self.up(x).tanh()), y)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1, 1, 0, 2, 3, 4, 2])
    return {"x": torch.randn(SAMPLES, 4, generator=generator), "y": labels}


def find_for_loss(loss: Loss, **options: Any) -> tuple[nn.Module, Trace, Trace, Microbatching]:
    torch.manual_seed(0)
    model = Net(loss)
    whole = capture(model, (), batch())
    part = capture(model, *microbatch_of((), batch(), NUM))
    how = find_microbatching(whole, part, NUM, **options)
    return model, whole, part, how


def error_of(loss: Loss, **options: Any) -> float:
    """Return the largest error of the loss and the gradients, in float64."""
    model, whole, part, how = find_for_loss(loss, **options)
    taking, how = ready(part, how)
    tensors = {name: x.detach().double() for name, x in model.named_parameters()}
    inputs = {"x": batch()["x"].double(), "y": batch()["y"]}
    paths = {i.path: next(x for name, x in inputs.items() if name in i.path) for i in whole.inputs}
    expected, gradients, _ = execute(
        whole, tensors, tensors, list(paths.values()), dtype=torch.float64
    )
    batches = microbatches_of(taking, how)
    tangent = torch.tensor(batches.weight, dtype=torch.float64)
    losses, sums = [], dict[str, Tensor]()
    for each in batches.parts(paths, tensors):
        values = [each[i.path] for i in taking.inputs]
        (loss_value,), grads, _ = execute(
            taking, tensors, tensors, values, tangent, dtype=torch.float64
        )
        losses.append(loss_value)
        sums = {name: sums.get(name, 0) + g for name, g in grads.items()}
    errors = [float((sums[name] - g).abs().max()) for name, g in gradients.items()]
    return max(*errors, float((batches.join(whole.outputs[0].path, losses) - expected[0]).abs()))


def raised_sizes(part: Trace, how: Microbatching) -> list[int]:
    """Return the number of multiplied elements of each raised operand."""
    reads = [operands_of(part.node(name))[index] for name, index in how.raised]
    return [node.meta["val"].numel() for node in reads]


def loss_of_valid_labels(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, ignore_index=1)


RAISED: dict[str, Loss] = {
    "a count and an average": lambda z, y: loss_of_valid_labels(z, y) + z.square().mean(),
    "two counts and an average": lambda z, y: (
        loss_of_valid_labels(z, y)
        + 0.5 * loss_of_valid_labels(z.sin(), (y + 1) % CLASSES)
        + z.cos().mean()
    ),
    "a sum and a number": lambda z, y: z.square().sum() + 1.0,
    "smoothed labels and an average": lambda z, y: (
        F.cross_entropy(z, y, ignore_index=1, label_smoothing=0.1) + z.abs().mean()
    ),
}


@pytest.mark.parametrize("name", RAISED)
def test_only_scalars_are_raised(name: str) -> None:
    _, _, part, how = find_for_loss(RAISED[name])
    sizes = raised_sizes(part, how)
    assert sizes and set(sizes) == {1}
    assert error_of(RAISED[name]) < 1e-12


def joined_terms(z: Tensor, y: Tensor) -> Tensor:
    """Add two terms per class, so that both read the same gradient."""
    counts = F.one_hot(y, CLASSES).sum(0) + 1
    return (z.square().sum(0) / counts + z.sin().mean(0)).sum()


def test_operand_is_raised_at_its_reader_if_its_source_has_other_readers() -> None:
    assert max(raised_sizes(*find_for_loss(joined_terms)[2:])) > 1
    assert error_of(joined_terms) < 1e-12


def test_nothing_is_raised_or_given_if_all_terms_have_equal_weights() -> None:
    how = find_for_loss(lambda z, y: F.mse_loss(z, F.one_hot(y, CLASSES).float()) + z.abs().mean())[
        3
    ]
    assert not how.raised and not how.given


def test_given_values_are_sums_over_the_batch() -> None:
    how = find_for_loss(loss_of_valid_labels)[3]
    assert {g.kind for g in how.given} == {"sum"} and not how.raised
    _, whole, _, _ = find_for_loss(loss_of_valid_labels)
    keys = {node.meta.get("key") for node in whole.graph.nodes}
    assert all(g.path.removesuffix(" of the batch") in keys for g in how.given)


def test_mean_of_an_input_is_given_as_a_mean() -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return (z.sum(1) * (y - y.double().mean())).sum()

    how = find_for_loss(loss)[3]
    assert [g.kind for g in how.given] == ["mean"]
    assert error_of(loss) < 1e-12


def loss_with_sort(z: Tensor, y: Tensor) -> Tensor:
    """A loss with a sort that couples samples and adds zero, a sum, a count and an average."""
    return (z.sort(0).values * 0 + z.sin()).sum() + loss_of_valid_labels(z, y) + z.square().mean()


def test_terms_are_weighted_correctly_with_independent_samples_promised() -> None:
    how = find_for_loss(loss_with_sort, independent=True)[3]
    assert any("sort" in key for key in how.promised) and how.raised and how.given
    assert error_of(loss_with_sort, independent=True) < 1e-12
    with pytest.raises(CoupledError, match="at /sort/forward/0"):
        find_for_loss(loss_with_sort)


def test_unneeded_promise_is_not_recorded() -> None:
    how = find_for_loss(RAISED["a count and an average"], independent=True)[3]
    assert not how.promised


class Counter(nn.Module):
    """A model with a buffer that counts samples."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        return self.up(x).sum()


def test_buffer_that_is_updated_in_each_microbatch_is_refused() -> None:
    model, data = Counter(), {"x": torch.randn(SAMPLES, 4)}
    whole = capture(model, (), data)
    part = capture(model, *microbatch_of((), data, NUM))
    with pytest.raises(CoupledError, match="buffer 'seen' would be updated 2 times per step"):
        find_microbatching(whole, part, NUM)
