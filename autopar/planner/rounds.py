"""The loop of one search, for a trace and its problem.

Each round solves the problem, emits the solution, and measures its peak memory. The transient peak
depends on the order of the emitted program. If the plan exceeds its budget, rows for the moments
that exceed it are added to the problem (`autopar.cost.memory`), and the next round solves it again.
The first problem has none of these rows, so its bound holds for all plans.

Equal layers share their decisions. If the gap between plan and bound is too large because the
relaxation mixes decisions, layers are divided into groups (`autopar.planner.learned_moments`), and
the problem with these groups is solved. Its bound holds for plans with such groups. Learned moments
shift the shares of the mixture, so the layers are regrouped once.

If the problem is large or memory binds, a search first looks for plans only, since most bounds are
of no use: if the plan does not fit, the bound of its problem is far below any plan that fits. If
that bound may be close to the best plan, the search is repeated to its end, or to its work limit.

A search is a chain of states (`SearchState`). Each phase (`SearchPhase`) is a function from a state
to the next one. It decides from the state, the options and the remaining time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property, partial

from autopar.capture.trace import Trace
from autopar.core.solution import FractionalGroups, Solution
from autopar.cost.priced import Priced
from autopar.planner.candidates import Candidate, TooSlow
from autopar.planner.emitter import Emitter
from autopar.planner.learned_moments import LayerGroups, LearnedMoments, starts_of
from autopar.planner.min_memory import Need, low_memory_plans, prefer_fastest, refusal
from autopar.planner.named_plans import NamedComparison, NamedPlans
from autopar.planner.pipeline.stage_cache import Effort
from autopar.planner.solving import ProblemSolver
from autopar.sharding import (
    ClusterClass,
    Forced,
    Starts,
    combine_groupings,
    frozen_starts,
    split_by_layers,
)
from autopar.solve import Least, quickest

_ROUNDS = 12  # each finds a plan that fits, or adds the moments at which its plan did not
_LAST_ROUNDS = 4  # as these, for the plan that a search for the bound finds
_WASTE = 0.02  # unused share of the budget above which learned moments may admit a better plan


class SearchPhase(Enum):
    """The next action of a search."""

    ASK = auto()  # solve until it is known which equal layers decide separately
    GROUP = auto()  # divide these layers into groups, and solve for the groups
    SOLVE = auto()  # solve for the present groups
    TRY = auto()  # emit the solution, and compare it with the best plan
    LEARN = auto()  # add the moments at which the plan exceeds its budget
    REGROUP = auto()  # divide layers into groups that suit the learned moments
    FINISH = auto()  # prove the best plan to the end, and order its communications
    COMPARE = auto()  # compare the best plan with named plans, by the simulated step
    SHRINK = auto()  # no plan fits: search without kernels, or for little memory
    DONE = auto()  # `SearchState.best` is the result


@dataclass(frozen=True, slots=True)
class SearchState:
    """The state of a search.

    Attributes:
        phase: the next phase.
        groups: the groups of layers.
        regions: the memory that kernels may share with their peers
            (`autopar.core.problem.Solution`); None for all.
        limit_s: exclusive upper limit of the step, in seconds.
        effort: the effort of each round's solve: MIXED while layers may still be grouped, else
            WHOLE.
        answer: the result of the last solve.
        free: the last solution without learned moments, with its problem.
        decided: the decisions of all tried plans, in order.
        candidate: the last tried plan.
        best: the fastest plan that fits.
        smallest: the least peak in bytes, or 0.
        was_regrouped: whether layers were regrouped.
    """

    phase: SearchPhase
    groups: LayerGroups
    regions: frozenset[int] | None
    limit_s: float
    effort: Effort = Effort.MIXED
    answer: Solution | Least | FractionalGroups | None = None
    free: tuple[Priced, Solution] | None = None
    decided: tuple[object, ...] = ()
    candidate: Candidate | None = None
    best: Candidate | None = None
    smallest: int = 0
    was_regrouped: bool = False


def price_by_groups(
    trace: Trace,
    classes: Sequence[ClusterClass],
    forced: Forced,
    price_classes: Callable[..., Priced],
) -> Callable[[Starts], Priced]:
    """Return a function that prices a problem with layers in groups that begin at given starts.

    Args:
        trace: the trace of the model, or of one of its stages.
        classes: its classes of clusters.
        forced: the resolved constraints.
        price_classes: `autopar.cost.price` with all arguments but the classes and `forced`.
    """
    ends = frozen_starts(trace)

    def price_groups(starts: Starts) -> Priced:
        """Price the problem with these groups. Frozen and trained layers are always separate."""
        starts = combine_groupings(ends, starts)
        grouped = split_by_layers(classes, starts)
        return price_classes(grouped, forced=replace(forced, starts=starts))

    return price_groups


@dataclass
class PlannerLoop:
    """Searches for the best plan of one trace.

    Attributes:
        emitter: emits and measures plans.
        pricing: prices the problem with given groups of layers.
        limit_s: exclusive upper limit of the step, in seconds. A slower plan may be returned
            without further work on it.
        named: the named plans to compare with; None for none.
        never_regroups: whether layers are never grouped beyond `pricing`.
        regions: as in `SearchState`.
    """

    emitter: Emitter
    pricing: Callable[[Starts], Priced]
    limit_s: float = math.inf
    named: NamedPlans | None = None
    never_regroups: bool = False
    regions: frozenset[int] | None = None
    _solving: ProblemSolver = field(init=False)

    def __post_init__(self) -> None:
        self.options, self.clock = self.emitter.options, self.emitter.clock
        self._solving = ProblemSolver(self.options, self.emitter.peaks.stage_cache)

    def find_best(self) -> Candidate:
        """Search for the fastest plan that fits.

        Returns:
            The best plan; if no plan with kernels fits, the best without kernels; if that does not
            fit either, a plan that needs little memory.

        Raises:
            InfeasibleError: if no plan that fits was found.
            TooSlow: if the bound is not below `limit_s`.
        """
        effort = Effort.WHOLE if self.never_regroups else Effort.MIXED
        state = SearchState(
            SearchPhase.ASK, self.ungrouped_layers, self.regions, self.limit_s, effort
        )
        state = self._next_round(state)
        while state.phase is not SearchPhase.DONE:
            state = self.phases[state.phase](state)
        assert state.best is not None, "a search without a plan raises"
        return state.best

    @property
    def phases(self) -> Mapping[SearchPhase, Callable[[SearchState], SearchState]]:
        """The function of each phase. It returns the next state and does not change its
        argument."""
        return {
            SearchPhase.ASK: self._find_separate_layers,
            SearchPhase.GROUP: self._group,
            SearchPhase.SOLVE: self._solve,
            SearchPhase.TRY: self._try,
            SearchPhase.LEARN: self._learn,
            SearchPhase.REGROUP: self._regroup,
            SearchPhase.FINISH: self._finish,
            SearchPhase.COMPARE: self._compare,
            SearchPhase.SHRINK: self._shrink,
        }

    @cached_property
    def ungrouped_layers(self) -> LayerGroups:
        """The problem in which all equal layers share their decisions, with nothing learned or
        proven."""
        with self.clock.phase("price"):
            return LayerGroups.of(self.emitter.trace, self.pricing({}), {})

    def group_layers(self, starts: Starts) -> LayerGroups:
        """Divide layers into groups.

        Returns:
            The groups, with nothing learned or proven.
        """
        if not starts:
            return self.ungrouped_layers
        with self.clock.phase("price"):
            return LayerGroups.of(self.emitter.trace, self.pricing(starts), starts)

    def find_lightest(self, proven_s: float = 0.0) -> Candidate | None:
        """Try plans that need little memory, whatever their time.

        Args:
            proven_s: a known lower bound in seconds. A bound with groups also holds without groups.

        Returns:
            The fastest that fits, with ordered communications; if none fits, the one that needs
            least; None if none was found.
        """
        ungrouped = self.ungrouped_layers
        multipliers = quickest(ungrouped.priced.problem)
        bound_s = max(proven_s, multipliers.bound_s if multipliers else 0.0)
        ungrouped = replace(ungrouped, bound_s=bound_s, multipliers=multipliers)
        emit = partial(self.emitter.emit, ungrouped)
        plans = low_memory_plans(self.emitter.trace, ungrouped.priced, self.options.solve_s, emit)
        budget = self.emitter.budget
        lightest = prefer_fastest(plans, lambda plan: (Need(plan.peak_bytes, budget), plan.time_s))
        return (
            self.emitter.order(lightest)
            if lightest is not None and self.emitter.fits(lightest)
            else lightest
        )

    def _next_round(self, state: SearchState) -> SearchState:
        if len(state.decided) == _ROUNDS:
            return replace(state, phase=SearchPhase.FINISH)
        phase = SearchPhase.ASK if state.effort is Effort.MIXED else SearchPhase.SOLVE
        return replace(state, phase=phase)

    def _find_separate_layers(self, state: SearchState) -> SearchState:
        """Solve until it is known which equal layers decide separately."""
        state = self._solve_problem(state, Effort.MIXED)
        answer = state.answer
        if isinstance(answer, Least):
            return state
        assert answer is not None, "a solve has an answer"
        is_too_slow = answer.bound_s >= state.limit_s
        if isinstance(answer, Solution) and (
            is_too_slow or not answer.mixed or self.options.is_late
        ):
            return state  # close enough, too slow, or solved to the end
        if is_too_slow:
            raise TooSlow(answer.bound_s)
        return replace(state, phase=SearchPhase.GROUP, effort=Effort.WHOLE)

    def _group(self, state: SearchState) -> SearchState:
        """Divide layers into the groups of the relaxation, if the result is better than without."""
        mixed = state.answer
        assert isinstance(mixed, Solution | FractionalGroups), "only such an answer mixes decisions"
        met = mixed if isinstance(mixed, Solution) else None
        starts = starts_of(state.groups.priced, mixed)
        if not starts:
            return self._solve_problem(state, Effort.WHOLE, met)
        grouped = self._solve_problem(
            replace(state, groups=self.group_layers(starts)), Effort.WHOLE
        )
        finer = grouped.answer
        if isinstance(finer, Solution) and self._is_enough(finer, met):
            return grouped
        as_before = self._solve_problem(replace(state, free=grouped.free), Effort.WHOLE, met)
        as_before_solution = as_before.answer
        if not isinstance(finer, Solution):
            return as_before
        if (
            isinstance(as_before_solution, Solution)
            and as_before_solution.objective_s <= finer.objective_s
        ):
            return as_before
        return grouped

    def _is_enough(self, finer: Solution, met: Solution | None) -> bool:
        """Whether a solution with groups needs no comparison with one without them."""
        if met is None:
            return finer.gap <= self.options.gap
        return finer.objective_s < met.objective_s

    def _solve(self, state: SearchState) -> SearchState:
        """Solve for the present groups."""
        return self._solve_problem(state, Effort.WHOLE)

    def _solve_problem(
        self, state: SearchState, effort: Effort, met: Solution | None = None
    ) -> SearchState:
        """Solve the problem of a state; the next phase tries the solution.

        Args:
            state: the state.
            effort: the effort of the solve.
            met: a known solution.
        """
        groups, learnt = state.groups, bool(state.groups.learnt)
        with self.clock.phase("solve"):
            answer = self._solving.answer(
                groups.problem, effort, learnt=learnt, regions=state.regions, met=met
            )
        if isinstance(answer, Solution) and not learnt:
            state = replace(state, free=(groups.priced, answer))
        return replace(state, phase=SearchPhase.TRY, answer=answer)

    def _try(self, state: SearchState) -> SearchState:
        """Emit the solution, and compare it with the best plan.

        The rounds end if there is no solution, if it repeats the last plan, or if it is good
        enough.
        """
        answer, groups = state.answer, state.groups
        if not isinstance(answer, Solution):
            return replace(state, phase=SearchPhase.FINISH)
        if state.regions is None:
            groups = _take_proof(groups, answer)
            if groups.bound_s >= state.limit_s:
                raise TooSlow(groups.bound_s)
        decided = groups.starts, answer.strategies, answer.recomputed, answer.kept, answer.regions
        if state.decided and decided == state.decided[-1]:
            return replace(state, phase=SearchPhase.FINISH, groups=groups)
        if decided in state.decided:  # a cycle: keep the moments of both plans
            groups = replace(groups, learnt=groups.learnt.retain_latest())
        state = replace(state, groups=groups, decided=(*state.decided, decided))
        return self._take_candidate(state, self.emitter.emit(groups, answer))

    def _take_candidate(self, state: SearchState, candidate: Candidate) -> SearchState:
        """Record a candidate if it is the best, and decide whether the search continues."""
        fits = self.emitter.fits(candidate)
        improved = fits and (state.best is None or candidate.time_s < state.best.time_s)
        goes_on = not fits or (improved and self._may_improve(candidate, state.groups))
        return replace(
            state,
            phase=SearchPhase.LEARN if goes_on else SearchPhase.FINISH,
            candidate=candidate,
            best=candidate if improved else state.best,
            smallest=min(state.smallest or candidate.peak_bytes, candidate.peak_bytes),
        )

    def _may_improve(self, candidate: Candidate, groups: LayerGroups) -> bool:
        """Whether moments learned from a plan that fits may admit a better one."""
        wasted = candidate.peak_bytes < self.emitter.budget * (1 - _WASTE)
        is_far = candidate.gap > self.options.gap
        return wasted and bool(groups.learnt) and is_far and not self.options.is_late

    def _learn(self, state: SearchState) -> SearchState:
        """Add the moments at which the last plan exceeds its budget."""
        assert state.candidate is not None, "a plan was tried"
        learnt = self.emitter.learn(state.groups.learnt, state.candidate)
        state = replace(state, groups=replace(state.groups, learnt=learnt))
        may_regroup = state.groups.starts and state.regions is None and not state.was_regrouped
        if may_regroup and not self.options.is_late:
            return replace(state, phase=SearchPhase.REGROUP, was_regrouped=True)
        return self._next_round(state)

    def _regroup(self, state: SearchState) -> SearchState:
        """Divide layers into the groups that suit the learned moments, if these differ.

        The previous groups are not solved again with the moments, which would take a round.
        """
        reserves = state.groups.learnt.reserves
        ungrouped = _expect(self.group_layers({}), reserves)
        solved = self._solve_problem(replace(state, groups=ungrouped), Effort.MIXED)
        mixed = solved.answer
        starts = (
            starts_of(ungrouped.priced, mixed)
            if isinstance(mixed, Solution | FractionalGroups)
            else {}
        )
        if starts and starts != state.groups.starts:
            solved = self._solve_problem(
                replace(solved, groups=self.group_layers(starts)), Effort.WHOLE
            )
            free = solved.answer
            if isinstance(free, Solution) and free.bound_s < state.limit_s:
                groups = _expect(_take_proof(solved.groups, free), reserves)
                return self._next_round(replace(state, groups=groups, free=solved.free))
        return self._next_round(replace(state, free=solved.free))

    def _finish(self, state: SearchState) -> SearchState:
        """Prove the best plan to the end, and order its communications."""
        if state.best is None:
            return replace(state, phase=SearchPhase.SHRINK)
        if state.best.time_s * (1 - self.options.gap) >= state.limit_s:
            return replace(state, phase=SearchPhase.DONE)  # slower than a known plan
        best = self.emitter.order(self._prove_to_the_end(state, state.best))
        return replace(state, phase=SearchPhase.COMPARE, best=best)

    def _compare(self, state: SearchState) -> SearchState:
        """Compare the best plan with named plans, if it is below the limit."""
        best, groups = state.best, state.groups
        assert best is not None, "only a plan is compared with others"
        is_wanted = best.time_s < self.limit_s and not self.options.is_late
        if self.named is not None and is_wanted and state.regions is None:
            if groups.priced is not best.draft.priced:
                groups = self.group_layers(best.draft.priced.starts)
            comparison = NamedComparison(self.emitter, self._solving, groups, best)
            best = comparison.fastest(self.named)
        return replace(state, phase=SearchPhase.DONE, best=best)

    def _prove_to_the_end(self, state: SearchState, best: Candidate) -> Candidate:
        """Repeat the solve to the end if the bound may come close to the best plan.

        Returns:
            The best plan with the bound of that solve, or a better plan.
        """
        if self.options.is_late or best.gap <= self.options.gap or state.regions is not None:
            return best
        if state.free is None or state.free[0] is not best.draft.priced:
            return best  # the bound would hold for other plans
        free = state.free[1]
        if not free.unfinished or best.time_s * (1 - self.options.gap) > free.objective_s:
            return best  # the bound of a problem is at most its solution
        met, groups = replace(best.draft.choices, bound_s=0.0), state.groups.forget()
        answer = self._solve_problem(replace(state, groups=groups), Effort.END, met).answer
        if not isinstance(answer, Solution):
            return best
        is_tighter = answer.bound_s > groups.bound_s
        if is_tighter:
            groups = replace(groups, bound_s=answer.bound_s, multipliers=answer.multipliers)
        better = self._emit_faster(replace(state, groups=groups, answer=answer), best, met)
        if better is not None:
            return better
        return self.emitter.prove(groups, best) if is_tighter else best

    def _emit_faster(self, state: SearchState, best: Candidate, met: Solution) -> Candidate | None:
        """Emit the solution of a search for the bound.

        A plan that exceeds the budget adds moments, and the search is repeated.

        Args:
            state: the state with that solution.
            best: the best plan so far.
            met: its decisions, from which a search starts.

        Returns:
            The first plan that fits and is faster than `best`; None if there is none.
        """
        for _ in range(_LAST_ROUNDS):
            answer = state.answer
            if not isinstance(answer, Solution) or answer.objective_s >= best.time_s:
                return None
            faster = self.emitter.emit(state.groups, answer)
            if self.emitter.fits(faster):
                return faster
            is_close = faster.time_s > best.time_s * (1 - self.options.gap)
            if is_close or self.options.is_late:
                return None
            learnt = self.emitter.learn(state.groups.learnt, faster)
            groups = replace(state.groups, learnt=learnt)
            state = self._solve_problem(replace(state, groups=groups), Effort.END, met)
        return None

    def _shrink(self, state: SearchState) -> SearchState:
        """Search again without kernels, or, if there are none, for a plan that needs little memory.

        Raises:
            InfeasibleError: if no plan that fits was found.
        """
        if state.regions is None and state.groups.priced.problem.regions:
            restarted = SearchState(
                SearchPhase.SOLVE, state.groups.forget(), frozenset(), state.limit_s
            )
            return replace(restarted, effort=Effort.WHOLE, was_regrouped=state.was_regrouped)
        smallest = state.smallest
        lightest = self.find_lightest(state.groups.bound_s) if smallest else None
        if lightest is not None and self.emitter.fits(lightest):
            return replace(state, phase=SearchPhase.DONE, best=lightest)
        smallest = min(smallest, lightest.peak_bytes) if lightest is not None else smallest
        assert isinstance(state.answer, Solution | Least), "the rounds end with such an answer"
        raise refusal(self.emitter.budget, state.answer, smallest)


def _take_proof(groups: LayerGroups, choices: Solution) -> LayerGroups:
    """Add the bound and multipliers of a solution, which hold for all plans with these groups.

    Learned moments have reserves, which are correct only for the plans that they were learned from.
    With learned moments the bound without reserves is used, and the multipliers do not change.
    """
    if groups.learnt:
        return replace(groups, bound_s=groups.bound_s or choices.free_bound_s)
    bound_s = groups.bound_s or choices.bound_s
    return replace(groups, bound_s=bound_s, multipliers=choices.multipliers)


def _expect(groups: LayerGroups, reserves: dict[str, int]) -> LayerGroups:
    """Add moments whose reserves were learned from plans with other groups."""
    return replace(groups, learnt=LearnedMoments.from_reserves(groups.learnt.liveness, reserves))
