"""Constraints written as text, as on the command line."""

from __future__ import annotations

import pytest

from autopar.constraints import (
    Constraint,
    context_parallel,
    fsdp,
    layout,
    megatron,
    offload,
    pipeline,
    tensor_parallel,
)
from autopar.constraints.text import parse_constraint
from autopar.errors import AutoparError, ConstraintError

WRITTEN: dict[str, Constraint] = {
    "fsdp": fsdp(),
    "fsdp()": fsdp(),
    " megatron(tp=2, zero=3) ": megatron(tp=2, zero=3),
    "layout('*.up', weight='R S(0)')": layout("*.up", weight="R S(0)"),
    "tensor_parallel('2d', axes=('a', 'b'))": tensor_parallel("2d", axes=("a", "b")),
    "pipeline('node', microbatches=4)": pipeline("node", microbatches=4),
    "context_parallel('gpu')": context_parallel("gpu"),
    "offload(activations=False)": offload(activations=False),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_the_text_of_a_constraint_gives_the_constraint_of_the_call(text: str) -> None:
    assert parse_constraint(text) == WRITTEN[text]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fsd()", "'fsd' is not a constraint"),
        ("megatron(tq=2)", "'tq'"),
        ("layout(3, weight=2)", "layout: "),
        ("ddp(axes=5)", "ddp: "),
        ("megatron(tp=open('x'))", "is not a constraint"),
        ("__import__('os')", "is not a constraint"),
        ("megatron(**{'tp': 2})", "is not a constraint"),
        ("fsdp(", "is not a constraint"),
        ("", "is not a constraint"),
        ("1 + 1", "is not a constraint"),
        ("fsdp().axes", "is not a constraint"),
    ],
)
def test_text_that_is_not_a_constraint_is_refused_and_not_executed(text: str, said: str) -> None:
    with pytest.raises(ConstraintError, match="what to do") as refused:
        parse_constraint(text)
    assert said in str(refused.value) and text in str(refused.value)


def test_an_error_of_the_constraint_is_raised_unchanged() -> None:
    with pytest.raises(AutoparError, match=r"zero must be .*, got 9"):
        parse_constraint("megatron(zero=9)")
