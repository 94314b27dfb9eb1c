"""Rows selected by a mask and combined with a given number of rows: their number is static."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from benchmarks.common import load_profile

SAMPLES, LENGTH, WIDTH = 4, 6, 8


class Net(nn.Module):
    def __init__(self, does: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.seen, self.does = nn.Linear(WIDTH, WIDTH), nn.Linear(2, WIDTH), does

    def forward(self, x: Tensor, mask: Tensor, given: Tensor) -> Tensor:
        return self.does(self.up(x), mask, self.seen(given))


def told_apart(hidden: Tensor) -> Tensor:
    """Return a loss that depends on the order of rows."""
    return (hidden * torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH, 1)).square().mean()


def adds_at_a_mask(hidden: Tensor, mask: Tensor, given: Tensor) -> Tensor:
    """Add given rows at a mask, as multimodal models do in their first layers."""
    hidden = hidden.clone()
    here = hidden[mask, :] + given
    hidden[mask, :] = here
    return told_apart(hidden)


def puts_in(hidden: Tensor, mask: Tensor, given: Tensor) -> Tensor:
    hidden = hidden.clone()
    hidden[mask] = given
    return told_apart(hidden)


def mixes_rows(hidden: Tensor, mask: Tensor, given: Tensor) -> Tensor:
    """Compute with all rows. This is allowed because their number is fixed."""
    rows = hidden[mask][:, :4] * given[:, 4:]
    return rows.cumsum(0).square().mean() / hidden[mask].shape[0]


@pytest.mark.parametrize("does", [adds_at_a_mask, puts_in, mixes_rows])
def test_rows_combined_with_given_rows_match_the_model(does: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    mask = torch.zeros(SAMPLES, LENGTH, dtype=torch.bool)
    mask[0, 1:4] = mask[2, :2] = mask[3, 5] = True  # six rows, a different number per sample
    model: Any = Net(does)
    batch = torch.randn(SAMPLES, LENGTH, WIDTH), mask, torch.randn(6, 2)
    plan = autopar.plan(
        model,
        {"a": 2, "b": 2},
        example_inputs=batch,
        hardware=load_profile("cpu-gloo-frictionless"),
    )
    assert autopar.verify(plan, model, batch).ok
