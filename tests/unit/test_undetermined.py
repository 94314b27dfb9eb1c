"""Verification of models whose own result depends on rounding, as with a top-k of equal numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.constraints import tensor_parallel
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.errors import VerificationError
from autopar.planner import PlanOptions, make_plan
from autopar.verification import verify_program
from autopar.verification.case import UndeterminedError

TOP_K = torch.ops.aten.topk.default


class Picks(nn.Module):
    """A model that picks the tokens with the largest norm, with equal or different norms."""

    def __init__(self, *, equal: bool) -> None:
        super().__init__()
        self.equal, self.head = equal, nn.Linear(8, 5)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.down(self.up(x).relu())
        h = F.normalize(h, dim=-1) if self.equal else h
        picked = h.square().sum(-1).topk(3, 1).indices
        h = h.gather(1, picked.unsqueeze(-1).expand(-1, -1, 8))
        return self.head(h).square().mean()


def build(*, equal: bool) -> tuple[Picks, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Picks(equal=equal), {"x": torch.randn(12, 6, 8)}


def split(model: nn.Module, batch: dict[str, Tensor]) -> autopar.Plan:
    """Return a plan with partial sums, which therefore rounds differently from the model."""
    constraints = (tensor_parallel("1d", axes="gpu"),)
    return autopar.plan(
        model, Mesh(gpu=4), example_inputs=batch, hardware="cpu-gloo", constraints=constraints
    )


def test_a_choice_between_nearly_equal_numbers_is_named() -> None:
    model, batch = build(equal=True)
    plan = split(model, batch)
    with pytest.raises(UndeterminedError, match="changes if its operands change") as raised:
        autopar.verify(plan, model, batch)
    assert "topk" in str(raised.value) and "test_undetermined.py" in str(raised.value)


def test_a_choice_between_different_numbers_is_verified() -> None:
    model, batch = build(equal=False)
    plan = split(model, batch)
    assert autopar.verify(plan, model, batch).ok


def _reverse(graph: fx.Graph) -> None:
    """Make a top-k pick the smallest numbers."""
    (node,) = [n for n in graph.nodes if n.target is TOP_K]
    node.args = (*node.args[:2], node.args[2] if len(node.args) > 2 else -1, False)


def test_a_wrong_choice_between_different_numbers_is_an_error_of_the_program() -> None:
    model, batch = build(equal=False)
    trace = capture(model, (), batch)
    planned = make_plan(trace, Mesh(2), HardwareProfile.load("h100-sxm"), PlanOptions())
    program = planned.program
    _reverse(program.stages[0].forward.graph)
    program.stages[0].forward.recompile()
    with pytest.raises(VerificationError, match="the first node that differs is /topk") as raised:
        verify_program(trace, program, model, (), batch)
    assert not isinstance(raised.value, UndeterminedError)
