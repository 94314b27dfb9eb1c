"""Data-dependent branches that only raise are dropped, as assertions are, and the log names their
lines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.execute import execute
from autopar.errors import CaptureError


class Net(nn.Module):
    def __init__(self, check: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.check, self.most = nn.Linear(4, 4), check, 10

    def forward(self, x: Tensor) -> Tensor:
        return self.check(self, x)


def largest(net: Any, x: Tensor) -> Tensor:
    if x.max() > net.most:
        raise ValueError(f"of {tuple(x.shape)} one is above {net.most}")
    return net.linear(x).sum()  # type: ignore[no-any-return]


def item(net: Any, x: Tensor) -> Tensor:
    if x.abs().sum().item() == 0:
        raise ValueError("nothing there")
    return net.linear(x).sum()  # type: ignore[no-any-return]


def several(net: Any, x: Tensor) -> Tensor:
    if net.most and x.min() < -net.most:
        raise RuntimeError
    if not (x < 100).all():
        raise RuntimeError("large")
    return net.linear(x).sum()  # type: ignore[no-any-return]


def likelihood(net: Any, x: Tensor) -> Tensor:
    made = net.linear(x)
    return nn.GaussianNLLLoss()(made, x, made.detach().exp())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("check", "num"), [(largest, 1), (item, 1), (several, 2), (likelihood, 1)])
def test_a_branch_that_only_raises_is_dropped_and_logged(
    check: Any, num: int, caplog: pytest.LogCaptureFixture
) -> None:
    net, x = Net(check), torch.randn(2, 4)
    with caplog.at_level(logging.WARNING, logger="autopar"):
        trace = capture(net, (x,))
    (said,) = [record.message for record in caplog.records]
    assert "may raise an error" in said and said.count("test_raising.py:") == num
    (made,), *_ = execute(trace, dict(net.named_parameters()), {}, (x,))
    torch.testing.assert_close(made, net(x).detach())


def otherwise(net: Any, x: Tensor) -> Tensor:
    if x.max() > net.most:
        x = x * 2
        raise_later = True
        net.linear(x) if raise_later else None
    return net.linear(x).sum()  # type: ignore[no-any-return]


def notes_it(net: Any, x: Tensor) -> Tensor:
    if x.max() > net.most:
        net.most = 0
        raise ValueError
    return net.linear(x).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("check", [otherwise, notes_it])
def test_a_branch_with_other_effects_is_refused(check: Any) -> None:
    with pytest.raises(CaptureError, match="one graph") as refused:
        capture(Net(check), (torch.randn(2, 4),))
    assert "torch.where" in refused.value.remedy and "x.max() > net.most" in str(refused.value)


def test_a_branch_on_a_shape_raises_its_error() -> None:
    def known(net: Any, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            raise ValueError("one sample only")
        return net.linear(x).sum()  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match="one sample only"):
        capture(Net(known), (torch.randn(2, 4),))
