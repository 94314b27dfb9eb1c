"""Branch and cut over the program of a problem, by HiGHS.

0. Of a huge program something is known already (`autopar.solve.greedy`); if time runs out, that is
   the answer.
1. The relaxation without budget rows is solved. Its bound holds for all plans, and if its solution,
   rounded, fits and is close enough, it is the answer.
2. Else rounds follow. A round is a list of phases: a dive into a tree (`autopar.solve.branching`),
   the branching of this tree, and restricted programs (`autopar.solve.restricted`), over few
   columns to find better plans, and of a small problem over all columns that a better plan could
   have. Rows that cut off mixtures are in the relaxation from the first tree on.
3. A round ends early if a plan is close enough, or if a plan breaks rows that are not in yet:
   budget rows, or those of a phase whose communication outlasts compute
   (`autopar.solve.lazy_rows`). These rows come in, the relaxation is solved again, with the
   price of memory and the balance of both streams, and the next round begins.

Limits count nodes of search trees and columns, not seconds, so the same problem gives the same
choices.
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
from autopar.solve.bounds import Incumbent, Proven
from autopar.solve.branching import BranchingVariables, Tree
from autopar.solve.cases import find_split
from autopar.solve.common import Common, Free
from autopar.solve.dual_ascent import Ascent
from autopar.solve.formulation import SCALE
from autopar.solve.greedy import Quick
from autopar.solve.highs import Engine, Live, Point, Relaxation
from autopar.solve.lazy_rows import Incoming
from autopar.solve.lp import Floats
from autopar.solve.min_budget import Least, Lightest
from autopar.solve.multipliers import tighter
from autopar.solve.paths import refusal
from autopar.solve.restricted import (
    LARGE,
    SMALL,
    Beginning,
    Climb,
    Sifted,
    is_large,
    middle,
    sift_balances,
)

_FEW = (500, 1000, 2000)  # columns of restricted programs that come before a tree
_ROUNDS = 12
# columns: from here on a balance that will do ends the sifting, and all budget rows at once take
# too long
_HUGE = 100_000
_RELAXATIONS = 2  # of a tree, per node that a search may have
_SHORT_TREE = 40  # relaxations of one that is to better a plan, not to prove it


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a phase of a round has come to.

    Attributes:
        rows: to come in, since a plan breaks them; the round is over then, and the next begins.
        is_final: whether the search is over, if no rows are to come in.
    """

    rows: Sequence[int] = ()
    is_final: bool = False


_GO_ON, _END = Outcome(), Outcome(is_final=True)


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """What a search is to solve, within which limits, and what is known before it.

    Attributes:
        whole, likely, only_plan, waits, common, met: as in `autopar.solve.choices_or_least`.
        known: of a huge program, before the search.
    """

    problem: Problem
    gap: float
    max_nodes: int
    time_limit_s: float = math.inf
    whole: bool = True
    likely: OverlapWeights = COMPUTE_BOUND
    known: Quick | None = None
    only_plan: bool = False
    waits: bool = False
    common: Common = field(default_factory=Common)
    met: Solution | None = None

    def begin(self) -> Incoming:
        """Make the program, or take it from a search with other moments."""
        program, excess, engine = self.common.begin(self.problem, self.time_limit_s)
        engine.limit.waits = self.waits
        return Incoming(program, engine, excess)


