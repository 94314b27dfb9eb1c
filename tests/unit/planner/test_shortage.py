"""If nothing fits, the error names the constraints that need more than the budget, as the user
wrote them, and how much memory suffices."""

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
def test_only_the_constraint_that_exceeds_the_budget_is_named() -> None:
    error = refusal(200 * KIB, SQUARE, ddp(["a", "b"]))
    assert (
        "; ddp(axes=['a', 'b']) asks for more than the budget: without it at least " in error.what
    )
    assert "c_fc" not in error.what


@pytest.mark.slow
def test_if_no_plan_fits_without_constraints_none_is_named_and_untried_options_are() -> None:
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


SLOW = ("microbatches", "stages")  # these take half a minute each


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS]
)
def test_the_needed_memory_is_between_a_proven_bound_and_the_peak_of_a_found_plan(
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
def test_constraints_within_stages_and_microbatches_that_exceed_the_budget_are_named() -> None:
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
