"""A 16-bit head that returns more than the loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Shown(nn.Module):
    """Returns its logits twice, a view of them, its input, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(16, 64), nn.Linear(64, 256)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        logits = self.head(self.up(x).relu())
        return (
            nn.functional.cross_entropy(logits.float(), labels),
            logits,
            logits,
            logits.view(2, -1, 256),
            x,
        )


def shown(num_rows: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model and a batch."""
    batch = {
        "x": torch.ones(num_rows, 16, dtype=torch.bfloat16),
        "labels": torch.arange(num_rows) % 256,
    }
    return Shown().bfloat16(), batch
