"""The program as arrays: rows, relaxations with known answers, and bounds that hold whatever the
duals are."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

import numpy as np
import pulp
import pytest

from autopar.solve.highs import Engine, proof
from autopar.solve.lp import AT_LEAST, AT_MOST, EQUAL, Model, Rows
from autopar.solve.pulp_models import to_pulp


def model_of(costs: Sequence[float], *rows: tuple[Sequence[float], str, float]) -> Model:
    """Minimise the costs of bits a, b, c ... within rows: values, sense, right side."""
    model = Model()
    bits = [model.add_column(name, integer=True) for name in "abcdef"[: len(costs)]]
    model.minimise((np.arange(len(costs)), np.array(costs)))
    for values, sense, right in rows:
        model.add_row(
            [(bit, value) for bit, value in zip(bits, values, strict=True) if value], sense, right
        )
    return model


def knapsack() -> Model:
    """Minimise −3a − 4b − 5c + d/2 with 2a + 3b + 4c ≤ 5 and d ≥ a, over bits. The best is a, b
    and d: −6.5."""
    return model_of([-3, -4, -5, 0.5], ([2, 3, 4, 0], AT_MOST, 5), ([-1, 0, 0, 1], AT_LEAST, 0))


def best(model: Model) -> float:
    """By trying every choice of bits."""
    engine = Engine(model)
    n, dense = len(engine.cost), np.zeros((len(engine.rows.lower), len(engine.cost)))
    for i, (start, end) in enumerate(itertools.pairwise(engine.rows.starts)):
        dense[i, engine.rows.indices[start:end]] = engine.rows.values[start:end]
    found = float("inf")
    for bits in itertools.product((0.0, 1.0), repeat=n):
        sides = dense @ np.array(bits)
        if (sides >= engine.rows.lower - 1e-9).all() and (sides <= engine.rows.upper + 1e-9).all():
            found = min(found, float(engine.cost @ np.array(bits)))
    return found


def test_rows_are_joined_and_cut_to_some_columns() -> None:
    rows = Rows.of([([0, 2], [1.0, 2.0], 0.0, 3.0), ([1], [5.0], 1.0, 1.0)])
    both = rows.plus(Rows.of([([2, 1], [7.0, 8.0], -1.0, 4.0)]))
    assert both.starts.tolist() == [0, 2, 3, 5]
    assert both.indices.tolist() == [0, 2, 1, 2, 1] and both.values.tolist() == [
        1.0,
        2.0,
        5.0,
        7.0,
        8.0,
    ]
    assert both.lower.tolist() == [0.0, 1.0, -1.0] and both.upper.tolist() == [3.0, 1.0, 4.0]
    some = both.only(np.array([False, True, True]))
    assert some.starts.tolist() == [0, 1, 2, 4]
    assert some.indices.tolist() == [1, 0, 1, 0] and some.values.tolist() == [2.0, 5.0, 7.0, 8.0]


def test_the_engine_reads_the_model_as_it_is() -> None:
    engine = Engine(knapsack())
    by_name = dict(zip(engine.names, engine.cost.tolist(), strict=True))
    assert by_name == {"a": -3.0, "b": -4.0, "c": -5.0, "d": 0.5}
    assert engine.integer.all()
    assert (
        sorted(engine.rows.upper.tolist())[0] == 5.0
        and sorted(engine.rows.lower.tolist())[-1] == 0.0
    )


@pytest.mark.parametrize("interior", [False, True])
def test_a_relaxation_bounds_the_program_and_its_reduced_costs_bound_what_a_column_costs(
    interior: bool,
) -> None:
    model = knapsack()
    engine = Engine(model)
    relaxation = engine.relax(interior=interior)
    assert relaxation is not None and relaxation.exact is not interior
    assert best(model) == -6.5
    assert -7.5 <= relaxation.bound <= -6.5 + 1e-6
    for name in "abcd":
        with_it = knapsack()
        with_it.add_row([(c, 1.0) for c in with_it.columns if c.name == name], EQUAL, 1.0)
        assert (
            relaxation.bound + max(0.0, relaxation.reduced[engine.column[name]])
            <= best(with_it) + 1e-6
        )


def test_whatever_the_duals_are_the_bound_holds() -> None:
    rng = random.Random(0)
    for _ in range(50):
        costs, most, least = ([rng.uniform(-2, 2) for _ in range(6)] for _ in range(3))
        model = model_of(
            costs, (most, AT_MOST, 1), (least, AT_LEAST, -1), ([1, 1, 0, 0, 0, 0], EQUAL, 1)
        )
        engine, optimum = Engine(model), best(model)
        if optimum == float("inf"):
            continue
        for _ in range(5):
            duals = np.array([rng.uniform(-3, 3) for _ in engine.rows.lower])
            assert proof(engine.cost, engine.rows, duals)[0] <= optimum + 1e-9


def test_a_restricted_program_uses_its_columns_alone_and_honours_further_rows() -> None:
    engine = Engine(knapsack())
    nothing = Rows.of([])
    every = np.ones(4, bool)
    found = engine.solve_restricted(every, nothing, gap=0.0, target=-np.inf, max_nodes=100)
    assert found.values is not None
    assert dict(zip(engine.names, found.values.round().tolist(), strict=True)) == {
        "a": 1.0,
        "b": 1.0,
        "c": 0.0,
        "d": 1.0,
    }
    assert found.bound == pytest.approx(-6.5)
    without_b = every.copy()
    without_b[engine.column["b"]] = False
    found = engine.solve_restricted(
        without_b, nothing, gap=0.0, target=-np.inf, max_nodes=100, quick=True
    )
    assert found.values is not None and found.values @ engine.cost == pytest.approx(-5.0)  # c alone
    at_most_one = Rows.of([([engine.column[n] for n in "abc"], [1.0] * 3, -np.inf, 1.0)])
    found = engine.solve_restricted(every, at_most_one, gap=0.0, target=-np.inf, max_nodes=100)
    assert found.values is not None and found.values @ engine.cost == pytest.approx(-5.0)


@pytest.mark.parametrize("interior", [False, True])
def test_a_program_that_nothing_solves_says_so(interior: bool) -> None:
    engine = Engine(knapsack())
    impossible = Rows.of([([engine.column[n] for n in "abc"], [1.0] * 3, 4.0, np.inf)])
    assert engine.relax(impossible, interior=interior) is None
    found = engine.solve_restricted(
        np.ones(4, bool), impossible, gap=0.0, target=-np.inf, max_nodes=100
    )
    assert found.values is None and found.bound == np.inf


def market_split(num_rows: int) -> Model:
    """Σ a·x = ⌊Σa/2⌋ in every row, of 10·(rows − 1) bits: branching sees nearly all of their
    values (Cornuéjols and Dawande, 1998)."""
    rng, num_bits, model = random.Random(7), 10 * (num_rows - 1), Model()
    bits = [model.add_column(f"x{i:02}", integer=True) for i in range(num_bits)]
    for _ in range(num_rows):
        line = [float(rng.randrange(1, 100)) for _ in bits]
        model.add_row(list(zip(bits, line, strict=True)), EQUAL, float(int(sum(line)) // 2))
    return model


def test_a_run_that_its_limit_ends_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(market_split(6), 0.5)
    every, nothing = np.ones(len(engine.names), bool), Rows.of([])
    for _ in range(2):
        engine.solve_restricted(every, nothing, gap=0.0, target=-np.inf, max_nodes=10**9)
    assert engine.limit.timed_out and [
        r.getMessage() for r in caplog.records if r.name == "autopar"
    ] == ["the time limit ended a search: the next run may return a different plan"]


def test_without_a_limit_only_work_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() * 1e6)
    engine = Engine(knapsack())
    found = engine.solve_restricted(
        np.ones(4, bool), Rows.of([]), gap=0.0, target=-np.inf, max_nodes=100
    )
    assert found.bound == pytest.approx(-6.5) and not engine.limit.timed_out


def test_cbc_gets_the_same_program_as_highs() -> None:
    rng = random.Random(1)
    for _ in range(8):
        costs, most, least = ([rng.uniform(-2, 2) for _ in range(6)] for _ in range(3))
        model = model_of(
            costs, (most, AT_MOST, 1), (least, AT_LEAST, -1), ([1, 1, 0, 0, 0, 0], EQUAL, 1)
        )
        same = to_pulp(model)
        with pytest.warns(DeprecationWarning):
            same.solve(pulp.PULP_CBC_CMD(msg=False))
        assert same.sol_status == (
            pulp.LpSolutionOptimal if np.isfinite(best(model)) else pulp.LpSolutionInfeasible
        )
        if np.isfinite(best(model)):
            assert pulp.value(same.objective) == pytest.approx(best(model))


def test_costs_are_by_column_whatever_its_name() -> None:
    model = Model()
    last, first = model.add_column("z"), model.add_column("a", integer=True)
    model.minimise((np.array([last.number, first.number]), np.array([3.0, 4.0])))
    model.costs[model.add_column("m").number] = 5.0
    engine = Engine(model)
    assert (
        engine.names == ["a", "m", "z"]
        and engine.cost.tolist() == [4.0, 5.0, 3.0]
        and engine.integer.tolist() == [True, False, False]
    )
    assert engine.costs((np.array([first.number]), np.array([7.0]))).tolist() == [7.0, 0.0, 0.0]
