"""Attributes that forward restores, and settings whose class raises for some attributes, as the
settings of models with different layers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.dynamo import joint
from autopar.capture.execute import execute


class Settings:
    def __init__(self) -> None:
        self.width = 3.0

    def __getattribute__(self, name: str) -> Any:
        if name == "width":
            raise RuntimeError("ask a layer")
        return super().__getattribute__(name)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.settings = nn.Linear(4, 4), Settings()

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.linear(x) * self.settings.__dict__["width"]).sum()
        return loss


def test_an_attribute_that_raises_does_not_stop_the_capture() -> None:
    net, x = Net(), torch.randn(2, 4)
    (made,), *_ = execute(capture(net, (x,)), dict(net.named_parameters()), {}, (x,))
    torch.testing.assert_close(made, net(x).detach())


class Busy(nn.Module):
    """A model that sets `busy` while forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.busy = nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        before, self.busy = self.busy, True
        made = self.scaled(self.linear(x)).sum()
        self.busy = before
        return made

    def scaled(self, y: Tensor) -> Tensor:
        return y * 2 if self.busy else y


def test_a_restored_attribute_does_not_cause_a_second_capture(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def again(*_: Any) -> None:
        raise AssertionError("captured once more")

    monkeypatch.setattr(joint, "_captured_again", again)
    net, x = Busy(), torch.randn(2, 4)
    (made,), *_ = execute(capture(net, (x,)), dict(net.named_parameters()), {}, (x,))
    torch.testing.assert_close(made, net(x).detach())
    assert not caplog.records
