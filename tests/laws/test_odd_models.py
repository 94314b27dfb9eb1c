"""Models that are not transformers match the plain model under all plans.

They have shared and scalar parameters, masks, views, lookups, batch statistics, complex numbers and
16-bit parts. Plans are random legal plans on meshes whose sizes divide few dims.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.verification import verify_program

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.random_plans import prepare, random_plan

Made = tuple[nn.Module, dict[str, Any]]


class Model(nn.Module):
    """A model with named children, parameters and buffers, and a function as forward."""

    def __init__(self, step: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.step = step
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> Any:
        return self.step(
            self, x, *(() if ids is None else (ids,)), *(() if mask is None else (mask,))
        )


def activation() -> Tensor:
    return torch.randn(4, 6, 8)


def shared() -> Made:
    """Return a model with one weight in two products, transposed in one of them, a tied table,
    scalar and unused parameters, and a frozen one."""

    def step(m: Any, x: Tensor, ids: Tensor) -> Tensor:
        hidden = torch.tanh(m.inner(m.table(ids) + x)) @ m.inner.weight
        return F.cross_entropy((m.head(hidden) * m.gain).flatten(0, 1), ids.flatten())

    model = Model(
        step,
        table=nn.Embedding(12, 8),
        inner=nn.Linear(8, 8),
        head=nn.Linear(8, 12),
        gain=nn.Parameter(torch.tensor(1.5)),
        unused=nn.Linear(2, 2),
    )
    model.head.weight = model.table.weight
    model.inner.bias.requires_grad_(False)
    return model, {"x": activation(), "ids": torch.randint(0, 12, (4, 6))}


def masked() -> Made:
    """Return a model with a boolean mask used as an index, for filling and as a weight, and labels
    most of which are ignored."""

    def step(m: Any, x: Tensor, ids: Tensor, mask: Tensor) -> dict[str, Any]:
        hidden = m.inner(x).clone()
        hidden[mask] = 0.5
        scores = hidden.masked_fill(~mask[..., None], -1e4).softmax(1)
        weighed = (torch.where(mask[..., None], x, hidden) * scores).sum() / mask.sum()
        labels = torch.where(ids > 1, -100, ids)
        return {
            "rest": [weighed, None],
            "loss": weighed + F.cross_entropy(hidden.flatten(0, 1), labels.flatten()),
        }

    ids = torch.full((4, 6), 5)
    ids[0, :2] = torch.tensor([0, 1])
    return Model(step, inner=nn.Linear(8, 8)), {
        "x": activation(),
        "ids": ids,
        "mask": torch.rand(4, 6) > 0.4,
    }


def statistics() -> Made:
    """Return a model whose batch norms and forward update buffers."""

    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.second(torch.relu(m.first(m.inner(x))))
        m.mean.mul_(0.9).add_(hidden.detach().mean((0, 2)), alpha=0.1)
        return (hidden * m.mean[:, None]).pow(2).mean()

    parts = {
        "inner": nn.Linear(8, 8),
        "first": nn.BatchNorm1d(6),
        "second": nn.BatchNorm1d(6, momentum=0.3),
    }
    return Model(step, **parts, mean=torch.ones(6)), {"x": activation()}


def rearranged() -> Made:
    """Return a model with views of views, lookups along sharded dims, extremes and running sums."""

    def step(m: Any, x: Tensor, ids: Tensor) -> Tensor:
        y = m.inner(x)
        turned = (
            y.view(4, 3, 2, 2, 4)
            .permute(3, 0, 2, 1, 4)
            .reshape(8, 6, 4)
            .transpose(1, 2)
            .flip(1)[:, 1:3]
        )
        picked = y.gather(1, ids[..., None].expand(4, 6, 8) % 6) + torch.zeros_like(y).scatter_add(
            1, ids[..., None].expand(4, 6, 8) % 6, y
        )
        extremes = (
            y.amax(0).sum() + y.min(1).values.mean() + y.max() + y.cumsum(1).softmax(0).pow(2).sum()
        )
        return (
            turned.pow(2).mean()
            + picked.pow(2).mean()
            + extremes
            + y[ids[0] % 4, ids[1] % 6].pow(2).sum()
            + y[:, ids[0] % 6].mean()
        )

    return Model(step, inner=nn.Linear(8, 8)), {
        "x": activation(),
        "ids": torch.randint(0, 12, (4, 6)),
    }


def gated() -> Made:
    """Return a model with two fused projections of one activation, grouped queries, and a rotation
    by complex numbers."""

    def step(m: Any, x: Tensor) -> Tensor:
        hidden = m.inner(x)
        turned = torch.view_as_real(torch.view_as_complex(hidden.view(4, 6, 4, 2)) * m.turns)
        (a, b), (c, d) = m.left(hidden).chunk(2, -1), m.right(hidden).chunk(2, -1)
        keys = (a * b.sigmoid() + c * d.tanh()).view(4, 6, 2, 2).transpose(1, 2)
        return (
            F.scaled_dot_product_attention(
                turned.transpose(1, 2), keys, keys, is_causal=True, enable_gqa=True
            )
            .pow(2)
            .mean()
        )

    turns = torch.polar(torch.ones(6, 4), torch.rand(6, 4))
    return Model(
        step,
        inner=nn.Linear(8, 8),
        left=nn.Linear(8, 8),
        right=nn.Linear(8, 8, bias=False),
        turns=turns,
    ), {"x": activation()}


def convolved() -> Made:
    """Return a model with grouped, depthwise and transposed convolutions, and a pooling without a
    rule."""

    def step(m: Any, x: Tensor) -> Tensor:
        return (
            m.up(F.max_pool2d(m.deep(m.grouped(x.view(4, 4, 6, 2).expand(4, 4, 6, 2))), 2, 1))
            .pow(2)
            .mean()
        )

    grouped, deep = nn.Conv2d(4, 8, 3, groups=2, padding=1), nn.Conv2d(8, 16, 1, groups=8)
    return Model(step, grouped=grouped, deep=deep, up=nn.ConvTranspose2d(16, 4, 2)), {
        "x": activation()
    }


def pieces() -> Made:
    """Return a model with lists of one tensor, a sum over an order, a complex constant, and slices
    that are clipped to a norm that most of them exceed."""

    def step(m: Any, x: Tensor) -> Tensor:
        y = m.inner(x)
        y = y.chunk(1, 1)[0] + y[:, None].unbind(1)[0] * y.split(8, -1)[0]
        places = torch.searchsorted(m.edges, y.detach().contiguous(), sorter=m.order)
        waves = torch.fft.irfft(torch.fft.rfft(y) * 1j)
        return (torch.renorm(y * 1000, 2, 1, 50.0) * waves).mean() + (y * places).square().mean()

    edges = torch.randn(16)
    return Model(step, inner=nn.Linear(8, 8), edges=edges, order=edges.argsort()), {
        "x": activation()
    }


class Recurrent(nn.Module):
    """A recurrent layer, whose steps torch keeps in lists, and a norm whose eps depends on its
    dtype."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.norm, self.net = nn.RMSNorm(8), kind(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(self.net(self.norm(x))[0], (8,)).pow(3).mean()


