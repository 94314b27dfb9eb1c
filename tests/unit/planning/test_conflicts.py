"""Which constraints conflict: the deletion filter against the definition of a smallest set, and in the user's words."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.constraints import Constraint, ddp, fsdp, layout
from autopar.errors import ConstraintError
from autopar.planning.conflicts import conflicting

ALL = tuple(layout(f"m{i}", weight="R") for i in range(5))


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=4))
def test_what_is_found_cannot_hold_and_holds_without_any_one(conflicts: list[set[int]]) -> None:
    def hold(constraints: Sequence[Constraint]) -> None:
        if any(all(ALL[i] in constraints for i in conflict) for conflict in conflicts):
            raise ConstraintError("no")

    found = conflicting(ALL, hold)
    with pytest.raises(ConstraintError):
        hold(found)
    for constraint in found:
        hold([c for c in found if c is not constraint])


class Net(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.down(torch.relu(self.up(x))).pow(2).mean()
        return loss


def refusal(*constraints: Constraint) -> str:
    with pytest.raises(ConstraintError) as caught:
        autopar.plan(
            Net(), autopar.Mesh({"a": 2, "b": 2}), example_inputs={"x": torch.randn(8, 16)}, hardware="cpu-gloo", constraints=constraints
        )
    return caught.value.what


def test_conflicting_constraints_are_named_as_the_user_wrote_them_and_others_are_not() -> None:
    said = refusal(fsdp("b"), layout("down", weight="R R"), layout("up", weight="S(0) R"), ddp("a"))
    assert said.endswith("; layout('up', weight='S(0) R') and ddp(axes=['a']) conflict: of these, all but any one can hold")


def test_a_constraint_that_cannot_hold_alone_is_no_conflict() -> None:
    assert "conflict" not in refusal(layout("absent", weight="R R"), ddp("b"))
