"""Branch and cut over the program of a problem, by HiGHS.

0. A huge program has a first plan and a bound (`autopar.solve.greedy`). If time runs out, that plan
   is the result.
1. The relaxation without budget rows is solved. Its bound holds for all plans. If its rounded
   solution fits and is close enough, it is the result.
2. Otherwise rounds follow. A round is a list of phases: a dive into a tree
   (`autopar.solve.branching`), branching of this tree, and restricted programs
   (`autopar.solve.restricted`). Restricted programs have few columns, to find better plans, or, for
   small problems, all columns that a better plan could have. Rows that cut off mixtures are in the
   relaxation from the first tree on.
3. A round ends early if a plan is close enough, or if a plan breaks rows that are not in the
   program yet: budget rows, or the rows of a phase whose communication outlasts compute
   (`autopar.solve.lazy_rows`). These rows are added, the relaxation is solved again with the price
   of memory and the balance of both streams, and the next round begins.

Limits count nodes of search trees and columns, not seconds, so the same problem has the same
solution in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.core.problem import Condition, Problem
from autopar.core.solution import FractionalGroups, Solution
from autopar.core.streams import COMPUTE_BOUND, OverlapWeights
from autopar.errors import LayoutError
from autopar.solve.bounds import Incumbent, ProvenBound
from autopar.solve.branching import BranchingVariables, Tree
from autopar.solve.cases import find_split
from autopar.solve.common import Common, Free
from autopar.solve.dual_ascent import Ascent
from autopar.solve.formulation import SCALE
from autopar.solve.greedy import Quick
from autopar.solve.highs import Engine, Live, Point, Relaxation
from autopar.solve.lazy_rows import IncomingRows
from autopar.solve.lp import Floats
from autopar.solve.min_budget import Least, Lightest
from autopar.solve.multipliers import tighter
from autopar.solve.paths import refusal
from autopar.solve.restricted import (
    LARGE,
    SMALL,
    Climb,
    DualStart,
    SiftedPoint,
    is_large,
    middle,
    sift_balances,
)

_FEW = (500, 1000, 2000)  # columns of restricted programs that are solved before a tree
_ROUNDS = 12
_MORE_ROWS = (
    4  # times that budget rows are added because the vertex of the relaxation violates them
)
# Number of columns from which a good-enough balance ends the search over balances, and all budget
# rows at once take too long
_HUGE = 100_000
_RELAXATIONS = 2  # relaxations of a tree per allowed node of the search
_SHORT_TREE = 40  # relaxations of a tree that only improves a plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a phase of a round.

    Attributes:
        rows: the rows to add, since a plan breaks them. They end the round.
        is_final: whether the search is over, if there are no rows to add.
    """

    rows: Sequence[int] = ()
    is_final: bool = False


