"""The certified bound compared with brute force and with the relaxation, on generated small
problems."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from autopar.certificate.bound import MemoryRow, Prices, Versions, lower_bound
from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import layout_graph
from autopar.core.problem import Op, OpStrategy, Problem, Use, Value, Variant
from autopar.core.solution import Multipliers
from autopar.solve import evaluate, solve
from autopar.solve.branch_and_cut import BranchAndCut, SearchRequest
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.highs import Engine, Live, Point
from autopar.solve.lazy_rows import budget_matrix
from autopar.solve.lp import Rows
from autopar.solve.memory_rows import KEPT_ROW, BudgetRow, budget_rows
from autopar.solve.multipliers import multipliers, tighter
from tests.laws.test_solver_oracles import AMPLE, LINE, SHAPE, SQUARE, Case, X, front, problem

CASES = (
    Case(0, LINE, True),
    Case(1, LINE),
    Case(0, SQUARE),
    Case(0, LINE, True, hosts=1.0),
    Case(1, LINE, True, unasked=True),
)
BESIDE = (
    Case(1, LINE, True, 0.4),
    Case(0, LINE, slowdown=0.4),
    Case(2, LINE, slowdown=0.0),
    Case(1, LINE, True, 0.4, hosts=1.0),
)


def row(row: BudgetRow, worth_s: float) -> MemoryRow:
    return MemoryRow(dict(row.kept), dict(row.live), worth_s)


def proven(p: Problem, multipliers: Multipliers) -> float:
    prices: dict[tuple[int, int, bool], dict[int, float]] = {}
    for (v, late, use, layout), value in multipliers.potentials_s.items():
        prices.setdefault((v, use, bool(late)), {})[layout] = value
    named = {r.name: r for r in budget_rows(p)}
    rows = [row(named[name], worth) for name, worth in multipliers.memory_s.items()]
    return lower_bound(p, prices, rows, multipliers.balance, versions_of(p, multipliers))


def versions_of(
    p: Problem, multipliers: Multipliers, rng: random.Random | None = None, size: float = 0.0
) -> dict[int, Versions]:
    """Return the multipliers of versions, each changed by about `size`."""

    def changed(kind: Mapping[tuple[int, int], float], v: int) -> dict[int, float]:
        layouts = range(len(p.values[p.variants[v].value].graph.layouts))
        noise = {
            i: size * rng.gauss(0.0, 1.0) if rng and rng.random() < 0.5 else 0.0 for i in layouts
        }
        return {i: kind.get((v, i), 0.0) + noise[i] for i in layouts}

    kinds = multipliers.versions_s, multipliers.copies_s, multipliers.once_s
    return {v: Versions(*(changed(kind, v) for kind in kinds)) for v in range(len(p.variants))}


@cache
def relaxed(case: Case, budget: int) -> Multipliers:
    found = (
        solve(case.problem(budget), gap=0.5).multipliers
        or solve(replace(case.problem(budget), moments=()), gap=0.5).multipliers
    )
    assert found is not None
    return found


def changed(
    p: Problem, known: Multipliers, rng: random.Random, size: float, share: float, shift: float
) -> Prices:
    """Return the potentials with a share of them, or only one, changed by about `size`, and with
    all potentials of some readers shifted by up to `shift`."""
    prices = {}
    for v, x in enumerate(p.variants):
        num = len(p.values[x.value].graph.layouts)
        for use, late in itertools.product(range(len(x.uses)), (0, 1)):
            by = shift * rng.random() * (rng.random() < 0.3)
            noise = [by + size * rng.gauss(0.2, 1.0) * (rng.random() < share) for _ in range(num)]
            prices[v, use, bool(late)] = {
                i: noise[i] + known.potentials_s.get((v, late, use, i), 0.0) for i in range(num)
            }
    if not share:
        where = rng.choice([*prices])
        prices[where][rng.choice([*prices[where]])] += size
    return prices


SIZES = {
    "size": st.sampled_from((0.0, 0.02, 0.3, 3.0)),
    "share": st.sampled_from((0.0, 0.1, 1.0)),
    "shift": st.sampled_from((0.0, 0.3, 3.0)),
}


@pytest.mark.slow
@examples(100)
@given(case=st.sampled_from(CASES), number=st.integers(0, 100), seed=st.integers(0, 2**32), **SIZES)
def test_no_plan_is_below_the_bound_for_any_multipliers(
    case: Case, number: int, seed: int, size: float, share: float, shift: float
) -> None:
    """The multipliers are those of the relaxation, at which the bound is near the optimum, with
    small or large changes."""
    points = [*front(case), (AMPLE, front(case)[-1][1])]
    budget, best = points[number % len(points)]
    p, rng, known = case.problem(budget), random.Random(seed), relaxed(case, budget)
    rows = [
        row(r, known.memory_s.get(r.name, 0.0) + size * rng.gauss(0.0, 1.0)) for r in budget_rows(p)
    ]
    versions = versions_of(p, known, rng, size)
    assert lower_bound(
        p, changed(p, known, rng, size, share, shift), rows, versions=versions
    ) <= best * (1 + 1e-9)


def test_operands_that_recompute_does_not_read_have_no_multiplier_there() -> None:
    case = Case(1, LINE, True, unasked=True)
    budget = front(case)[0][0]
    known = relaxed(case, budget)
    prices = changed(case.problem(), known, random.Random(0), 0.0, 0.0, 0.0)
    rows = [row(r, known.memory_s.get(r.name, 0.0)) for r in budget_rows(case.problem(budget))]
    for unasked in (False, True):
        p = replace(case, unasked=unasked).problem(budget)
        bounds = {
            lower_bound(p, {**prices, (X, 0, True): {layout: worth}}, rows)
            for layout in range(3)
            for worth in (0.0, 1.0)
        }
        assert (len(bounds) == 1) == unasked


SHARES = st.sampled_from(((1.0, 1.0), (0.5, 0.0), (0.2, 0.9)))


@pytest.mark.slow
@examples(60)
@given(
    case=st.sampled_from(BESIDE),
    number=st.integers(0, 100),
    seed=st.integers(0, 2**32),
    balance=SHARES,
    **SIZES,
)
def test_no_plan_is_below_the_bound_for_any_balance(
    case: Case,
    number: int,
    seed: int,
    balance: tuple[float, float],
    size: float,
    share: float,
    shift: float,
) -> None:
    """The bound is compared with brute force, which has its own formula of the step, at the
    multipliers of the relaxation for that balance."""
    points = [*front(case), (AMPLE, front(case)[-1][1])]
    budget, best = points[number % len(points)]
    p, rng, known = case.problem(budget), random.Random(seed), at_balance(case, budget, balance)
    rows = [
        row(r, known.memory_s.get(r.name, 0.0) + size * rng.gauss(0.0, 1.0)) for r in budget_rows(p)
    ]
    versions = versions_of(p, known, rng, size)
    assert lower_bound(
        p, changed(p, known, rng, size, share, shift), rows, balance, versions
    ) <= best * (1 + 1e-9)
    if not p.moments:
        assert known.bound_s <= proven(p, known) * (1 + 1e-12) <= best * (1 + 2e-9)


@cache
def at_balance(case: Case, budget: int, balance: tuple[float, float]) -> Multipliers:
    """Return the multipliers of the relaxation with rows (9) at the prices of a balance."""
    program, engine, point = at_prices(replace(case.problem(budget), moments=()), balance)
    return multipliers(program, engine, balance, point.duals, Rows.of([]), {})


def at_prices(p: Problem, balance: tuple[float, float]) -> tuple[Formulation, Engine, Point]:
    program = Formulation(p)
    engine = Engine(program.model)
    live = Live(engine, tighter(program, engine))
    live.reprice(engine.costs(program.costs(balance)))
    point = live.solve(np.zeros(len(engine.names)), np.ones(len(engine.names)))
    assert point is not None
    return program, engine, point


@pytest.mark.parametrize("balance", [(1.0, 1.0), (0.5, 0.0), (0.3, 0.8)])
def test_at_every_balance_the_multipliers_prove_the_relaxation(
    balance: tuple[float, float],
) -> None:
    for case in BESIDE:
        p = replace(case.problem(), moments=())
        assert proven(p, at_balance(case, AMPLE, balance)) == pytest.approx(
            at_prices(p, balance)[2].bound / SCALE, rel=1e-3
        )


@pytest.mark.slow
def test_of_two_vertices_the_one_with_the_higher_bound_is_kept() -> None:
    later, kinds = [], [0, 0]
    budgets = [(case, front(case)[0][0]) for case in (*BESIDE, *CASES)]
    for case, budget in (
        *budgets,
        (Case(1, LINE, True, 0.0), 168),
        (Case(0, SQUARE, True, 0.4), 80),
    ):
        looked = BranchAndCut(
            SearchRequest(replace(case.problem(budget), moments=()), 0.0, 200, 60.0)
        )
        looked.run()
        found = looked.proven.multipliers()
        assert found is not None and looked.proven.vertex is not None
        first = multipliers(
            looked.extra.program, looked.engine, (1.0, 1.0), looked.proven.vertex, Rows.of([]), {}
        )
        assert found.bound_s >= first.bound_s
        assert found.bound_s == pytest.approx(looked.proven.relaxed.bound / SCALE, rel=1e-3)
        assert proven(looked.request.problem, found) >= found.bound_s * (1 - 1e-12)
        later.append(found.bound_s > first.bound_s)
        kinds = [
            num + len(kind)
            for num, kind in zip(kinds, (found.versions_s, found.once_s), strict=True)
        ]
    assert any(later) and all(kinds), "rows (9) prove something, and that a version is kept once"


def test_a_balance_outside_its_range_gives_no_bound() -> None:
    with pytest.raises(AssertionError, match="prove nothing"):
        lower_bound(BESIDE[0].problem(), {}, [], (1.0, 1.1))


@examples(150)
@given(seed=st.integers(0, 2**16), **SIZES)
def test_without_a_gap_no_multipliers_prove_more_than_the_optimum(
    seed: int, size: float, share: float, shift: float
) -> None:
    """The relaxation has no gap in these problems, so that any term missing in the bound is
    detected. Recomputation may be cheap."""
    rng, whole = random.Random(seed), problem(seed, rng_mesh(seed))
    cheap = rng.choice((0.02, 1.0))
    ops = tuple(
        replace(
            op,
            strategies=tuple(
                replace(s, time_s=s.time_s * cheap) for s in rng.sample(op.strategies, 1 + (i == 2))
            ),
        )
        for i, op in enumerate(whole.ops)
    )
    alone = replace(whole, ops=ops)
    found = solve(alone, gap=0.0)
    assert found.multipliers is not None
    for _ in range(10):
        prices, versions = (
            changed(alone, found.multipliers, rng, size, share, shift),
            versions_of(alone, found.multipliers, rng, size),
        )
        assert lower_bound(alone, prices, [], versions=versions) <= found.objective_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(24))
def test_the_value_of_kept_versions_in_backward_is_paid_for_in_forward(seed: int) -> None:
    """The multipliers prove the full cost of the best plan. Then some layouts of a tensor become
    more valuable to a reader in backward, which is paid for by κ, μ, ν or ω. No multipliers prove
    more than the optimum."""
    rng, whole = random.Random(seed), problem(seed, rng_mesh(seed))
    few = (rng.sample(op.strategies, 1 if op.kind == "compute" else 2) for op in whole.ops)
    alone = replace(
        whole,
        ops=tuple(
            replace(op, strategies=tuple(some)) for op, some in zip(whole.ops, few, strict=True)
        ),
        moments=(),
    )
    looked = BranchAndCut(SearchRequest(alone, 0.0, 200, 60.0))
    best = looked.run()
    assert best is not None and looked.proven.vertex is not None
    plain = multipliers(
        looked.extra.program, looked.engine, (1.0, 1.0), looked.proven.vertex, Rows.of([]), {}
    )
    program, engine, point = at_prices(alone, (1.0, 1.0))
    for known in (plain, multipliers(program, engine, (1.0, 1.0), point.duals, Rows.of([]), {})):
        prices, versions = changed(alone, known, rng, 0.0, 1.0, 0.0), versions_of(alone, known)
        late = [
            where
            for where in prices
            if where[2] and alone.values[alone.variants[where[0]].value].phase == "forward"
        ]
        for _ in range(150):
            where, by = rng.choice(late), rng.choice((0.05, 0.2, 0.8))
            raised = [layout for layout in prices[where] if rng.random() < 0.5]
            paid = {
                name: dict(getattr(versions[where[0]], name))
                for name in ("made_s", "read_s", "once_s")
            }
            for layout, name in itertools.product(
                raised,
                rng.choice((["made_s"], ["read_s"], ["once_s"], [], ["made_s", "read_s"])),
            ):
                paid[name][layout] += by
            worths = {
                layout: worth + by * (layout in raised) for layout, worth in prices[where].items()
            }
            proven = lower_bound(
                alone,
                {**prices, where: worths},
                [],
                versions={**versions, where[0]: Versions(**paid)},
            )
            assert proven <= best.objective_s * (1 + 1e-9)


def rng_mesh(seed: int) -> tuple[int, ...]:
    return LINE if seed % 2 else SQUARE


def by_hand(num_readers: int = 1) -> Problem:
    """Return a problem: w is stored in halves; a reads it in full and makes y in halves; b
    (forward) reads y in full; c (backward) reads y and w in full. There may be more copies of b,
    which read y in halves. Then w may also be stored in full, for three seconds."""
    whole, half = Layout.parse("R"), Layout.parse("S(0)")
    graph = layout_graph(
        SHAPE,
        torch.float32,
        LINE,
        [half],
        [whole],
        lambda c: 1.0 if c.kind == "all_gather" else 0.25,
    )
    ops = (
        Op("w", "parameter", "forward", 1, (0,), (OpStrategy(Strategy((), (half,)), 0.0, 32),)),
        Op("a", "compute", "forward", 1, (1,), (OpStrategy(Strategy((whole,), (half,)), 1.0),)),
        Op("b", "compute", "forward", 1, (), (OpStrategy(Strategy((whole,), ()), 1.0),)),
        Op("c", "compute", "backward", 1, (), (OpStrategy(Strategy((whole, whole), ()), 1.0),)),
    )
    further = tuple(
        replace(ops[2], key=f"b{i}", strategies=(OpStrategy(Strategy((half,), ()), 1.0),))
        for i in range(1, num_readers)
    )
    if further:
        ops = (
            replace(
                ops[0], strategies=(*ops[0].strategies, OpStrategy(Strategy((), (whole,)), 3.0, 64))
            ),
            *ops[1:],
        )
    values = (Value("w", 0, 0, "forward", graph, True), Value("y", 1, 0, "forward", graph))
    readers = (Use(2, 0, "forward"), *(Use(4 + i, 0, "forward") for i in range(len(further))))
    uses = ((Use(1, 0, "forward"), Use(3, 0, "backward")), (*readers, Use(3, 1, "backward")))
    return Problem(
        (*ops, *further), values, (Variant(0, 1, uses[0]), Variant(1, 1, uses[1])), AMPLE
    )


@pytest.mark.parametrize(
    ("budget", "best"), [(AMPLE, 5.0), (32 + 128, 5.0), (32 + 64, 6.0), (32 + 32, 7.0)]
)
def test_in_a_handwritten_problem_the_best_multipliers_prove_exactly_the_optimum(
    budget: int, best: float
) -> None:
    """The optimum has three ops of one second, two gathers in forward, and one in backward for each
    tensor that is not kept in full."""
    p = replace(by_hand(), budget_bytes=budget)
    half, whole = 0, 1
    readers = [(v, use, late) for v in (0, 1) for use, late in ((0, False), (1, True))]
    proven = []
    for worths in itertools.product((0.0, 1.0, 2.0), (0.0, 1.0), repeat=len(readers)):
        pairs = zip(worths[::2], worths[1::2], strict=True)
        prices = {where: {whole: w, half: h} for where, (w, h) in zip(readers, pairs, strict=True)}
        proven += [
            lower_bound(p, prices, [MemoryRow({0: 1, 1: 1}, {}, price)])
            for price in (0.0, budget / 32, budget / 64)
        ]
    assert max(proven) <= best + 1e-9
    assert max(proven) == pytest.approx(best), "and the relaxation has no gap"


@pytest.mark.parametrize("num_readers", [1, 2, 3])
def test_in_a_handwritten_problem_no_value_of_versions_proves_more_than_the_optimum(
    num_readers: int,
) -> None:
    """The problem is the one above, with one second for each b and two gathers."""
    p, rng, best = by_hand(num_readers), random.Random(0), 4.0 + num_readers
    readers = [(v, use, False) for v in (0, 1) for use in range(num_readers if v else 1)] + [
        (0, 1, True),
        (1, num_readers, True),
    ]
    proven = []
    for _ in range(3000):
        prices = {
            where: {0: rng.choice((0.0, 1.0)), 1: rng.choice((0.0, 1.0, 2.0))} for where in readers
        }
        versions = {
            v: Versions(*({i: rng.choice((0.0, 0.0, 1.0, 2.0)) for i in (0, 1)} for _ in range(3)))
            for v in (0, 1)
        }
        proven.append(lower_bound(p, prices, [], versions=versions))
    assert max(proven) <= best + 1e-9
    assert max(proven) >= best - 1.0, "and near to that something is"


def test_in_a_handwritten_problem_a_version_of_one_reader_pays_for_no_gather_of_another() -> None:
    """y is read in halves and in full. Its gather has a cost, even though its result has a negative
    value to one reader and arrives for backward."""
    prices = {
        (0, 0, False): {1: 1.0},
        (1, 0, False): {1: 1.0},
        (1, 1, False): {0: 1.0},
        (1, 2, True): {1: 1.0},
    }
    assert lower_bound(by_hand(2), prices, [], versions={1: Versions({1: 1.0}, {}, {})}) <= 6.0


def test_multipliers_with_the_wrong_sign_give_no_bound() -> None:
    plain = CASES[1].problem()
    wrong = changed(plain, Multipliers(0.0, {}, {}), random.Random(0), -1.0, 1.0, 0.0)
    positive = {
        where: {i: max(value, 0.0) for i, value in values.items()}
        for where, values in wrong.items()
    }
    assert wrong != positive
    assert lower_bound(plain, wrong, []) == lower_bound(plain, positive, [])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_multipliers_of_the_relaxation_prove_the_relaxation(case: Case) -> None:
    plain = replace(case.problem(), moments=())
    tight, num_priced = front(case), 0
    for budget in (AMPLE, *(size for size, _ in tight[1 : len(tight) : 2])):
        p = replace(plain, budget_bytes=budget)
        found = solve(p, gap=0.5).multipliers
        assert found is not None and found.potentials_s
        program = Formulation(p)
        engine = Engine(program.model)
        rows = [r for r in budget_rows(p) if r.name in found.memory_s]
        relaxation = engine.relax(budget_matrix(engine, program, rows))
        assert relaxation is not None
        assert proven(p, found) == pytest.approx(relaxation.bound / SCALE, rel=1e-3)
        assert found.bound_s <= proven(p, found) * (1 + 1e-12)
        num_priced += bool(found.memory_s)
    assert num_priced > 0, "some budget has a price"


def test_without_multipliers_the_bound_is_the_sum_of_the_least_times_of_ops() -> None:
    p = CASES[0].problem()
    least = sum(op.count * min(s.time_s for s in op.strategies) for op in p.ops)
    assert lower_bound(p, {}, []) == pytest.approx(least)
    assert least > 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_with_one_strategy_per_op_the_bound_is_the_cost_of_the_plan(case: Case) -> None:
    """If each op has one strategy and nothing is recomputed, the multipliers of the relaxation
    prove the cost of the plan."""
    p = case.problem()
    chosen = solve(p, gap=0.0).strategies
    ops = tuple(
        replace(op, strategies=(op.strategies[s],), recomputable=False)
        for op, s in zip(p.ops, chosen, strict=True)
    )
    alone = replace(p, ops=ops, moments=())
    found = solve(alone, gap=0.0).multipliers
    assert found is not None
    assert proven(alone, found) == pytest.approx(
        evaluate(alone, (0,) * len(ops)).objective_s, rel=1e-3
    )


def test_a_memory_price_subtracts_the_budget_and_adds_the_least_bytes() -> None:
    p = replace(CASES[1].problem(), budget_bytes=100)
    free = lower_bound(p, {}, [])
    static = [op.count * np.array([s.static_bytes for s in op.strategies]) for op in p.ops]
    times = [op.count * np.array([s.time_s for s in op.strategies]) for op in p.ops]
    expected = (
        sum(float((t + 2.0 / 100 * b).min()) for t, b in zip(times, static, strict=True)) - 2.0
    )
    assert lower_bound(p, {}, [MemoryRow({}, {}, 2.0)]) == pytest.approx(expected)
    assert lower_bound(p, {}, [MemoryRow({}, {}, -2.0)]) == pytest.approx(free)
    assert KEPT_ROW == "start of backward", "the certificate knows rows by their names"


@pytest.mark.parametrize("case", [Case(0, LINE, hosts=1.0), Case(1, SQUARE, hosts=1.0)], ids=str)
def test_with_host_memory_the_certified_bound_is_that_of_the_search(
    case: Case,
) -> None:
    """The budgets are tight, so that host memory costs less than the device memory that it
    frees."""
    priced = 0
    for budget, best in front(case):
        p = replace(case.problem(budget), moments=())
        known = solve(p, gap=0.0).multipliers
        if known is not None and known.memory_s:
            priced += 1
            assert proven(p, known) == pytest.approx(known.bound_s, rel=1e-4) and proven(
                p, known
            ) <= best * (1 + 1e-6)
    assert priced
