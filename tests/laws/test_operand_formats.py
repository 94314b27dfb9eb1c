"""What an op of a program computes does not depend on how its operands lie in memory.

Layouts, collectives and views change strides between the capture and the program, and copies that were nothing at the
capture are not in the graph. So no kernel may assume a format of its operands, unless it refuses others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from formats import OPERANDS, RELAID
from further_cases import FURTHER_CASES
from rule_cases import CASES as COMMON_CASES
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from autopar.ops.formats import ANY_FORMAT
from autopar.rules.call import op_name

aten = torch.ops.aten
CASES = {**COMMON_CASES, **FURTHER_CASES}
SIZES = SimpleNamespace(a=2, b=3, c=4, d=5, before=[2, 6], after=[3, 4])
NOT_INITIALISED = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
REFUSING = (  # other formats than theirs, which the program's view of a copy then has
    aten.view.default, aten._unsafe_view.default, aten.view_as_complex.default, aten.as_strided.default,
)  # fmt: skip


def relaid(x: Any, chosen: bool, name: str) -> Any:
    """An argument with the same values; a tensor that is chosen in the format."""
    return OPERANDS[name](x) if chosen and isinstance(x, Tensor) else x


def results(target: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> list[Tensor]:
    args, kwargs = tree_unflatten(list(leaves), spec)
    torch.manual_seed(0)
    return [x for x in tree_leaves(target(*args, **kwargs)) if isinstance(x, Tensor)]


def depends_on(target: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[str]:
    """The operands and formats in which a call gives other results, each in words."""
    leaves, spec = tree_flatten((args, kwargs))
    due = results(target, leaves, spec)
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for name in RELAID:
        for places in (*((place,) for place in tensors), tuple(tensors)):
            laid = [relaid(x, place in places, name) for place, x in enumerate(leaves)]
            made = results(target, laid, spec)
            if not all(torch.allclose(a, b, equal_nan=True) for a, b in zip(made, due, strict=True)):
                yield f"operands {[tensors.index(place) for place in places]} {name}"


def listed() -> Iterator[Any]:
    for target, cases in CASES.items():
        if cases and target not in (operator.getitem, *NOT_INITIALISED, *REFUSING):
            for case in cases if isinstance(cases, list) else [cases]:
                yield pytest.param(target, case, id=op_name(target))


@pytest.mark.parametrize(("target", "case"), list(listed()))
def test_an_op_of_a_program_computes_the_same_of_operands_in_any_format(target: Any, case: Any) -> None:
    torch.manual_seed(0)
    args, kwargs = case(SIZES)
    assert list(depends_on(ANY_FORMAT.get(target, target), args, kwargs)) == []