_GO_ON, _END = Outcome(), Outcome(is_final=True)


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The problem of a search, its limits, and the results that are known before it.

    Attributes:
        problem: the problem.
        gap: relative gap between incumbent and bound at which the search stops.
        max_nodes: limit of the nodes of the search tree.
        time_limit_s: time limit in seconds.
        whole: whether to search on if the relaxation mixes decisions of equal ops. Otherwise the
            result lists these ops (`Solution.mixed`), without a plan (`FractionalGroups`) if memory
            binds in a large problem, only a plan is needed, and none is near the relaxation.
        likely: the balance of the best bound of a similar problem; a search that starts there takes
            less time.
        known: the plan and bound of a huge program before the search.
        only_plan: whether to end with a plan, regardless of its bound, in a large problem or if
            memory binds (`Solution.unfinished`).
        waits: whether the search continues after the time limit as long as it has no plan.
        common: the results of searches for the same problem with other moments; this search adds
            to it.
        met: a known solution, and its bound, if any, from which HiGHS' search starts. The result is
            at least as good.
    """

    problem: Problem
    gap: float
    max_nodes: int = 200
    time_limit_s: float = math.inf
    whole: bool = True
    likely: OverlapWeights = COMPUTE_BOUND
    known: Quick | None = None
    only_plan: bool = False
    waits: bool = False
    common: Common = field(default_factory=Common)
    met: Solution | None = None

    def begin(self) -> IncomingRows:
        """Make the program, or copy it from a search with other moments."""
        program, excess, engine = self.common.begin(self.problem, self.time_limit_s)
        engine.limit.waits = self.waits
        return IncomingRows(program, engine, excess)


@dataclass
class SearchRelaxation:
    """The relaxation of a search, first without budget rows, then with all added rows.

    Attributes:
        free: its solution without budget rows.
        point: its last vertex with rows.
        mixture: the columns of a relaxation that mixes the best plans at several balances, if one
            was solved.
        beginning: the start of the relaxation of a program that is not small.
    """

    request: SearchRequest
    extra: IncomingRows
    proven: ProvenBound
    plans: Incumbent
    climb: Climb
    free: Floats = field(default_factory=lambda: np.zeros(0))
    point: Point | None = None
    mixture: Floats | None = None
    beginning: DualStart | None = None
    _live: Live | None = None

    @property
    def live(self) -> Live:
        """The relaxation that keeps its basis, with the rows against mixtures and all rows of
        `add_rows`."""
        if self._live is None:
            engine = self.extra.engine
            self._live = Live(engine, tighter(self.extra.program, engine))
        return self._live

    def solve_free(self) -> Relaxation | None:
        """Solve the relaxation without budget rows."""
        engine, problem, common = self.extra.engine, self.request.problem, self.request.common
        before = common.of(problem)
        ascent = None
        if self.request.known is not None:
            ascent = self.request.known.ascent
        elif before is not None:
            ascent = before.ascent_of(problem)
        if len(engine.names) > SMALL:
            self.beginning = DualStart(self.extra.program, engine, ascent or Ascent(problem))
        if before is None and self.beginning is not None:
            engine.begin(self.beginning.free())
        relaxation = engine.relax() if before is None else before.relaxation
        if relaxation is not None:
            self.proven.begin(relaxation)
            self.free = relaxation.values
            if before is None and not engine.limit.timed_out:
                ascent = None if self.beginning is None else self.beginning.ascent
                common.keep(
                    Free.of(self.extra.program, self.extra.excess, engine, relaxation, ascent)
                )
        return relaxation

    def add_rows(self, broken: Sequence[int]) -> Point | None:
        """Add rows, and those that cut off mixtures, and solve the relaxation with them."""
        first_rows, self.extra.active = not self.extra.active, [*self.extra.active, *broken]
        large = is_large(self.extra.engine)
        if first_rows and not self.extra.phases and self.beginning is not None and large:
            return self._relax_from_price(self.beginning)
        live = self.live
        if self.extra.phases:
            cost = self.extra.excess.price(
                self.extra.engine,
                self.proven.bound_s if self.plans.best is None else self.plans.best_s,
            )
            if large:
                live.add(self.extra.matrix([r for r in broken if r < len(self.extra.rows)]))
                return self._sift_balances(live)
            live.reprice(cost)
        live.add(self.extra.matrix(broken))
        return self._solve_with_rows(live)

    def _relax_from_price(self, beginning: DualStart) -> Point | None:
        """Solve the relaxation with the first budget rows, starting from a price of the most
        violated row."""
        cuts = tighter(self.extra.program, self.extra.engine)
        worst = self.extra.active[0]
        further = cuts.plus(self.extra.matrix(self.extra.active))
        duals = beginning.duals_at_price(further, self.extra.rows[worst].name, len(cuts.lower))
        self._live = Live(self.extra.engine, further, duals)
        return self._solve_with_rows(self._live)

    def _solve_with_rows(self, live: Live) -> Point | None:
        """Solve the relaxation, and add the budget rows that its vertex violates."""
        lower, upper = np.zeros(len(live.cost)), np.ones(len(live.cost))
        point = live.solve(lower, upper)
        for _ in range(_MORE_ROWS):
            violated = () if point is None else self.extra.violated(point.values)
            if not violated:
                break
            self.extra.active = [*self.extra.active, *violated]
            live.add(self.extra.matrix(violated))
            point = live.solve(lower, upper)
        self.point = point
        if point is not None:
            duals = _last_duals(point, self.extra.active)
            balance = self.extra.excess.balance(
                {phase: duals[len(self.extra.rows) + phase] for phase in self.extra.phases}
            )
            self.proven.learn(point, balance, {r: duals[r] for r in self.extra.budget})
        return point

    def _sift_balances(self, live: Live) -> Point | None:
        """Solve the relaxation at the best balance, and search for plans over the columns that are
        cheap at each balance tried."""
        program, engine, phases = self.extra.program, self.extra.engine, self.extra.phases
        best: SiftedPoint | None = None
        likely = (self.proven.relaxed.balance, self.request.likely)
        known = next((balance for balance in likely if balance != COMPUTE_BOUND), None)
        # Near the first vertex, and far from it.
        first = (known,) if known else (COMPUTE_BOUND, middle(phases))
        rows = self.extra.budget
        for at in sift_balances(
            program, engine, live, self.extra.excess, phases, first, self._learn_mixture
        ):
            best = at if best is None or at.point.bound > best.point.bound else best
            self.proven.learn(at.point, at.balance, _last_duals(at.point, rows))
            if not self.plans.is_close():
                self.climb.over(self.extra.with_excess(at.columns))
            if self.plans.may_end() or (self.plans.is_close() and self._is_enough_when_close):
                break
        if best is not None:
            self.point = best.point
            live.reprice(engine.costs(program.costs(best.balance)))
        return None if best is None else best.point

    @property
    def _is_enough_when_close(self) -> bool:
        """Return whether better balances are useless once the plan is close: if each takes long, or
        if the bound is that of one of several cases."""
        return len(self.extra.engine.names) >= _HUGE or bool(self.request.problem.conditions)

    def _learn_mixture(self, values: Floats) -> None:
        self.mixture = values


def _last_duals(point: Point, rows: Sequence[int]) -> dict[int, float]:
    """Map the last rows of a relaxation to their duals."""
    duals = point.duals[len(point.duals) - len(rows) :].tolist()
    return dict(zip(rows, duals, strict=True))


class BranchAndCut:
    """One search: the rows in its program, the best plan (`plans`) and the proven bound.

    Attributes:
        extra: the program, and the rows added to those of the formulation.
        tree: the tree of the round.
        infeasible: whether the problem is proven infeasible.
        least: the bytes that are needed in that case, if known.
        apart: the ops that decide separately, if they are the result.
    """

    def __init__(self, request: SearchRequest) -> None:
        if request.known is not None:  # it has its own ascent
            request = replace(request, common=Common())
        self.request = request
        self.extra = request.begin()
        self.proven = ProvenBound(self.extra)
        self.plans = Incumbent(self.extra, self.proven, request.gap)
        self.climb = Climb(self.extra, self.proven, request.gap, self.plans)
        self.relaxation = SearchRelaxation(request, self.extra, self.proven, self.plans, self.climb)
        self.tree: Tree | None = None
        self.infeasible = False
        self.least: Least | None = None
        self.apart: FractionalGroups | None = None

    @property
    def engine(self) -> Engine:
        """HiGHS on the program."""
        return self.extra.engine

    def run(self) -> Solution | None:
        """Search for the best plan.

        Returns:
            The best plan with its bound, or None. In that case `infeasible`, `least` and `apart`
            have the result.

        Raises:
            InfeasibleError: if no assignment of layouts is legal, regardless of memory.
        """
        self._take_known()
        relaxation = self.relaxation.solve_free()
        if relaxation is None:
            raise refusal(self.request.problem)
        for _ in range(_ROUNDS):
            rows = self._run_round(relaxation).rows
            if not rows or self.plans.may_end():
                break
            if self._nothing_fits(rows) or self.relaxation.add_rows(rows) is None:
                self.infeasible = self.plans.best is None
                break
        if self.plans.best is not None:
            self.request.common.has_plan = True
        elif self._skipped_all_rows:
            self.infeasible = self._needs_more() or self.infeasible
        return self._answer()

    def _take_known(self) -> None:
        """Start from the plans and bounds that are known before the search."""
        known, met = self.request.known, self.request.met
        if known is not None:
            self.plans.best = known.best
            self.engine.limit.waits = self.request.waits and self.plans.best is None
            self.proven.know(known)
        if met is not None:
            self.plans.meet(met)
            self.proven.take(met)

    def _run_round(self, relaxation: Relaxation) -> Outcome:
        """Run phases until there are rows to add, the search is over, or a plan is close enough.

        Args:
            relaxation: the relaxation without budget rows.
        """
        phases: tuple[Callable[[], Outcome], ...] = (
            # The first plan, and the first rows to add. Only before any row is added.
            lambda: self._round_off(relaxation),
            # If only a plan of a large program is needed, the restricted programs find it at the
            # known vertex without a tree.
            self._restrict_at_vertex,
            # The bound of the root, and a plan from a short dive. It also shows which equal ops
            # decide separately, which may be the only question.
            self._dive,
            # Restricted programs before branching: a plan closes nodes of the tree.
            self._restrict_before_branching,
            # The tree raises the bound until it is close to the plan or a limit is reached.
            self._branch,
            # Better plans over few columns that the tree did not find. Only if rows were added.
            self._restrict,
            # Finally all columns that a better plan could have, if these are few.
            self._prove,
        )
        outcome = _GO_ON
        for phase in phases:
            outcome = phase()
            if outcome.rows or outcome.is_final or self.plans.is_close():
                break
        return outcome

    def _round_off(self, relaxation: Relaxation) -> Outcome:
        """Offer the rounded relaxation without budget rows as a plan."""
        if self.extra.active:
            return _GO_ON
        rows = self.plans.offer_rounded(relaxation)
        if rows and self.request.likely != COMPUTE_BOUND:
            rows = [*rows, *self.extra.excesses()]
        return Outcome(rows)

    def _restrict_at_vertex(self) -> Outcome:
        """Search restricted programs for a plan, at the last vertex of a large program."""
        if not self._is_large or self.relaxation.point is None or not self._needs_only_a_plan():
            return _GO_ON
        rows = self._climb()
        return Outcome(rows, is_final=self._is_sufficient())

    def _dive(self) -> Outcome:
        """Solve the root of a tree, and descend a short way."""
        self.tree = self._plant()
        grown, root = self.tree.dive(), self.tree.root
        if root is None:
            self.infeasible = self.plans.best is None
            return Outcome(is_final=self.infeasible)
        if grown.broken or self.plans.is_close():
            self._take_bound(grown.bound)
            return Outcome(grown.broken)
        if self._prefers_groups():
            # The result of a dive depends on the vertex, so plans are searched at the vertex.
            rows = self.climb.from_vertex(root.point, self.relaxation.free, soon=True)
            return Outcome(rows, is_final=True)
        if self._needs_no_plan():
            self.apart = FractionalGroups(self.proven.relaxed.mixed, self.proven.bound_s)
            return _END
        return _GO_ON

    def _restrict_before_branching(self) -> Outcome:
        """Search restricted programs, if they find plans sooner than the tree does."""
        if self.tree is None or self.tree.root is None:
            return _GO_ON
        rows: Sequence[int] = ()
        if self._needs_only_a_plan():
            rows = self._climb()
        elif self.extra.phases and SMALL < len(self.engine.names) < LARGE:
            # Rows over all columns make a tree slow; rows over a few columns do not.
            rows = self._climb(*_FEW)
        return Outcome(rows, is_final=self._prefers_groups())

    def _branch(self) -> Outcome:
        """Grow the tree; a short tree, if there is a plan and no bound is needed."""
        if self.tree is None or self.tree.root is None:
            return _GO_ON
        grown = self.tree.branch(_SHORT_TREE if self._is_sufficient() else None)
        self._take_bound(grown.bound)
        return Outcome(grown.broken, is_final=self.infeasible)

    def _restrict(self) -> Outcome:
        """Search restricted programs for plans that the tree did not find."""
        if self._prefers_groups() or self._is_sufficient():
            return _END
        return Outcome(self._climb()) if self.extra.active else _GO_ON

    def _prove(self) -> Outcome:
        """Search the program over all columns that a better plan could have."""
        has_vertex = self._is_large and self.plans.best is not None
        point = self.relaxation.point if has_vertex else None
        return Outcome(self.climb.prove(self.request.max_nodes, point), is_final=True)

    def _take_bound(self, bound: float) -> None:
        """Adopt the bound of a tree, which is infinite if the tree has no plan."""
        if np.isinf(bound):
            self.infeasible = self.plans.best is None
        else:
            self.proven.rise(min(bound, self.plans.best_s * SCALE))

    def _plant(self) -> Tree:
        """Make a tree over the relaxation with the present rows."""

        def offer(values: Floats) -> Sequence[int]:
            """Offer rounded values as a plan; return the rows that it breaks."""
            try:
                return self.plans.offer(values)
            except LayoutError:  # rounded strategies may leave a reader without a usable layout
                return ()

        def best() -> float:
            """Return the cost of the best plan, in the program's unit."""
            return self.plans.best_s * SCALE

        live, sizes = self.relaxation.live, self.extra.sizes()
        most = self.request.max_nodes * _RELAXATIONS
        variables = BranchingVariables.of(self.extra.program, self.engine, sizes)
        return Tree(variables, live, offer, best, self.request.gap, most)

    def _nothing_fits(self, broken: Sequence[int]) -> bool:
        """Return whether no plan fits, before the first budget rows are added. All rows at once
        show this sooner than one after another. It is rare if an earlier search found a plan."""
        budget = [r for r in broken if r < len(self.extra.rows)]
        is_first = self.plans.best is None and budget and not self.extra.budget
        return bool(is_first) and not self.request.common.has_plan and self._needs_more()

    @property
    def _skipped_all_rows(self) -> bool:
        """Whether the search has no result and did not try all budget rows at once."""
        return self.apart is None and self.request.common.has_plan and bool(self.extra.budget)

    def _needs_more(self) -> bool:
        """Return whether all budget rows at once show that no plan fits; `least` then has the bytes
        needed."""
        if SMALL < len(self.engine.names) < LARGE:
            problem = self.request.problem
            needed = Lightest(problem, self.request.time_limit_s).bound_bytes
            self.least = Least(needed) if needed > problem.budget_bytes else None
        return self.least is not None

    @property
    def _is_large(self) -> bool:
        return is_large(self.engine)

    def _answer(self) -> Solution | None:
        if self.plans.best is None:
            return None
        program, relaxed = self.extra.program, self.proven.relaxed
        bound = min(self.proven.bound_s, self.plans.best.objective_s)
        stats = {
            "timed_out": self.engine.limit.timed_out,
            "budget_rows": len(self.extra.budget),
            "outlasted": len(self.extra.phases),
        }
        return replace(
            self.plans.best,
            bound_s=bound,
            free_bound_s=min(self.proven.free / SCALE, bound),
            num_variables=program.num_variables,
            num_constraints=program.num_constraints + len(self.extra.active),
            solver="highs",
            memory_price_s_per_byte=relaxed.price_s_per_byte,
            stats={k: float(n) for k, n in stats.items()},
            multipliers=self.proven.multipliers(),
            mixed=relaxed.mixed if self.plans.is_far() else {},
            unfinished=self._is_sufficient() and not self.plans.is_close(),
            split=self._find_split(),
        )

    def _find_split(self) -> Condition | None:
        """Return the condition that divides the mixture best, if the gap is too large."""
        problem, values, point = (
            self.request.problem,
            self.relaxation.mixture,
            self.relaxation.point,
        )
        if values is None and problem.conditions and point is not None:
            values = point.values
        if values is None or not len(values) or self.plans.is_close():
            return None
        column = self.engine.column
        shares = [values[[column[v.name] for v in row]] for row in self.extra.program.x]
        return find_split(problem, shares)

    def _climb(self, *rungs: int) -> list[int]:
        """Search restricted programs from small to large, at the last vertex if that pays."""
        from_vertex = self._is_large or not self._forms_groups
        point = self.relaxation.point if from_vertex else None
        return self.climb.up(point, self.relaxation.free, rungs)

    def _needs_only_a_plan(self) -> bool:
        """Return whether only a plan is needed. In a large program, or one with budget rows, a long
        tree mostly raises the bound: the plans come from dives, restricted programs and a short
        tree."""
        return (
            self.request.only_plan
            and len(self.engine.names) > SMALL
            and (bool(self.extra.budget) or self._is_large)
        )

    def _is_sufficient(self) -> bool:
        """Return whether there is a plan, and nothing more is needed."""
        return self._needs_only_a_plan() and self.plans.best is not None

    def _prefers_groups(self) -> bool:
        """Return whether to try separate decisions of equal ops rather than a tree."""
        return self._forms_groups and self.plans.best is not None and len(self.engine.names) > SMALL

    def _needs_no_plan(self) -> bool:
        """Return whether it is enough to know which equal ops decide separately. If no plan is near
        the relaxation, one takes long to find, and plans with groups of layers are better."""
        return (
            self._forms_groups
            and self.plans.best is None
            and self._needs_only_a_plan()
            and not self.engine.limit.timed_out
        )

    @property
    def _forms_groups(self) -> bool:
        """Return whether equal ops decide separately, and the result only states how to group
        them."""
        return bool(self.proven.relaxed.mixed) and not self.request.whole
