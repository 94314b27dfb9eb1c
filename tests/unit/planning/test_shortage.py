"""Where nothing fits: which constraints ask for more than there is, in the user's words, and what would do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo_small

import autopar
from autopar.constraints import Constraint, ddp, layout, pipeline
from autopar.errors import InfeasibleError

MESH, KIB = autopar.Mesh({"a": 2, "b": 2}), 1024
SQUARE = layout("transformer.h.0.mlp.c_fc", weight="R R")


def made(memory_bytes: int, *constraints: Constraint, **options: Any) -> autopar.Plan:
    torch.manual_seed(0)
    model, batch = zoo_small.gpt2(num_layers=2)
    wish = {"outputs": "loss", "memory_bytes": memory_bytes, "constraints": constraints, **options}
    return autopar.plan(model, MESH, example_inputs=batch, hardware="cpu-gloo", **wish)


def refusal(memory_bytes: int, *constraints: Constraint, **options: Any) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        made(memory_bytes, *constraints, **options)
    return caught.value


def test_the_constraint_that_asks_for_too_much_is_named_and_others_are_not() -> None:
    error = refusal(200 * KIB, SQUARE, ddp(["a", "b"]))
    assert "; ddp(axes=['a', 'b']) asks for more than there is: without it at least " in error.what
    assert "c_fc" not in error.what


def test_where_no_plan_at_all_needs_less_no_constraint_is_to_blame() -> None:
    assert "asks for" not in refusal(64 * KIB, ddp(["a", "b"])).what


def test_a_plan_that_would_do_is_found_and_does() -> None:
    error = refusal(80 * KIB, ddp(["a", "b"]))
    assert f"; a plan that needs {error.needed_bytes / KIB:.0f} KiB was found" in error.what
    assert made(error.needed_bytes, ddp(["a", "b"]), num_microbatches=1).prediction.peak_bytes <= error.needed_bytes


def test_of_stages_and_microbatches_the_refusal_stays_as_it_is() -> None:
    for options in ({"num_microbatches": 2}, {"constraints": (pipeline("a"),)}):
        with pytest.raises(InfeasibleError) as caught:
            made(64 * KIB, **options)
        assert "was found" not in caught.value.what
