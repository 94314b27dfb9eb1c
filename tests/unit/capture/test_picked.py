"""Rows selected by a mask: loss and gradients match the model, with static shapes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.capture.execute import execute
from autopar.core.mesh import Mesh
from autopar.errors import CaptureError

SAMPLES, LENGTH, WIDTH, CLASSES = 4, 5, 6, 7


class Net(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, CLASSES), nn.LayerNorm(CLASSES)
        self.table, self.back = nn.Embedding(CLASSES, CLASSES), nn.Linear(CLASSES, WIDTH)
        self.loss = loss

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self, x, mask, labels)


def batch(none: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator)
    mask = torch.rand(SAMPLES, LENGTH, generator=generator) > 0.5
    mask[0, 0] = False
    labels = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=generator).masked_fill(
        ~mask, -100
    )
    return x, mask & (not none), labels


def put(net: Any, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    hidden = net.up(x).clone()
    hidden[mask] = net.norm(net.up(x[mask] * 2))
    return hidden.square().mean()


def put_numbers(net: Any, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    hidden, rows = net.up(x).flatten(0, 1).clone(), mask.flatten().nonzero(as_tuple=True)[0]
    hidden[rows] += net.up(x.flatten(0, 1)[rows]).tanh()
    return hidden.square().mean()


def routed(net: Any, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Run experts in a loop. Each expert processes the rows that are routed to it."""
    tokens = x.flatten(0, 1)
    weights, picks = net.up(tokens).softmax(-1).topk(2)
    made = torch.zeros(len(tokens), CLASSES, dtype=x.dtype)
    for number in range(3):
        rows, which = torch.where(picks == number)
        made.index_add_(0, rows, net.norm(net.up(tokens[rows])) * weights[rows, which, None])
    return made.square().mean()