@dataclass
class SearchRelaxation:
    """The relaxation of a search: first without budget rows, then with all rows that came in.

    Attributes:
        free: its columns without budget rows.
        point: its last vertex with rows.
        mixture: the columns of a relaxation that mixes what is best at several balances, where one
            was solved.
        beginning: where the relaxation of a program that is not small begins.
    """

    request: SearchRequest
    extra: Incoming
    proven: Proven
    plans: Incumbent
    climb: Climb
    free: Floats = field(default_factory=lambda: np.zeros(0))
    point: Point | None = None
    mixture: Floats | None = None
    beginning: Beginning | None = None
    _live: Live | None = None

    @property
    def live(self) -> Live:
        """The relaxation that keeps its basis; it has the rows against mixtures, and all that
        `add_rows` was given."""
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
            self.beginning = Beginning(self.extra.program, engine, ascent or Ascent(problem))
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

    def _relax_from_price(self, beginning: Beginning) -> Point | None:
        """Solve the relaxation with the first budget rows, from a price of the row that is broken
        worst."""
        cuts = tighter(self.extra.program, self.extra.engine)
        worst = self.extra.active[0]
        further = cuts.plus(self.extra.matrix(self.extra.active))
        duals = beginning.duals_at_price(further, self.extra.rows[worst].name, len(cuts.lower))
        self._live = Live(self.extra.engine, further, duals)
        return self._solve_with_rows(self._live)

    def _solve_with_rows(self, live: Live) -> Point | None:
        point = self.point = live.solve(np.zeros(len(live.cost)), np.ones(len(live.cost)))
        if point is not None:
            duals = _last_duals(point, self.extra.active)
            balance = self.extra.excess.balance(
                {phase: duals[len(self.extra.rows) + phase] for phase in self.extra.phases}
            )
            self.proven.learn(point, balance, {r: duals[r] for r in self.extra.budget})
        return point

    def _sift_balances(self, live: Live) -> Point | None:
        """Solve the relaxation at the best balance, and search for plans over the columns that are
        cheap at each balance on the way."""
        program, engine, phases = self.extra.program, self.extra.engine, self.extra.phases
        found: Sifted | None = None
        likely = (self.proven.relaxed.balance, self.request.likely)
        known = next((balance for balance in likely if balance != COMPUTE_BOUND), None)
        # Near the first vertex, and far.
        first = (known,) if known else (COMPUTE_BOUND, middle(phases))
        rows = self.extra.budget
        for at in sift_balances(
            program, engine, live, self.extra.excess, phases, first, self._learn_mixture
        ):
            found = at if found is None or at.point.bound > found.point.bound else found
            self.proven.learn(at.point, at.balance, _last_duals(at.point, rows))
            if not self.plans.is_close():
                self.climb.over(self.extra.with_excess(at.columns))
            if self.plans.may_end() or (self.plans.is_close() and self._is_enough_when_close):
                break
        if found is not None:
            self.point = found.point
            live.reprice(engine.costs(program.costs(found.balance)))
        return None if found is None else found.point

    @property
    def _is_enough_when_close(self) -> bool:
        """Whether better balances are of no use once the plan is close: where each takes long, or
        the bound is that of one case of several."""
        return len(self.extra.engine.names) >= _HUGE or bool(self.request.problem.conditions)

    def _learn_mixture(self, values: Floats) -> None:
        self.mixture = values


def _last_duals(point: Point, rows: Sequence[int]) -> dict[int, float]:
    """Row → its dual, of the rows that are the last ones of a relaxation."""
    duals = point.duals[len(point.duals) - len(rows) :].tolist()
    return dict(zip(rows, duals, strict=True))


