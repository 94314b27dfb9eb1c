"""A residual MLP with small weights or on the meta device, for tests that need no attention,
embeddings or norms."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from autopar.capture import Trace, capture


class Block(nn.Module):
    """x + down(relu(up(x)))."""

    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(width, hidden, bias=bias),
            nn.Linear(hidden, width, bias=bias),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Mlp(nn.Module):
    """Equal blocks with the mean square as the loss."""

    def __init__(self, width: int, hidden: int, num_layers: int, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, hidden, bias) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


@cache
def traced(
    width: int,
    hidden: int,
    batch: int,
    num_layers: int = 3,
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Trace:
    """Capture the model on the meta device with a batch of [batch, width]."""
    with torch.device("meta"):
        model, x = (
            Mlp(width, hidden, num_layers, bias).to(dtype),
            torch.empty(batch, width, dtype=dtype),
        )
    return capture(model, (), {"x": x})
