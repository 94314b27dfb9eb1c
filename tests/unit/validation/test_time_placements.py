"""What an op makes of tensors on the axis in time: what must be known of sums, averages, constants
and products of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.rules import Call, call_of
from autopar.validation.microbatch_graphs import placements_in_time
from autopar.validation.time_trials import TERM, WHOLE, TimePlacement, split_dim

ROWS, COLUMNS = 12, 5
SPLIT, ACROSS = TimePlacement("split", 0), TimePlacement("split", 1)
AVERAGE, TENTH = TimePlacement("term", power=1), TimePlacement("whole", power=-1)
ZERO = TimePlacement("zero")
aten = torch.ops.aten


def make_call(function: Callable[..., Tensor], operands: Sequence[Tensor]) -> Call:
    graph = make_fx(function, tracing_mode="fake")(*operands).graph
    (node,) = [n for n in graph.nodes if n.op == "call_function"]
    return call_of(node)


def place(
    functions: Callable[..., Tensor] | tuple[Callable[..., Tensor], Callable[..., Tensor]],
    operands: Sequence[tuple[Tensor, TimePlacement]],
    num: int,
) -> TimePlacement:
    """The placement of the result; with two functions the second is what a microbatch calls."""
    whole, part = functions if isinstance(functions, tuple) else (functions, functions)
    parts = [x.chunk(num, p.dim)[0] if p.dim >= 0 else x for x, p in operands]
    calls = make_call(whole, [x for x, _ in operands]), make_call(part, parts)
    (found,) = placements_in_time(*calls, [p for _, p in operands], num)
    return found


def table(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(ROWS, COLUMNS, dtype=torch.float64).to(dtype)


def number() -> Tensor:
    return torch.tensor(3.0, dtype=torch.float64)


KNOWN = {
    "a sum over samples is a term": (aten.sum.default, [(table(), SPLIT)], TERM),
    "a sum within samples is split": (
        lambda x: aten.sum.dim_IntList(x, [1]),
        [(table(), SPLIT)],
        SPLIT,
    ),
    "a mean over samples is a term of as many times": (
        aten.mean.default,
        [(table(), SPLIT)],
        AVERAGE,
    ),
    "a sum of what is whole is whole": (aten.sum.default, [(table(), WHOLE)], WHOLE),
    "a term by what is whole": (aten.div.Tensor, [(number(), TERM), (number(), WHOLE)], TERM),
    "an average by what is whole": (
        aten.div.Tensor,
        [(number(), AVERAGE), (number(), WHOLE)],
        AVERAGE,
    ),
    "powers add up in products": (
        aten.mul.Tensor,
        [(number(), AVERAGE), (number(), TENTH)],
        TERM,
    ),
    "a whole over many is a term": (
        aten.add.Tensor,
        [(number(), TERM), (number(), TENTH)],
        TERM,
    ),
    "zeros are any part of zeros": (
        aten.add.Tensor,
        [(number(), TERM), (torch.zeros((), dtype=torch.float64), ZERO)],
        TERM,
    ),
    "weights of samples": (aten.mul.Tensor, [(table(), SPLIT), (table(), SPLIT)], SPLIT),
    "transposed": (aten.t.default, [(table(), SPLIT)], ACROSS),
    "a gradient of weights": (aten.mm.default, [(table().t(), ACROSS), (table(), SPLIT)], TERM),
    "entropies of samples": (
        aten.binary_cross_entropy.default,
        [(table(), SPLIT), (table(), SPLIT)],
        AVERAGE,
    ),
    "expanded to all samples": (
        (
            lambda x: aten.expand.default(x, [ROWS, COLUMNS]),
            lambda x: aten.expand.default(x, [ROWS // 3, COLUMNS]),
        ),
        [(table()[:1], WHOLE)],
        SPLIT,
    ),
    "divided by the number of samples": (
        (lambda x: aten.div.Scalar(x, ROWS), lambda x: aten.div.Scalar(x, ROWS // 3)),
        [(number(), WHOLE)],
        TimePlacement("whole", power=1),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_follows_from_placements(name: str) -> None:
    functions, operands, due = KNOWN[name]
    assert place(functions, operands, 3) == due


WRONG = {
    "a term by a term": (aten.div.Tensor, [(number(), TERM), (number(), TERM)]),
    "a square of a term": (aten.mul.Tensor, [(number(), TERM), (number(), TERM)]),
    "a term and an average": (aten.add.Tensor, [(number(), TERM), (number(), AVERAGE)]),
    "a term and what is whole": (aten.add.Tensor, [(number(), TERM), (number(), WHOLE)]),
    "a bend of a term": (aten.relu.default, [(number(), TERM)]),
    "probabilities among samples": (
        lambda x: aten._softmax.default(x, 0, False),
        [(table(), SPLIT)],
    ),
    "the greatest of all samples": (aten.amax.default, [(table(), SPLIT)]),
    "sums up to each sample": (lambda x: aten.cumsum.default(x, 0), [(table(), SPLIT)]),
    "samples against what is whole": (aten.mm.default, [(table(), TERM), (table().t(), TERM)]),
    "turned round": (lambda x: aten.flip.default(x, [0]), [(table(), SPLIT)]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_follow_is_wrong_or_unknown(name: str) -> None:
    assert not place(*WRONG[name], 3).is_known


@pytest.mark.parametrize("num", [2, 3, 4, 6])
def test_a_condition_of_one_value_is_tried_both_ways(num: int) -> None:
    operands = [(torch.tensor(True), WHOLE), (number(), TERM), (number() * 0, ZERO)]
    assert place(aten.where.self, operands, num) == TERM
    operands = [(torch.tensor(True), WHOLE), (number(), TERM), (number(), WHOLE)]
    assert not place(aten.where.self, operands, num).is_known


def test_a_microbatch_that_calls_otherwise_is_wrong() -> None:
    sums = lambda x: aten.sum.dim_IntList(x, [0]), lambda x: aten.sum.dim_IntList(x, [1])
    assert not place(sums, [(torch.rand(12, 4), SPLIT)], 3).is_known


@pytest.mark.parametrize(
    ("whole", "part", "dim"),
    [
        ((6, 4), (2, 4), 0),
        ((4, 6), (4, 2), 1),
        ((6, 4), (6, 4), -1),
        ((6, 6), (2, 2), -1),
        ((6,), (4,), -1),
    ],
)
def test_one_dim_is_shorter(whole: tuple[int, ...], part: tuple[int, ...], dim: int) -> None:
    assert split_dim(whole, part, 3) == dim
