"""Prices of given choices, worked out by hand on a problem of three ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.core.collective import Collective
from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import LayoutGraph, layout_graph
from autopar.core.problem import MemoryPoint, Op, OpStrategy, Problem, Use, Value, Variant
from autopar.errors import LayoutError
from autopar.solve import evaluate, fits, variant_load
from autopar.solve.memory_rows import GRADIENT_ROW, KEPT_ROW, budget_rows

R, S0, S1 = map(Layout.parse, ("R", "S(0)", "S(1)"))
PRICES = {"all_gather": 1.0, "all_to_all": 0.5, "slice": 0.25}
FULL, HALF = 64, 32  # bytes of a 4 × 4 tensor in fp32, whole and split in two


def price(c: Collective) -> float:
    return PRICES[c.kind]


def graph(made: list[Layout], wanted: list[Layout]) -> LayoutGraph:
    return layout_graph((4, 4), torch.float32, (2,), made, wanted, price)


def problem() -> Problem:
    """A parameter w read by two instances of a (forward), whose result b (backward) reads with
    w, making w's gradient."""
    w = Op(
        "w",
        "parameter",
        "forward",
        2,
        (0,),
        (
            OpStrategy(Strategy((R,), (R,)), 0.1, 3 * FULL, FULL),
            OpStrategy(Strategy((S0,), (S0,)), 0.01, 3 * HALF, HALF),
        ),
    )
    a = Op(
        "a",
        "compute",
        "forward",
        2,
        (1,),
        (
            OpStrategy(Strategy((R,), (S0,)), 2.0),
            OpStrategy(Strategy((S0,), (R,)), 3.0),
        ),
        True,
    )
    b = Op(
        "b",
        "compute",
        "backward",
        2,
        (2,),
        (OpStrategy(Strategy((S1, R), (R,)), 5.0), OpStrategy(Strategy((S0, R), (S0,)), 7.0)),
    )
    values = (
        Value("w", 0, 0, "forward", graph([R, S0], [R, S0]), True),
        Value("a", 1, 0, "forward", graph([S0, R], [S0, S1]), False),
        Value("b", 2, 0, "backward", graph([R, S0], [R, S0]), False),
    )
    variants = (
        Variant(0, 2, (Use(1, 0, "forward"), Use(2, 1, "backward"))),
        Variant(1, 2, (Use(2, 0, "backward"),)),
        Variant(2, 2, (Use(0, 0, "backward"),)),
    )
    return Problem((w, a, b), values, variants, 10**6)


def layouts(p: Problem, v: int, nodes: tuple[int, ...]) -> list[str]:
    return [str(p.values[p.variants[v].value].graph.layouts[n]) for n in nodes]


def test_whole_weights_move_nothing_and_cost_their_bytes() -> None:
    p = problem()
    e = evaluate(p, (0, 0, 1))
    # w rests whole; a reads it whole and makes rows; b reads the rows; the gradient, in rows, is
    # gathered
    assert e.compute_s == pytest.approx(2 * (0.1 + 2.0 + 7.0))
    assert e.communication_s == pytest.approx(2 * PRICES["all_gather"])
    assert (e.static_bytes, e.gradient_bytes) == (2 * 3 * FULL, 2 * FULL)
    assert e.kept_bytes == 2 * HALF and layouts(p, 1, e.kept[1]) == ["S(0)"]
    assert e.objective_s == e.compute_s + e.communication_s
    assert layouts(p, 0, e.kept[0]) == ["R"], "what rests anyhow is kept for nothing"


def test_a_sharded_weight_is_gathered_and_the_copy_is_kept_or_gathered_again() -> None:
    p = problem()
    kept = evaluate(p, (1, 0, 1))
    assert kept.communication_s == pytest.approx(
        2 * PRICES["all_gather"]
    )  # forward; the gradient stays in rows
    assert kept.kept_bytes == 2 * (FULL + HALF), "the gathered copy, and what a made"
    again = evaluate(p, (1, 0, 1), kept={1: tuple(range(4))})
    assert again.communication_s == pytest.approx(4 * PRICES["all_gather"])
    assert again.kept_bytes == 2 * HALF
    assert [a.collective.kind for a in again.backward[0].arcs] == ["all_gather"]


def test_what_is_neither_kept_nor_made_again_cannot_be_read() -> None:
    p = problem()
    with pytest.raises(LayoutError, match="no version is at hand"):
        evaluate(p, (0, 0, 1), kept={1: ()})


def test_a_recomputed_op_costs_its_time_again_and_its_result_need_not_be_kept() -> None:
    p = problem()
    kept, again = evaluate(p, (0, 0, 1)), evaluate(p, (0, 0, 1), {1: 0}, {0: (), 1: ()})
    assert again.compute_s - kept.compute_s == pytest.approx(2 * 2.0)
    assert again.kept_bytes == 0
    other = evaluate(p, (0, 0, 1), {1: 1}, {0: (), 1: ()})
    # with its other strategy it reads rows of w, which are cut, and makes a whole result, whose
    # rows are cut
    assert other.compute_s - kept.compute_s == pytest.approx(2 * 3.0)
    assert other.communication_s - kept.communication_s == pytest.approx(2 * 2 * PRICES["slice"])


def test_of_several_versions_the_one_that_is_nearest_to_what_backward_reads_is_kept() -> None:
    p = problem()
    e = evaluate(p, (0, 1, 0))  # a makes its result whole, b wants columns: a cut in backward
    assert layouts(p, 1, e.kept[1]) == ["R"]
    assert [a.collective.kind for a in e.backward[1].arcs] == ["slice"]
    assert e.backward[1].time_s == PRICES["slice"] and layouts(
        p, 1, e.backward[1].read_layouts
    ) == ["S(1)"]


def test_the_time_of_one_variant_is_its_share_of_the_communication() -> None:
    p = problem()
    for strategies in ((0, 0, 1), (1, 0, 1), (1, 1, 0)):
        loads = [variant_load(p, v, strategies, {}) for v in range(len(p.variants))]
        assert sum(load.serial_s for load in loads if load) == pytest.approx(
            evaluate(p, strategies).communication_s
        )
    lonely = replace(
        p, values=(*p.values[:2], replace(p.values[2], graph=replace(p.values[2].graph, arcs=())))
    )
    assert variant_load(lonely, 2, (0, 0, 1), {}) is None


def test_the_budget_rows_are_what_rests_when_backward_begins_when_it_ends_and_at_each_moment() -> (
    None
):
    moment = MemoryPoint("b", ((1, 1),), ((2, (10, 20)), (0, (1, 2))), 5)
    p = replace(problem(), moments=(moment,))
    rows = budget_rows(p)
    assert [row.name for row in rows] == [KEPT_ROW, GRADIENT_ROW, "b"]
    e = evaluate(p, (1, 0, 1))
    static = 2 * 3 * HALF
    assert e.resting_bytes == (
        static + 2 * (FULL + HALF),
        static + 2 * HALF,
        static + HALF + 20 + 2 + 5,
    )
    assert fits(replace(p, budget_bytes=max(e.resting_bytes)), e)
    assert not fits(replace(p, budget_bytes=max(e.resting_bytes) - 1), e)
