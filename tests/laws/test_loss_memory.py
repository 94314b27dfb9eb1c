"""The predicted and measured memory of losses, and their values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from measured import measured_peak
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.api.planning import plan_model
from autopar.constraints import ddp
from autopar.core.mesh import Mesh
from autopar.program.peak_memory import trace_peak

LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "smooth l1": partial(F.smooth_l1_loss, beta=0.5),
    "soft margin": F.soft_margin_loss,
    "huber": F.huber_loss,
}


class Scored(nn.Module):
    """A model whose scores take as much memory as everything else."""

    def __init__(self, loss: Callable[..., Tensor], reduction: str) -> None:
        super().__init__()
        self.loss, self.reduction, self.layer = loss, reduction, nn.Linear(8, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y, reduction=self.reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_allocates_only_its_result(name: str, num: int, reduction: str) -> None:
    """torch reduces some of these losses into the memory of the unreduced loss."""
    torch.manual_seed(0)
    model, batch = (
        Scored(LOSSES[name], reduction),
        {"x": torch.randn(64, 8), "y": torch.randn(64, 64).sign()},
    )
    asked: dict[str, Any] = {"hardware": "h100-sxm", "constraints": (ddp(),)}
    program = plan_model(model, Mesh({"gpu": num}), example_inputs=batch, **asked)[
        1
    ].stage_program()
    measured, _ = measured_peak(program, batch)
    assert measured == trace_peak(program).peak_bytes
    assert autopar.verify(
        autopar.plan(model, num, example_inputs=batch, **asked), model, batch, dtype=None
    ).ok