def scattered(net: Any, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    hidden = net.up(x)
    flags = mask[..., None].expand_as(hidden)
    return hidden.masked_scatter(flags, hidden.masked_select(flags).tanh()).square().mean()


def normed_apart(net: Any, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Process selected rows and the other rows differently, as for tokens of audio and text."""
    hidden = net.up(x)
    hidden = hidden.masked_scatter(mask.unsqueeze(-1), net.norm(hidden[mask]).to(hidden.device))
    hidden = hidden.masked_scatter(~mask.unsqueeze(-1), net.up(x[~mask]).tanh())
    return hidden.square().mean()


def mask_made_twice(net: Any, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Compute ``~mask`` and equal comparisons several times."""
    hidden = net.up(x).clone()
    hidden[~mask] = net.norm(hidden[~mask])
    hidden[labels == 3] += net.up(x[labels == 3]).tanh()
    return (
        hidden.square().mean()
        + (net.up(x)[labels > 2] - net.norm(hidden)[labels > 2]).square().mean()
    )


def mask_changed_between(net: Any, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Compute ``~mask`` twice, with different values."""
    mask, hidden = mask.clone(), net.up(x)
    first = net.norm(hidden[~mask]).square().mean()
    mask[:, 1:3] = True
    return first + net.norm(hidden[~mask]).tanh().square().mean()


def repeated(net: Any, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Repeat a vector and a matrix for each selected row."""
    rows = net.up(x)[mask]
    queries = net.table.weight[None].repeat(len(rows), 1, 1) @ rows[..., None]
    each = net.norm.weight.repeat(len(rows), 1) * rows.repeat(1, 2)[:, :CLASSES]
    return queries.square().mean() + each.tanh().mean()


WAYS: dict[str, Callable[..., Tensor]] = {
    "a mask made twice": mask_made_twice,
    "a mask that changes": mask_changed_between,
    "repeated": repeated,
    "cross entropy": lambda net, x, m, y: F.cross_entropy(net.up(x)[m], y[m]),
    "cross entropy, smoothed and weighted": lambda net, x, m, y: F.cross_entropy(
        net.up(x)[m],
        y[m],
        weight=torch.arange(1.0, CLASSES + 1, dtype=x.dtype),
        label_smoothing=0.1,
    ),
    "cross entropy, summed": lambda net, x, m, y: (
        F.cross_entropy(net.up(x)[m], y[m], reduction="sum") / m.sum()
    ),
    "likelihood": lambda net, x, m, y: F.nll_loss(net.up(x)[m].log_softmax(-1), y[m]),
    "squares": lambda net, x, m, y: F.mse_loss(net.back(net.up(x))[m], x[m]),
    "squares, one number a row": lambda net, x, m, y: F.mse_loss(
        net.up(x)[m][:, 0], y[m].to(x.dtype), reduction="none"
    ).mean(),
    "divergence": lambda net, x, m, y: F.kl_div(
        net.up(x)[m].log_softmax(-1), net.table(y[m]).softmax(-1), reduction="batchmean"
    ),
    "binary": lambda net, x, m, y: F.binary_cross_entropy_with_logits(
        net.back(net.up(x))[m], (x[m] > 0).to(x.dtype)
    ),
    "cosines": lambda net, x, m, y: F.cosine_embedding_loss(
        net.up(x)[m], net.table(y[m]), torch.ones_like(y[m])
    ),
    "mean": lambda net, x, m, y: net.up(x[m]).square().mean(),
    "mean of rows, then of columns": lambda net, x, m, y: net.up(x[m]).square().mean(0).mean(),
    "columns, then rows": lambda net, x, m, y: net.up(x[m]).square().mean(-1).sum() / m.sum(),
    "number of rows": lambda net, x, m, y: net.up(x[m]).square().sum() / x[m].shape[0],
    "largest": lambda net, x, m, y: net.up(x[m]).max() + net.up(x[m]).amin(0).sum(),
    "largest label": lambda net, x, m, y: (
        net.up(x).square().mean() * (y[m].max() - y[m].min() + (y[m] > 0).any())
    ),
    "labels": lambda net, x, m, y: net.table(y[m]).square().mean(),
    "flattened": lambda net, x, m, y: F.l1_loss(net.back(net.up(x))[m].flatten(), x[m].flatten()),
    "heads": lambda net, x, m, y: (
        (lambda h: h.view(h.shape[0], 2, 3) @ h.view(-1, 3, 2))(net.back(net.up(x[m])))
        .square()
        .mean()
    ),
    "attention": lambda net, x, m, y: (
        F.scaled_dot_product_attention(*[net.up(x[m.any(1)])] * 3).square().mean()
    ),
    "selected": lambda net, x, m, y: net.up(x).masked_select(m[..., None]).square().mean(),
    "numbers": lambda net, x, m, y: (
        net.up(x.flatten(0, 1)[m.flatten().nonzero().squeeze(1)]).square().mean()
    ),
    "pairs of numbers": lambda net, x, m, y: net.up(x[m.nonzero(as_tuple=True)]).square().mean(),
    "some columns": lambda net, x, m, y: (
        net.up(x)[m, 1:3].square().mean() + net.up(x)[m][..., :2].square().mean()
    ),
    "joined": lambda net, x, m, y: (
        net.up(torch.cat([x[m][:, :3], x[m][:, 3:]], -1)).square().mean()
    ),
    "logarithms of what is positive": lambda net, x, m, y: (lambda h: h[h > 0].log().mean())(
        net.up(x)
    ),
    "a linear of logarithms": lambda net, x, m, y: (
        net.up(x.masked_fill(~m[..., None], 0).abs()[m].log()).square().mean()
    ),
    "roots of what is positive": lambda net, x, m, y: (lambda h: (h[h > 0.5] - 0.5).sqrt().sum())(
        net.up(x)
    ),
    "put back": put,
    "put back by numbers": put_numbers,
    "experts": routed,
    "scattered": scattered,
    "apart": normed_apart,
}


def compared(loss: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    torch.manual_seed(0)
    net = Net(loss).double()
    inputs = (inputs[0].double(), *inputs[1:])
    wanted = net(*inputs)
    wanted.backward()
    outputs, gradients, _ = execute(capture(net, inputs), dict(net.named_parameters()), {}, inputs)
    torch.testing.assert_close(outputs[0], wanted.detach(), rtol=1e-12, atol=1e-12)
    for name, parameter in net.named_parameters():
        made = gradients.get(name, torch.zeros_like(parameter))
        wanted_gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(made, wanted_gradient, rtol=1e-10, atol=1e-12, equal_nan=True)


NUMBERS: dict[str, Callable[..., Tensor]] = {
    "a count": lambda net, x, m, y: (net.up(x) * m[..., None]).sum() / m.sum().item(),
    "a share": lambda net, x, m, y: net.up(x).square().mean() * (m.sum().item() / 3 + 1),
    "a scale": lambda net, x, m, y: (
        net.up(x).square().mean() * float(net.up(x).detach().abs().max())
    ),
    "a scale with a gradient": lambda net, x, m, y: (
        net.up(x).square().mean() * float(net.up(x).abs().max())
    ),
    "an int": lambda net, x, m, y: net.up(x).square().mean() * (2 - int(m.sum())),
    "a threshold": lambda net, x, m, y: (
        (net.up(x) * (x.sum(-1, keepdim=True) > x.mean().item())).square().mean()
    ),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("way", NUMBERS)
def test_a_number_read_from_a_tensor_becomes_the_detached_tensor(way: str) -> None:
    compared(NUMBERS[way], batch())


@pytest.mark.parametrize("way", WAYS)
def test_ops_on_selected_rows_match_the_model(way: str) -> None:
    compared(WAYS[way], batch())


@pytest.mark.parametrize(
    "way", ["columns, then rows", "cross entropy, summed", "put back", "experts", "labels"]
)
def test_ops_match_the_model_if_no_row_is_selected(way: str) -> None:
    x, mask, labels = batch(none=True)
    if way in ("columns, then rows", "cross entropy, summed"):
        compared(lambda net, x, m, y: WAYS[way](net, x, m, y).nan_to_num(), (x, mask, labels))
    elif way == "labels":  # the mean of no rows is nan
        net = Net(WAYS[way])
        outputs, *_ = execute(
            capture(net, (x, mask, labels)), dict(net.named_parameters()), {}, (x, mask, labels)
        )
        assert outputs[0].isnan() and net(x, mask, labels).isnan()
    else:
        compared(WAYS[way], (x, mask, labels))


@pytest.mark.parametrize(
    "way", ["cross entropy", "mean", "put back", "experts", "logarithms of what is positive"]
)
def test_each_shard_of_a_split_batch_ignores_rows_that_were_not_selected(way: str) -> None:
    torch.manual_seed(0)
    net, inputs = Net(WAYS[way]), batch()
    how: dict[str, Any] = {"hardware": "cpu-gloo", "constraints": [autopar.constraints.fsdp()]}
    plan = autopar.plan(net, Mesh({"a": 2, "b": 2}), example_inputs=inputs, **how)
    found = autopar.verify(plan, net, inputs)
    assert found.ok and found.num_collectives


@pytest.mark.parametrize("way", ["cross entropy", "squares", "columns, then rows"])
def test_a_batch_with_selected_rows_can_be_split_into_microbatches(way: str) -> None:
    torch.manual_seed(0)
    net, inputs = Net(WAYS[way]), batch()
    plan = autopar.plan(net, 2, example_inputs=inputs, hardware="cpu-gloo", num_microbatches=2)
    assert "2 microbatches" in str(plan) and autopar.verify(plan, net, inputs).ok


def test_the_log_gives_the_line_and_the_number_of_computed_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="autopar"):
        capture(Net(put), batch())
    assert (
        "hidden[mask] = net.norm" in caplog.text
        and f"computes all {SAMPLES * LENGTH} rows" in caplog.text
    )


@pytest.mark.parametrize(
    ("loss", "op"),
    [
        (lambda net, x, m, y: (net.up(x[m]).T @ net.up(x[m])).mean(), "op "),
        (lambda net, x, m, y: net.up(x[m]).cumsum(0).mean(), "op cumsum"),
        (lambda net, x, m, y: net.up(x[m])[0].mean(), "op getitem"),
        (lambda net, x, m, y: net.up(x[m]).std(), "op std"),
        (lambda net, x, m, y: net.up(x[m]).repeat(2, 1).square().mean(), "op repeat"),
        (lambda net, x, m, y: (net.up(x)[m] * net.up(x)[~m]).mean(), "op mul"),
        (lambda net, x, m, y: F.dropout(net.up(x[m]), 0.5).mean(), "op dropout"),
        (
            lambda net, x, m, y: net.up(x[m])[net.up(x[m])[:, 0].argsort()][:, 1].mean(),
            "op argsort",
        ),
        (lambda net, x, m, y: net.up(x[m]).mean() * torch.unique(y).numel(), "op unique"),
        (lambda net, x, m, y: net.up(x)[m], "op getitem"),
        (
            lambda net, x, m, y: net.up(x).masked_scatter(~m[..., None], net.up(x)[m]).mean(),
            "op masked_scatter",
        ),
    ],
)
def test_ops_that_mix_selected_rows_are_refused_with_op_and_line(
    loss: Callable[..., Tensor], op: str
) -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor") as refusal:
        capture(Net(loss), batch())
    assert (
        op in str(refusal.value)
        and "test_picked.py" in str(refusal.value)
        and "multiply by a mask" in refusal.value.remedy
    )
