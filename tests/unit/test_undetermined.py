"""Verification of models whose own result depends on rounding, as with a top-k of equal numbers."""

from __future__ import annotations

from collections.abc import Callable

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

Pick = Callable[[Tensor], Tensor]
TOP_K = torch.ops.aten.topk.default


class Picks(nn.Module):
    """Picks tokens by their norms, which are equal or not.

    Args:
        equal: whether the norms are equal up to rounding.
        pick: returns indices of tokens, [batch, k], from their norms, [batch, tokens].
    """

    def __init__(self, *, equal: bool, pick: Pick) -> None:
        super().__init__()
        self.equal, self.pick, self.head = equal, pick, nn.Linear(8, 5)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.down(self.up(x).relu())
        h = F.normalize(h, dim=-1) if self.equal else h
        picked = self.pick(h.square().sum(-1))
        h = h.gather(1, picked.unsqueeze(-1).expand(-1, -1, 8))
        return self.head(h).square().mean()


def _top_k(norms: Tensor) -> Tensor:
    return norms.topk(3, 1).indices


def _argmax(norms: Tensor) -> Tensor:
    return norms.argmax(1, keepdim=True)


def _max(norms: Tensor) -> Tensor:
    return norms.max(1, keepdim=True).indices


def _sort(norms: Tensor) -> Tensor:
    return norms.sort(1).indices[:, :2]


def _compare(norms: Tensor) -> Tensor:
    return (norms >= norms.mean(1, keepdim=True)).long()


PICKS = (_top_k, _argmax, _max, _sort, _compare)


def build(*, equal: bool, pick: Pick = _top_k) -> tuple[Picks, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Picks(equal=equal, pick=pick), {"x": torch.randn(12, 6, 8)}


def split(model: nn.Module, batch: dict[str, Tensor]) -> autopar.Plan:
    """A plan that adds up partial sums, and therefore rounds differently from the model."""
    constraints = (tensor_parallel("1d", axes="gpu"),)
    return autopar.plan(
        model, Mesh(gpu=4), example_inputs=batch, hardware="cpu-gloo", constraints=constraints
    )


@pytest.mark.parametrize("pick", PICKS)
def test_a_choice_between_nearly_equal_numbers_is_named(pick: Pick) -> None:
    model, batch = build(equal=True, pick=pick)
    plan = split(model, batch)
    with pytest.raises(UndeterminedError, match="changes if its operands change") as raised:
        autopar.verify(plan, model, batch)
    assert "test_undetermined.py" in str(raised.value)


@pytest.mark.parametrize("pick", PICKS)
def test_a_choice_between_different_numbers_is_verified(pick: Pick) -> None:
    model, batch = build(equal=False, pick=pick)
    assert autopar.verify(split(model, batch), model, batch).ok


def _reverse(graph: fx.Graph) -> None:
    """Make a top-k pick the smallest numbers."""
    (node,) = [n for n in graph.nodes if n.target is TOP_K]
    node.args = (*node.args[:2], node.args[2] if len(node.args) > 2 else -1, False)


def test_a_wrong_choice_between_different_numbers_is_a_wrong_program() -> None:
    model, batch = build(equal=False)
    trace = capture(model, (), batch)
    planned = make_plan(trace, Mesh(2), HardwareProfile.load("h100-sxm"), PlanOptions())
    program = planned.program
    _reverse(program.stages[0].forward.graph)
    program.stages[0].forward.recompile()
    with pytest.raises(VerificationError, match="the first node that differs is /topk") as raised:
        verify_program(trace, program, model, (), batch)
    assert not isinstance(raised.value, UndeterminedError)
