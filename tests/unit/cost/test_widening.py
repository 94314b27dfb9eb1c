"""What a sum and its wide copy take while it is reduced, of tensors whose layouts are written
out."""

from __future__ import annotations

from autopar.core.collective import Collective
from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import Arc, LayoutGraph
from autopar.core.problem import Op, OpStrategy, Problem, Use, Value, Variant
from autopar.cost.gradient_dtypes import widened_bytes

P, S, R = (Layout.parse(text) for text in ("P", "S(0)", "R"))
NUM_BYTES = 64  # of the sum, in 16 bits


def problem(*reads: Layout, reduced_in: str = "float32") -> tuple[Problem, Value]:
    """An op makes a partial sum, or the whole; another reads it in one of these layouts."""
    layouts, size = (P, S, R), NUM_BYTES * (2 if reduced_in == "float32" else 1)
    kinds = ("reduce_scatter", 0), ("all_reduce", -1)
    reductions = [Collective(kind, 0, dim, -1, "sum", reduced_in, size) for kind, dim in kinds]
    arcs = tuple(Arc(0, i + 1, reduction, 1.0) for i, reduction in enumerate(reductions))
    graph = LayoutGraph(
        layouts,
        (NUM_BYTES, NUM_BYTES // 2, NUM_BYTES),
        arcs,
        {layout: i for i, layout in enumerate(layouts)},
    )
    maker = Op(
        "maker",
        "compute",
        "backward",
        1,
        (0,),
        tuple(OpStrategy(Strategy((), (made,)), 1.0) for made in (P, R)),
    )
    reader = Op(
        "reader",
        "parameter",
        "backward",
        1,
        (),
        tuple(OpStrategy(Strategy((read,), ()), 0.0) for read in reads),
    )
    value = Value("sum", 0, 0, "backward", graph)
    return Problem(
        (maker, reader), (value,), (Variant(0, 1, (Use(1, 0, "backward"),)),), 2**40
    ), value


def test_a_sum_is_there_beside_its_wide_copy_while_it_is_reduced() -> None:
    assert widened_bytes(*problem(S)) == [3 * NUM_BYTES, 0], "what is whole is not reduced"
    assert widened_bytes(*problem(S, R)) == [3 * NUM_BYTES, 0]


def test_a_sum_that_may_be_read_as_it_is_need_not_be_reduced() -> None:
    assert widened_bytes(*problem(S, P)) == [0, 0]


def test_a_sum_that_is_reduced_as_it_is_has_no_copy() -> None:
    assert widened_bytes(*problem(S, reduced_in="bfloat16")) == [0, 0]