class BranchAndCut:
    """One search: which rows are in its program, the best plan (`plans`) and what is proven.

    Attributes:
        extra: the program, and the rows that came in beside the formulation's.
        tree: of the round.
        infeasible: proven so. least: what is then needed at least, where known. apart: where that
            is the answer.
    """

    def __init__(self, request: SearchRequest) -> None:
        if request.known is not None:  # it has an ascent of its own
            request = replace(request, common=Common())
        self.request = request
        self.extra = request.begin()
        self.proven = Proven(self.extra)
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
            The best plan found, with its bound, or None. Then `infeasible`, `least` and `apart` say
            what is known instead.

        Raises:
            InfeasibleError: no assignment of layouts is legal, whatever the memory.
        """
        self._take_known()
        relaxation = self.relaxation.solve_free()
        if relaxation is None:
            raise refusal(self.request.problem)
        for _ in range(_ROUNDS):
            rows = self._run_round(relaxation).rows
            if not rows or self.plans.may_end():
                break
            if self._fits_nowhere(rows) or self.relaxation.add_rows(rows) is None:
                self.infeasible = self.plans.best is None
                break
        if self.plans.best is not None:
            self.request.common.has_plan = True
        elif self._skipped_all_rows:
            self.infeasible = self._needs_more() or self.infeasible
        return self._answer()

    def _take_known(self) -> None:
        """Begin with the plans and bounds that are known before the search."""
        known, met = self.request.known, self.request.met
        if known is not None:
            self.plans.best = known.best
            self.engine.limit.waits = self.request.waits and self.plans.best is None
            self.proven.know(known)
        if met is not None:
            self.plans.meet(met)
            self.proven.take(met)

    def _run_round(self, relaxation: Relaxation) -> Outcome:
        """Run phases until rows are to come in, the search is over, or a plan is close enough.

        Args:
            relaxation: the one without budget rows.
        """
        phases: tuple[Callable[[], Outcome], ...] = (
            # The first plan, and with it the rows that come in first. Only before any row is in.
            lambda: self._round_off(relaxation),
            # A large program of which only a plan is wanted: the restricted programs find it at the
            # vertex that is known, without a tree.
            self._restrict_at_vertex,
            # The root's bound, and a plan from a short way down. It also shows which equal ops
            # decide apart, which can be all that is asked for.
            self._dive,
            # Restricted programs before branching: a plan closes nodes of the tree.
            self._restrict_before_branching,
            # The tree raises the bound, until it is close to the plan or a limit is reached.
            self._branch,
            # What the tree left open: better plans over few columns. Only if rows are in.
            self._restrict,
            # At last all columns that a better plan could have, if these are few.
            self._prove,
        )
        outcome = _GO_ON
        for phase in phases:
            outcome = phase()
            if outcome.rows or outcome.is_final or self.plans.is_close():
                break
        return outcome

    def _round_off(self, relaxation: Relaxation) -> Outcome:
        """Offer the relaxation without budget rows, rounded, as a plan."""
        if self.extra.active:
            return _GO_ON
        rows = self.plans.offer_rounded(relaxation)
        if rows and self.request.likely != COMPUTE_BOUND:
            rows = [*rows, *self.extra.excesses()]
        return Outcome(rows)

    def _restrict_at_vertex(self) -> Outcome:
        """Search restricted programs from the last vertex of a large program for a plan."""
        if not self._is_large or self.relaxation.point is None or not self._asks_only_for_a_plan():
            return _GO_ON
        rows = self._climb()
        return Outcome(rows, is_final=self._will_do())

    def _dive(self) -> Outcome:
        """Solve the root of a tree, and go a short way down from it."""
        self.tree = self._plant()
        grown, root = self.tree.dive(), self.tree.root
        if root is None:
            self.infeasible = self.plans.best is None
            return Outcome(is_final=self.infeasible)
        if grown.broken or self.plans.is_close():
            self._take_bound(grown.bound)
            return Outcome(grown.broken)
        if self._set_apart():
            # What a dive finds depends on the vertex, so plans are looked for at the vertex.
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
        if self._asks_only_for_a_plan():
            rows = self._climb()
        elif self.extra.phases and SMALL < len(self.engine.names) < LARGE:
            # Rows over all columns make a tree slow, and a few columns do not.
            rows = self._climb(*_FEW)
        return Outcome(rows, is_final=self._set_apart())

    def _branch(self) -> Outcome:
        """Grow the tree; a short one, if there is a plan and only that is wanted."""
        if self.tree is None or self.tree.root is None:
            return _GO_ON
        grown = self.tree.branch(_SHORT_TREE if self._will_do() else None)
        self._take_bound(grown.bound)
        return Outcome(grown.broken, is_final=self.infeasible)

    def _restrict(self) -> Outcome:
        """Search restricted programs for plans that the tree did not find."""
        if self._set_apart() or self._will_do():
            return _END
        return Outcome(self._climb()) if self.extra.active else _GO_ON

    def _prove(self) -> Outcome:
        """Search the program over all columns that a better plan could have."""
        has_vertex = self._is_large and self.plans.best is not None
        point = self.relaxation.point if has_vertex else None
        return Outcome(self.climb.prove(self.request.max_nodes, point), is_final=True)

    def _take_bound(self, bound: float) -> None:
        """Take over the bound of a tree, which is infinite if no plan is in it."""
        if np.isinf(bound):
            self.infeasible = self.plans.best is None
        else:
            self.proven.rise(min(bound, self.plans.best_s * SCALE))

    def _plant(self) -> Tree:
        """A tree over the relaxation with the rows that are in."""

        def offer(values: Floats) -> Sequence[int]:
            """Offer rounded values as a plan; return the rows that it breaks."""
            try:
                return self.plans.offer(values)
            except LayoutError:  # rounded strategies may make nothing that a reader can use
                return ()

        def best() -> float:
            """Cost of the best plan, in the program's unit."""
            return self.plans.best_s * SCALE

        live, sizes = self.relaxation.live, self.extra.sizes()
        most = self.request.max_nodes * _RELAXATIONS
        variables = BranchingVariables.of(self.extra.program, self.engine, sizes)
        return Tree(variables, live, offer, best, self.request.gap, most)

    def _fits_nowhere(self, broken: Sequence[int]) -> bool:
        """Whether no plan fits, before the first budget rows come in: all rows at once say so
        sooner than one after another. If a search before found a plan, this is rarely so."""
        budget = [r for r in broken if r < len(self.extra.rows)]
        is_first = self.plans.best is None and budget and not self.extra.budget
        return bool(is_first) and not self.request.common.has_plan and self._needs_more()

    @property
    def _skipped_all_rows(self) -> bool:
        """Whether the search has no answer and did not look at all budget rows at once."""
        return self.apart is None and self.request.common.has_plan and bool(self.extra.budget)

    def _needs_more(self) -> bool:
        """Whether all budget rows at once show that no plan fits; `least` then says how much is
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
            unfinished=self._will_do() and not self.plans.is_close(),
            split=self._find_split(),
        )

    def _find_split(self) -> Condition | None:
        """The condition that divides the mixture best, if the plan is too far from the bound."""
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
        """Search restricted programs, from small to large; from the last vertex if that pays."""
        from_vertex = self._is_large or not self._forms_groups
        point = self.relaxation.point if from_vertex else None
        return self.climb.up(point, self.relaxation.free, rungs)

    def _asks_only_for_a_plan(self) -> bool:
        """Of a large program, or one with budget rows, a long tree mostly raises the bound: dives,
        restricted programs and a short one have found the plan before."""
        return (
            self.request.only_plan
            and len(self.engine.names) > SMALL
            and (bool(self.extra.budget) or self._is_large)
        )

    def _will_do(self) -> bool:
        """Whether there is a plan, and no more is wanted."""
        return self._asks_only_for_a_plan() and self.plans.best is not None

    def _set_apart(self) -> bool:
        """Whether equal ops that decide apart are to be tried rather than a tree."""
        return self._forms_groups and self.plans.best is not None and len(self.engine.names) > SMALL

    def _needs_no_plan(self) -> bool:
        """Whether it is enough to know which equal ops decide apart: where no plan is near the
        relaxation, one takes long to find, and what layers in groups do is better."""
        return (
            self._forms_groups
            and self.plans.best is None
            and self._asks_only_for_a_plan()
            and not self.engine.limit.timed_out
        )

    @property
    def _forms_groups(self) -> bool:
        """Whether equal ops decide apart, and what is found only says how to group them."""
        return bool(self.proven.relaxed.mixed) and not self.request.whole
