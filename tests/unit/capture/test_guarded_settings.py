"""Settings whose class does not give everything away that is asked for, as configurations of layers that differ do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import capture
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


def test_what_their_class_raises_stops_no_capture() -> None:
    net, x = Net(), torch.randn(2, 4)
    (made,), *_ = execute(capture(net, (x,)), dict(net.named_parameters()), {}, (x,))
    torch.testing.assert_close(made, net(x).detach())
