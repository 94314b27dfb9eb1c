"""Programs for the remedies of capture: the computations of forward and the modules that it
calls."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from autopar.capture import capture
from tests.support.remedy_programs import Called, Net, Program, captured, forward


def _branches(self: Any, x: Tensor) -> Tensor:
    x = self.layer(x)
    return x * 2 if x.sum() > 0 else x


class Recurrent(nn.Module):
    """A recurrent layer on a padded batch, which may be packed."""

    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.rnn, self.packs = nn.LSTM(4, 4, batch_first=True), packs

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.packs:
            packed = pack_padded_sequence(x, lengths, batch_first=True)
            return self.rnn(packed)[0].data.square().mean()
        mask = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
        return (self.rnn(x)[0] * mask.unsqueeze(-1)).square().mean()


def _ctc(layer: nn.Module, x: Tensor, y: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    return torch.ctc_loss(layer(x).log_softmax(-1), y, frames, lengths)


def _padded_ctc(layer: nn.Module, x: Tensor, y: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    return F.ctc_loss(layer(x).log_softmax(-1), y, frames, lengths)


_FRAMES = (
    torch.ones(6, 2, 4),
    torch.ones(2, 3, dtype=torch.int64),
    torch.tensor([6, 6]),
    torch.tensor([3, 2]),
)


class Counting(nn.Module):
    """Counts its calls in a buffer, which it replaces or changes in place."""

    def __init__(self, binds: bool) -> None:
        super().__init__()
        self.layer, self.binds = nn.Linear(4, 4), binds
        self.register_buffer("name", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        value = self.name + 1
        if self.binds:
            self.name = value
        else:
            self.name.copy_(value)
        return (self.layer(x) * value).square().mean()


class Steps(nn.Module):
    """Counts its calls in a number or in a buffer."""

    def __init__(self, steps: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if isinstance(steps, Tensor):
            self.register_buffer("steps", steps)
        else:
            self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return (self.layer(x) * self.steps).square().mean()


def _hooked(hook: bool) -> nn.Module:
    net = Net(lambda self, x: x)
    if hook:
        net.layer.weight.register_hook(lambda grad: grad)
    return net


def _lazy(called: bool) -> Any:
    net = Net(lambda self, x: self.first(x), first=nn.LazyLinear(4))
    x = torch.ones(8, 4)
    if called:
        net(x)
    return captured(net, x)


def _clamps(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.layer.weight.clamp_(-1, 1)
    return x


def _shares(tied: bool) -> Any:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight if tied else nn.Parameter(a.weight.detach())
    return forward(lambda self, x: self.b(self.a(x)), a=a, b=b)


def _within(part: nn.Module, x: Tensor | None = None) -> Any:
    """Capture a model that calls a module on `x`."""
    x = torch.ones(8, 4) if x is None else x
    return captured(Net(lambda self, x: self.part(x), part=part), x)


def _lstm(self: Any, x: Tensor) -> Tensor:
    return self.rnn(x)[0]


def _changed(self: Any, x: Tensor) -> Tensor:
    return x.add_(1)


def _copy_changed(self: Any, x: Tensor) -> Tensor:
    x = x.clone()
    return x.add_(1)


def _backward(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    y.sum().backward()
    return y


def _grad(self: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = self.layer(x)
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y + slope


_INDICES = torch.tensor([1, 1, 2, 3])
_ITEM = "capture/diagnostics.py _of_graph 0"

PROGRAMS: dict[str, Program] = {
    "capture/diagnostics.py _of_known_function 0": Program(
        captured(Called(_ctc), *_FRAMES), "F.ctc_loss", captured(Called(_padded_ctc), *_FRAMES)
    ),
    f"{_ITEM} | branch": Program(
        forward(_branches),
        "use torch.where",
        forward(lambda self, x: torch.where((y := self.layer(x)).sum() > 0, y * 2, y)),
    ),
    "capture/diagnostics.py reads_a_value 0": Program(
        captured(Called(lambda layer, x: layer(x)[: int(layer(x).sum().abs())].mean())),
        "compute it before the call and pass it as a Python value",
        captured(Called(lambda layer, x, n: layer(x)[:n].mean()), torch.ones(8, 4), 3),
    ),
    f"{_ITEM} | backward": Program(
        forward(_backward), "torch.autograd.grad(..., create_graph=True)", forward(_grad)
    ),
    "capture/diagnostics.py of_changing_shapes 0": Program(
        forward(lambda self, x: (y := self.layer(x))[y[:, 0] > 0].cumsum(0)),
        "torch.where(mask, x, 0)",
        forward(lambda self, x: torch.where((y := self.layer(x))[:, :1] > 0, y, 0).cumsum(0)),
    ),
    "capture/diagnostics.py of_changing_shapes 0 | rows": Program(
        forward(lambda self, x: (y := self.layer(x))[y[:, 0].nonzero().squeeze(1)].cumsum(0)),
        "`scores.topk(capacity)` and `x[index]`",
        forward(lambda self, x: (y := self.layer(x))[y[:, 0].topk(4).indices].cumsum(0)),
    ),
    "capture/diagnostics.py _cannot_call 0": Program(
        captured(Recurrent(True), torch.ones(2, 3, 4), torch.tensor([3, 2])),
        "run the recurrent layer on the padded batch",
        captured(Recurrent(False), torch.ones(2, 3, 4), torch.tensor([3, 2])),
    ),
    "capture/diagnostics.py _reshapes 0": Program(
        forward(lambda self, x: x.unsqueeze_(0)),
        "x = x.unsqueeze(...)",
        forward(lambda self, x: x.unsqueeze(0)),
    ),
    "capture/diagnostics.py _draws_elsewhere 0": Program(
        forward(lambda self, x: x * random.random()),
        "draw with torch.rand",
        forward(lambda self, x: x * torch.rand(())),
    ),
    "capture/diagnostics.py rebinding_error 0": Program(
        captured(Counting(True)), "self.name.copy_(value)", captured(Counting(False))
    ),
    "capture/diagnostics.py refuse_unseen 0": Program(
        lambda: capture(torch.compile(Net(lambda self, x: x)), (torch.ones(8, 4),)),
        "model._orig_mod",
        lambda: capture(torch.compile(Net(lambda self, x: x))._orig_mod, (torch.ones(8, 4),)),
    ),
    "capture/diagnostics.py refuse_unseen 1": Program(
        _lazy(False), "call the model once on a batch", _lazy(True)
    ),
    "capture/diagnostics.py refuse_unseen 2": Program(
        captured(_hooked(True)), "remove the hooks", captured(_hooked(False))
    ),
    "capture/diagnostics.py of_modules 0": Program(
        forward(_lstm, rnn=nn.LSTM(4, 4, 2, dropout=0.5)),
        "set dropout=0.0",
        forward(_lstm, rnn=nn.LSTM(4, 4, 2, dropout=0.0)),
    ),
    "capture/diagnostics.py of_modules 0 | layers": Program(
        forward(_lstm, rnn=nn.LSTM(4, 4, 2, dropout=0.5)),
        "use a sequence of single-layer modules with nn.Dropout",
        forward(
            lambda self, x: self.b(self.drop(self.a(x)[0]))[0],
            a=nn.LSTM(4, 4),
            drop=nn.Dropout(0.5),
            b=nn.LSTM(4, 4),
        ),
    ),
    "capture/diagnostics.py of_modules 1": Program(
        _within(nn.Embedding(10, 4, max_norm=1.0), _INDICES),
        "omit max_norm",
        _within(nn.Embedding(10, 4), _INDICES),
    ),
    "capture/diagnostics.py of_modules 2": Program(
        _within(nn.BatchNorm1d(4, momentum=None)),
        "such as 0.1",
        _within(nn.BatchNorm1d(4, momentum=0.1)),
    ),
    "capture/diagnostics.py changes_parameter 0": Program(
        forward(_clamps),
        "self.weight.clamp(...)",
        forward(lambda self, x: x @ self.layer.weight.clamp(-1, 1)),
    ),
    "capture/refused_ops.py refuse_branches 0": Program(
        forward(lambda self, x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, (x,))),
        "select one with torch.where",
        forward(lambda self, x: torch.where(x.sum() > 0, x * 2, x + 1)),
    ),
    "capture/refused_ops.py refuse_miscompiled 0": Program(
        forward(lambda self, x: x * F.multilabel_margin_loss(self.layer(x), (x > 0).long())),
        "use multilabel_soft_margin_loss",
        forward(lambda self, x: x * F.multilabel_soft_margin_loss(self.layer(x), x)),
    ),
    "capture/refused_ops.py refuse_random 0": Program(
        forward(lambda self, x: x + torch.poisson(x)),
        "use torch.rand",
        forward(lambda self, x: x + torch.rand(8, 4)),
    ),
    "capture/refused_ops.py refuse_float8 0": Program(
        forward(lambda self, x: x.to(torch.float8_e4m3fn).float()),
        "torch.bfloat16 or float16",
        forward(lambda self, x: x.to(torch.bfloat16).float()),
    ),
    "capture/refused_ops.py refuse_sparse 0": Program(
        _within(nn.Embedding(10, 4, sparse=True), _INDICES),
        "pass sparse=False",
        _within(nn.Embedding(10, 4, sparse=False), _INDICES),
    ),
    "capture/trees.py refuse_overlaps 0": Program(
        _shares(False), "assign the same nn.Parameter", _shares(True)
    ),
    "capture/dynamo/outputs.py refuse_changed_inputs 0": Program(
        forward(_changed), "x = x.clone()", forward(_copy_changed)
    ),
    "capture/dynamo/outputs.py refuse_changed_inputs 0 | inplace": Program(
        _within(nn.ReLU(inplace=True)), "`inplace=False`", _within(nn.ReLU(inplace=False))
    ),
    "capture/python_attributes.py _refusal 0": Program(
        captured(Steps(0)), "buffer", captured(Steps(torch.zeros(())))
    ),
    "capture/normalize/clean.py copy_before_strided 0": Program(
        forward(lambda self, x: (x * 2)[:, ::2].as_strided((4, 4), (4, 1))),
        "x.contiguous().as_strided(...)",
        forward(lambda self, x: (x * 2)[:, ::2].contiguous().as_strided((4, 4), (4, 1))),
    ),
}
