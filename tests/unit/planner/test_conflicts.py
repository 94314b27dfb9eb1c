"""Conflicting constraints: the deletion filter satisfies the definition of a minimal set, and
errors name the constraints as the user wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.constraints import Constraint, ddp, fsdp, layout, megatron, pipeline, tensor_parallel
from autopar.errors import ConstraintError, InfeasibleError
from autopar.planner.report_infeasible import find_conflict

ALL = tuple(layout(f"m{i}", weight="R") for i in range(5))


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=4))
def test_a_found_conflict_is_infeasible_and_minimal(conflicts: list[set[int]]) -> None:
    def hold(constraints: Sequence[Constraint]) -> None:
        if any(all(ALL[i] in constraints for i in conflict) for conflict in conflicts):
            raise ConstraintError("no")

    found = find_conflict(ALL, hold)
    with pytest.raises(ConstraintError):
        hold(found)
    for constraint in found:
        hold([c for c in found if c is not constraint])


class Net(nn.Module):
    """A model with two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.down(torch.relu(self.up(x))).pow(2).mean()
        return loss


def refusal(*constraints: Constraint) -> str:
    with pytest.raises(ConstraintError) as caught:
        autopar.plan(
            Net(),
            autopar.Mesh({"a": 2, "b": 2}),
            example_inputs={"x": torch.randn(8, 16)},
            hardware="cpu-gloo",
            constraints=constraints,
        )
    return caught.value.what


def test_only_conflicting_constraints_are_named_as_the_user_wrote_them() -> None:
    said = refusal(fsdp("b"), layout("down", weight="R R"), layout("up", weight="S(0) R"), ddp("a"))
    assert said.endswith(
        "; layout('up', weight='S(0) R') and ddp(axes=['a']) conflict: without any one of them,"
        " the others can hold"
    )


def test_a_constraint_that_is_infeasible_alone_is_not_a_conflict() -> None:
    assert "conflict" not in refusal(layout("absent", weight="R R"), ddp("b"))


class Layers(nn.Module):
    """A model with four linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.pow(2).mean()


STAGES = {"stage": 2, "a": 2}
CUT = pipeline("stage", microbatches=4)
SPLIT, REPEATED = layout("layers.*", weight="S(0)"), layout("layers.1", weight="R")


def staged_refusal(
    *constraints: Constraint, mesh: dict[str, int] | None = None, **options: Any
) -> str:
    example = {"x": torch.randn(8, 16)}
    with pytest.raises(ConstraintError) as caught:
        autopar.plan(
            Layers(),
            autopar.Mesh(mesh or STAGES),
            example_inputs=example,
            hardware="cpu-gloo",
            constraints=constraints,
            **options,
        )
    return caught.value.what


def said_of(*found: str) -> str:
    return f"; {', '.join(found[:-1])} and {found[-1]} {END}"


END = "conflict: without any one of them, the others can hold"
NAME = "pipeline('stage', microbatches={})"


def test_constraints_that_conflict_within_stages_are_named_without_the_pipeline() -> None:
    pair = said_of("layout('layers.*', weight='S(0)')", "ddp(axes=['a'])")
    assert staged_refusal(CUT, SPLIT, ddp("a")).endswith(pair)
    assert staged_refusal(
        SPLIT, ddp("a"), pipeline("stage", microbatches=4, schedule="interleaved_1f1b")
    ).endswith(pair)
    assert staged_refusal(SPLIT, REPEATED, CUT).endswith(
        said_of("layout('layers.*', weight='S(0)')", "layout('layers.1', weight='R')")
    )
    assert staged_refusal(SPLIT, ddp("a"), mesh={"a": 2}, num_microbatches=2).endswith(pair)


def test_a_pipeline_that_uses_the_axis_or_batch_of_a_constraint_is_in_the_conflict() -> None:
    assert staged_refusal(fsdp("stage"), CUT).endswith(
        said_of(NAME.format(4), "fsdp(axes=['stage'])")
    )
    few = staged_refusal(
        tensor_parallel(axes="a"),
        megatron(pp=2, microbatches=4),
        layout("layers.0", weight="R S(0)"),
    )
    assert few.endswith(
        "megatron(pp=2, microbatches=4) and layout('layers.0', weight='R S(0)') " + END
    )
    assert staged_refusal(pipeline("stage", microbatches=8), ddp("a")).endswith(
        said_of(NAME.format(8), "ddp(axes=['a'])")
    )
    assert staged_refusal(ddp("a"), mesh={"a": 2}, num_microbatches=8).endswith(
        said_of("num_microbatches=8", "ddp(axes=['a'])")
    )


def test_wrong_cuts_or_one_wrong_constraint_are_not_a_conflict() -> None:
    assert "conflict" not in staged_refusal(
        pipeline("stage", microbatches=4, cuts=["layers.9"]), fsdp("a")
    )
    assert "conflict" not in staged_refusal(CUT, layout("absent", weight="R"), fsdp("a"))


def test_the_largest_of_the_stages_that_do_not_fit_is_named() -> None:
    example = {"x": torch.randn(64, 16)}
    ask = {
        "example_inputs": example,
        "hardware": "cpu-gloo",
        "constraints": (pipeline("stage", microbatches=2, cuts=["layers.1"]),),
    }
    with pytest.raises(
        InfeasibleError,
        match=r"stage 1 of 2: .*; 2 stages do not fit; this one needs the most",
    ) as caught:
        autopar.plan(Layers(), autopar.Mesh({"stage": 2}), memory_bytes=2000, **ask)
    with pytest.raises(InfeasibleError):
        autopar.plan(
            Layers(), autopar.Mesh({"stage": 2}), memory_bytes=caught.value.needed_bytes - 1, **ask
        )
