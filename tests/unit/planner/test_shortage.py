"""Where nothing fits: which constraints ask for more than the budget, in the user's words, and
what would do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import zoo_small

import autopar
from autopar.constraints import Constraint, ddp, layout, megatron, pipeline
from autopar.errors import InfeasibleError

MESH, KIB = autopar.Mesh({"a": 2, "b": 2}), 1024
SQUARE = layout("transformer.h.0.mlp.c_fc", weight="R R")


def made(memory_bytes: int, *constraints: Constraint, **options: Any) -> autopar.Plan:
    torch.manual_seed(0)
    model, batch = zoo_small.gpt2(num_layers=2)
    wish = {
        "outputs": "loss",
        "memory_bytes": memory_bytes,
        "loss_rows": 0,
        "constraints": constraints,
        **options,
    }
    return autopar.plan(model, MESH, example_inputs=batch, hardware="cpu-gloo", **wish)


def refusal(memory_bytes: int, *constraints: Constraint, **options: Any) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        made(memory_bytes, *constraints, **options)
    return caught.value


@pytest.mark.slow
def test_the_constraint_that_asks_for_too_much_is_named_and_others_are_not() -> None:
    error = refusal(200 * KIB, SQUARE, ddp(["a", "b"]))
    assert (
        "; ddp(axes=['a', 'b']) asks for more than the budget: without it at least " in error.what
    )
    assert "c_fc" not in error.what


@pytest.mark.slow
def test_where_no_plan_at_all_needs_less_no_constraint_is_to_blame_and_what_was_not_tried_is_said() -> (  # noqa: E501
    None
):
    error = refusal(64 * KIB, ddp(["a", "b"]))
    assert "asks for" not in error.what
    assert error.remedy.endswith(
        "stages were not tried: pass constraints=(autopar.constraints.pipeline(),)"
    )


BETWEEN = re.compile(
    r"between \S+ \S+ \((\d+) bytes, proven for all alternatives tried\)"
    r" and \S+ \S+ \((\d+) bytes, the smallest plan found\)"
)
KINDS: dict[str, dict[str, Any]] = {
    "one piece": {"num_microbatches": 1, "constraints": (ddp(["a", "b"]),)},
    "microbatches": {"num_microbatches": 2, "constraints": (ddp("a"),)},
    "stages": {"constraints": (pipeline("a", microbatches=2), ddp("b"))},
    "megatron": {"constraints": (megatron(pp=2, tp=2, microbatches=2),)},
}


SLOW = ("microbatches", "stages")  # half a minute each


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS]
)
def test_the_least_that_would_do_lies_between_what_is_proven_and_what_a_plan_needs_which_does(
    kind: str,
) -> None:
    error = refusal(64 * KIB, **KINDS[kind])
    found = BETWEEN.search(error.what)
    assert found, error.what
    proven, enough = int(found[1]), int(found[2])
    assert 64 * KIB < proven <= enough == error.needed_bytes
    assert enough <= proven * 1.35
    assert made(enough, **KINDS[kind]).prediction.peak_bytes <= enough
    refusal(proven - 1, **KINDS[kind])


@pytest.mark.slow
def test_the_constraints_of_stages_and_microbatches_are_named_where_without_them_there_is_enough() -> (  # noqa: E501
    None
):
    error = refusal(200 * KIB, pipeline("a", microbatches=2), ddp("b"))
    assert "; ddp(axes=['b']) asks for more than the budget: without it at least " in error.what, (
        error.what
    )
    error = refusal(200 * KIB, ddp("a"), num_microbatches=2)
    assert "; ddp(axes=['a']) asks for more than the budget" in error.what, error.what
    error = refusal(200 * KIB, megatron(pp=2, dp=2, microbatches=2))
    assert "; megatron(dp=2, pp=2, microbatches=2) asks for more than the budget" in error.what, (
        error.what
    )