def lstm() -> Made:
    return Recurrent(nn.LSTM), {"x": activation()}


def gru() -> Made:
    return Recurrent(nn.GRU), {"x": activation()}


def tied() -> Made:
    """Return a model in which two layers share a bias, and one layer has two names."""

    def step(m: Any, x: Tensor) -> Tensor:
        return m.second(torch.tanh(m.first(x))).square().mean()

    model = Model(step, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    model.second.bias = model.first.bias
    model.alias = model.first
    return model, {"x": activation()}


def scored() -> Made:
    """Return a model with several losses of the same scores: a sum, the mean that is
    differentiated, and a mean over other labels before it."""

    def step(m: Any, x: Tensor, ids: Tensor) -> dict[str, Any]:
        scores = F.log_softmax(m.head(x).flatten(0, 1), -1)
        labels = ids.flatten()
        total, other = (
            F.nll_loss(scores, labels, reduction="sum"),
            F.nll_loss(scores, labels.flip(0), ignore_index=3),
        )
        return {"total": total, "other": other, "loss": F.nll_loss(scores, labels)}

    return Model(step, head=nn.Linear(8, 12)), {
        "x": activation(),
        "ids": torch.randint(0, 12, (4, 6)),
    }


MODELS = (shared, masked, statistics, rearranged, gated, convolved, pieces, lstm, gru, tied, scored)


@pytest.mark.parametrize("mesh", ["2", "3", "a=2,b=2"])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_random_plans_of_an_unusual_model_match_the_model(
    make: Callable[[], Made], mesh: str
) -> None:
    torch.manual_seed(0)
    model, batch = make()
    ready = prepare(model, batch, Mesh.parse(mesh), HardwareProfile.load("cpu-gloo"))
    communicated = 0
    for seed in (0, 2):
        _, program = random_plan(ready, seed, recompute_otherwise=True)
        found = verify_program(ready.trace, program, model, (), batch)
        assert found.ok and found.tolerance == 1e-9
        communicated += len(program.stages[0].collectives)
    assert communicated or mesh == "3"
