"""Where operands are raised, what is given, and what only a promise covers, in labelled joint
graphs."""

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
    """Two layers, a head, and a loss of its scores."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.up, self.head, self.loss = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.head(self.up(x).tanh()), y)


def batch() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1, 1, 0, 2, 3, 4, 2])
    return {"x": torch.randn(SAMPLES, 4, generator=made), "y": labels}


def traced(loss: Loss, **options: Any) -> tuple[nn.Module, Trace, Trace, Microbatching]:
    torch.manual_seed(0)
    model = Net(loss)
    whole = capture(model, (), batch())
    part = capture(model, *microbatch_of((), batch(), NUM))
    how = find_microbatching(whole, part, NUM, **options)
    return model, whole, part, how


def error_of(loss: Loss, **options: Any) -> float:
    """The largest error of the loss and of gradients, in float64."""
    model, whole, part, how = traced(loss, **options)
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
        read = [each[i.path] for i in taking.inputs]
        (made,), grads, _ = execute(taking, tensors, tensors, read, tangent, dtype=torch.float64)
        losses.append(made)
        sums = {name: sums.get(name, 0) + g for name, g in grads.items()}
    errors = [float((sums[name] - g).abs().max()) for name, g in gradients.items()]
    return max(*errors, float((batches.join(whole.outputs[0].path, losses) - expected[0]).abs()))


def raised_sizes(part: Trace, how: Microbatching) -> list[int]:
    """How many elements are multiplied, per operand that is raised."""
    reads = [operands_of(part.node(name))[index] for name, index in how.raised]
    return [node.meta["val"].numel() for node in reads]


def counted(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, ignore_index=1)


RAISED: dict[str, Loss] = {
    "a count and an average": lambda z, y: counted(z, y) + z.square().mean(),
    "two counts and an average": lambda z, y: (
        counted(z, y) + 0.5 * counted(z.sin(), (y + 1) % CLASSES) + z.cos().mean()
    ),
    "a sum and a number": lambda z, y: z.square().sum() + 1.0,
    "smoothed labels and an average": lambda z, y: (
        F.cross_entropy(z, y, ignore_index=1, label_smoothing=0.1) + z.abs().mean()
    ),
}


@pytest.mark.parametrize("name", RAISED)
def test_what_is_raised_are_numbers_and_not_scores(name: str) -> None:
    _, _, part, how = traced(RAISED[name])
    sizes = raised_sizes(part, how)
    assert sizes and set(sizes) == {1}
    assert error_of(RAISED[name]) < 1e-12


def shared(z: Tensor, y: Tensor) -> Tensor:
    """Both terms are joined class by class, and read one gradient."""
    counts = F.one_hot(y, CLASSES).sum(0) + 1
    return (z.square().sum(0) / counts + z.sin().mean(0)).sum()


def test_operands_are_raised_where_they_are_read_if_what_they_follow_from_is_read_elsewhere() -> (
    None
):
    assert max(raised_sizes(*traced(shared)[2:])) > 1
    assert error_of(shared) < 1e-12


def test_nothing_is_raised_or_given_where_all_terms_weigh_alike() -> None:
    how = traced(lambda z, y: F.mse_loss(z, F.one_hot(y, CLASSES).float()) + z.abs().mean())[3]
    assert not how.raised and not how.given


def test_what_is_given_is_known_before_and_of_the_batch() -> None:
    how = traced(counted)[3]
    assert {g.kind for g in how.given} == {"sum"} and not how.raised
    _, whole, _, _ = traced(counted)
    keys = {node.meta.get("key") for node in whole.graph.nodes}
    assert all(g.path.removesuffix(" of the batch") in keys for g in how.given)


def test_a_mean_of_an_input_is_given_as_a_mean() -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return (z.sum(1) * (y - y.double().mean())).sum()

    how = traced(loss)[3]
    assert [g.kind for g in how.given] == ["mean"]
    assert error_of(loss) < 1e-12


def sorted_beside(z: Tensor, y: Tensor) -> Tensor:
    """A sort that couples samples and adds nothing, beside a sum, a count and an average."""
    return (z.sort(0).values * 0 + z.sin()).sum() + counted(z, y) + z.square().mean()


def test_terms_weigh_alike_under_a_promise_too() -> None:
    how = traced(sorted_beside, independent=True)[3]
    assert any("sort" in key for key in how.promised) and how.raised and how.given
    assert error_of(sorted_beside, independent=True) < 1e-12
    with pytest.raises(CoupledError, match="at /sort/forward/0"):
        traced(sorted_beside)


def test_a_promise_that_is_not_needed_is_not_recorded() -> None:
    how = traced(RAISED["a count and an average"], independent=True)[3]
    assert not how.promised


class Counter(nn.Module):
    """A buffer that counts the samples seen."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        return self.up(x).sum()


def test_buffers_that_would_be_updated_several_times_a_step_are_refused() -> None:
    model, data = Counter(), {"x": torch.randn(SAMPLES, 4)}
    whole = capture(model, (), data)
    part = capture(model, *microbatch_of((), data, NUM))
    with pytest.raises(CoupledError, match="buffer 'seen' would be updated 2 times per step"):
        find_microbatching(whole, part, NUM)
