"""The rounds of one search, for a trace and its problem.

The transient peak depends on the order of the emitted program, so it is re-derived on it, node by node. Where the plan is over
its budget, these moments become rows of the problem (`autopar.cost.moments`), and it is solved again. The first problem has
none of them, so its bound holds for all.

Equal layers take one decision. Where that leaves plan and bound too far apart, since the relaxation mixes decisions, layers are put into
groups (`autopar.planning.grouping`), and the problem of these is solved; its bound is one for plans with such groups. Moments that are
learnt shift these shares, so the layers are then cut once more.

A large search, or one where memory binds, first asks for plans only, since most bounds are of no use: if the plan does not fit, the bound
of what it was the answer to is far below any that does. Where it may be near, the search is done again, to its end or that of its work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.capture.trace import Trace
from autopar.choices import Apart, Choices, Multipliers
from autopar.cost.moments import Liveness
from autopar.cost.priced import Priced
from autopar.emit import emit
from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.planning.alike import Alike, Effort
from autopar.planning.assembly import assemble
from autopar.planning.clock import Clock
from autopar.planning.draft import Draft
from autopar.planning.grouping import starts_of
from autopar.planning.learnt import Known, Learnt
from autopar.planning.multipliers import certified
from autopar.planning.options import PlanOptions
from autopar.planning.ordering import Ordering
from autopar.planning.peaks import Peaks, Schedule
from autopar.planning.smallest import Need, light, preferred, refusal
from autopar.planning.solving import Solving
from autopar.planning.tried import Elsewhere, TooSlow, Tried, beside
from autopar.plans import Fingerprint
from autopar.solve import Least, quickest, within
from autopar.strategies import Starts

_ROUNDS = 12  # each either fits or adds moments at which the plan before did not
_WASTE = 0.02  # share of the budget: where a plan leaves more unused, moments learnt from it may admit a better one


@dataclass
class Job:
    """The rounds of one search: solve, emit, look at the memory, learn moments.

    Attributes:
        pricing: gives the problem where layers decide in these groups. whole: equal layers decide alike, or are in groups already.
        regions: what kernels may share with their peers (`autopar.problem.Choices`).
        elsewhere: asked once, before a search goes on for long.
    """

    trace: Trace
    mesh: Mesh
    pricing: Callable[[Starts], Priced]
    options: PlanOptions
    clock: Clock
    mark: Fingerprint
    recorded: Mapping[str, object]
    budget: int
    schedule: Schedule | None = None  # of a stage
    bound_s: float = 0.0
    multipliers: Multipliers | None = None
    limit_s: float = math.inf
    elsewhere: Elsewhere | None = None
    alike: Alike = field(default_factory=Alike)
    priced: Priced = field(init=False)
    learnt: Learnt = field(init=False)
    whole: bool = False
    regions: frozenset[int] | None = None
    _starts: Starts = field(default_factory=dict)  # of the groups that layers are in
    _ungrouped: tuple[Priced, Liveness] | None = None  # of layers in no groups
    _is_cut_anew: bool = False
    _free: tuple[Priced, Choices] | None = None  # the last answer with nothing learnt, and its problem
    _solving: Solving = field(init=False)

    def __post_init__(self) -> None:
        self._solving = Solving(self.options, self.alike)
        self._cut({})

    def _cut(self, starts: Starts) -> None:
        """Put layers into these groups, of which nothing is known."""
        with self.clock.phase("price"):
            known = None if starts else self._ungrouped
            if known is None:
                priced = self.pricing(starts)
                known = priced, Liveness(self.trace, priced)
            self._ungrouped = self._ungrouped if starts else known
            self.priced, liveness = known
            self.learnt, self.bound_s, self._starts = Learnt.nothing(liveness), 0.0, starts

    def best_tried(self) -> Tried:
        """The best plan that fits; where none with kernels was found, without, and where none at all was, one that needs little memory.

        Raises:
            InfeasibleError: where none was found. TooSlow: where the bound is not below `limit_s`.
        """
        try:
            return self._best_of_rounds()
        except InfeasibleError:
            if not self.priced.problem.regions:
                raise
        self.regions, self.whole = frozenset(), True  # what is proven is of the groups as they are
        self.learnt = Learnt.nothing(self.learnt.liveness)
        return self._best_of_rounds()

    def lightest(self) -> Tried | None:
        """Of some plans that need little memory, whatever they take, the fastest that fits; where none does, the one that needs least. None
        where none was found."""
        proven_s = self.bound_s
        if self._starts:
            self._cut({})
        self.multipliers = quickest(self.priced.problem)
        self.bound_s = max(proven_s, self.multipliers.bound_s if self.multipliers else 0.0)  # of layers in groups: they may decide alike
        plans = light(self.trace, self.priced, self.options.solve_s, self.tried)
        found = preferred(plans, lambda tried: (Need(tried.peak_bytes, self.budget), tried.time_s))
        return self.ordered(found) if found is not None and found.peak_bytes <= self.budget else found

    def _best_of_rounds(self) -> Tried:
        best: Tried | None = None
        smallest, before, seen = 0, None, list[object]()
        for _ in range(_ROUNDS):
            found = self._answer()
            if isinstance(found, Least):
                break  # under what was learnt; what is proven to fit nowhere was not emitted
            if self.regions is None:
                self._prove(found)
            decided = self._starts, found.strategies, found.recomputed, found.kept, found.regions
            if decided == before:
                break  # the moments that were learnt change nothing
            if decided in seen:  # what the last plan taught has led back to one before: both are to hold
                self.learnt = self.learnt.lasting()
            seen.append(decided)
            tried, before = self.tried(found), decided
            if tried.peak_bytes <= self.budget:
                improved = best is None or tried.time_s < best.time_s
                best = tried if improved else best
                wasted = tried.peak_bytes < self.budget * (1 - _WASTE)
                if self.options.is_late or not (improved and wasted and self.learnt and tried.gap > self.options.gap):
                    break
            smallest = min(smallest or tried.peak_bytes, tried.peak_bytes)
            self._learn(tried)
            if self._starts and self.regions is None and not self._is_cut_anew and not self.options.is_late:
                self._cut_anew()
        if best is not None:
            return self.ordered(self._proven_to_the_end(best))
        is_last = self.regions is not None or not self.priced.problem.regions
        lightest = self.lightest() if smallest and is_last else None
        if lightest is None or lightest.peak_bytes > self.budget:
            raise refusal(self.budget, found, min(smallest, lightest.peak_bytes) if lightest else smallest)
        return lightest

    def _proven_to_the_end(self, best: Tried) -> Tried:
        """The plan with a bound that was searched for to the end, or a better one that this search finds, where the bound may be near."""
        if self.options.is_late or best.gap <= self.options.gap:
            return best
        if self._free is None or self._free[0] is not best.draft.priced or self.regions is not None:
            return best  # what would be proven is of other plans
        free = self._free[1]
        if not free.unfinished or best.time_s * (1 - self.options.gap) > free.objective_s:
            return best  # no bound of a problem is above its answer
        self.whole = True
        self.learnt = Learnt.nothing(self.learnt.liveness)
        found = self._solved(to_the_end=True, met=replace(best.draft.choices, bound_s=0.0))
        if isinstance(found, Least) or found.bound_s <= self.bound_s:
            return best
        self.bound_s, self.multipliers = found.bound_s, found.multipliers
        if found.objective_s < best.time_s:
            tried = self.tried(found)
            if tried.peak_bytes <= self.budget:
                return tried
        return self.tried(best.draft.choices)

    def ordered(self, tried: Tried) -> Tried:
        """A plan that fits, in the order in which its simulated step is the shortest, within the budget."""
        if self.options.is_over:
            return tried
        over = partial(getattr, self.options, "is_over")
        return Ordering(tried.draft.priced, self.budget, self._peaks.peak_bytes, self._peaks.by_node, self.clock, over).fastest(tried)

    def _prove(self, choices: Choices) -> None:
        """Take over what is proven of all plans, those with kernels included."""
        # what was learnt holds reserves, which hold for the plans that it was learnt from only
        self.bound_s = self.bound_s or (choices.free_bound_s if self.learnt else choices.bound_s)
        if self.bound_s >= self.limit_s:
            raise TooSlow(self.bound_s)
        self.multipliers = self.multipliers if self.learnt else choices.multipliers  # others hold under learnt moments only

    def _answer(self) -> Choices | Least:
        """The solver's answer, for layers in groups where that is better, to the problem with the moments that are known."""
        if self.whole:
            return self._solved()
        found = self._mixed()
        if isinstance(found, Apart) and found.bound_s >= self.limit_s:
            raise TooSlow(found.bound_s)
        if isinstance(found, Choices) and found.bound_s >= self.limit_s:
            return found
        if isinstance(found, Least) or (isinstance(found, Choices) and (not found.mixed or self.options.is_late)):
            return found  # it is close enough, or was searched for to the end, or to that of the time
        if self.elsewhere is not None:
            self.limit_s = min(self.limit_s, beside(self.elsewhere, self.priced.problem, found))
        if found.bound_s >= self.limit_s:
            raise TooSlow(found.bound_s)
        self.whole = True
        starts, met = starts_of(self.priced, found), found if isinstance(found, Choices) else None
        if not starts:
            return self._solved(met=met)
        before = self._known()
        self._cut(starts)
        finer = self._solved()
        if isinstance(finer, Choices) and (finer.gap <= self.options.gap if met is None else finer.objective_s < met.objective_s):
            return finer
        groups, free = self._known(), self._free
        self._know(before)
        alike = self._solved(met=met)
        if not isinstance(finer, Choices) or (isinstance(alike, Choices) and alike.objective_s <= finer.objective_s):
            return alike
        self._know(groups)
        self._free = free
        return finer

    def _cut_anew(self) -> None:
        """Put layers into the groups that the relaxation asks for now that there are moments, if these are others.

        What the groups before would give under the moments is not looked at: that takes as long as a round.
        """
        self._is_cut_anew = True
        before, reserves = self._known(), self.learnt.reserves
        self._cut({})
        self.learnt = Learnt.expected(self.learnt.liveness, reserves)
        mixed = self._mixed()
        starts = {} if isinstance(mixed, Least) else starts_of(self.priced, mixed)
        if starts and starts != before.starts:
            self._cut(starts)
            free = self._solved()
            if isinstance(free, Choices) and free.bound_s < self.limit_s:
                self._prove(free)
                self.learnt = Learnt.expected(self.learnt.liveness, reserves)
                return
        self._know(before)

    def _known(self) -> Known:
        return Known(self.priced, self.learnt, self.bound_s, self.multipliers, self._starts)

    def _know(self, known: Known) -> None:
        self.priced, self.learnt, self._starts = known.priced, known.learnt, known.starts
        self.bound_s, self.multipliers = known.bound_s, known.multipliers

    def _solved(self, *, to_the_end: bool = False, met: Choices | None = None) -> Choices | Least:
        """The solver's answer for layers as they are, or what it said of a stage that is alike; searched for until there is a plan, where
        more would take long, or `to_the_end`: until plan and bound are near, or limits are reached. `met` is an answer that is known."""
        found = self._solution(Effort.END if to_the_end else Effort.WHOLE, met)
        assert not isinstance(found, Apart), "only a search for what decides apart ends with that"
        return found

    def _mixed(self) -> Choices | Least | Apart:
        """Which equal layers would decide apart; a plan, where one is met on the way."""
        return self._solution(Effort.MIXED)

    def _solution(self, effort: Effort, met: Choices | None = None) -> Choices | Least | Apart:
        with self.clock.phase("solve"):
            problem = replace(self.priced.problem, moments=self.learnt.moments)
            found = self._solving.answer(problem, effort, learnt=bool(self.learnt), regions=self.regions, met=met)
        if isinstance(found, Choices) and not self.learnt:
            self._free = self.priced, found
        return found

    def tried(self, choices: Choices) -> Tried:
        """A plan of these choices, emitted."""
        with self.clock.phase("assemble"):
            draft = Draft.of(self.trace, self.mesh, self.priced, choices)
            plan = assemble(draft, self.mark, self.recorded, self.bound_s)
            plan = replace(plan, proof=certified(plan.proof, draft, self.multipliers))
        with self.clock.phase("emit"):
            program = emit(self.trace, plan, accumulates=self.priced.problem.accumulates, named=False)
        with self.clock.phase("memory"):
            peak = self._peaks.peak_bytes(program)
        problem = within(replace(self.priced.problem, moments=self.learnt.moments), self.regions)
        return Tried(draft, plan, program, peak + plan.prediction.beside_bytes, self.bound_s, problem)

    @property
    def _peaks(self) -> Peaks:
        return Peaks(self.options, self.schedule, self.priced.problem.num_in_flight, self.alike)

    def _learn(self, tried: Tried) -> None:
        """Moments at which the plan is over the budget, and those known before as they were in it."""
        with self.clock.phase("memory"):
            peaks = self._peaks.by_node(tried.program)
            beside = tried.plan.prediction.beside_bytes
            if self.schedule is not None:  # what the schedule holds beside the microbatch that runs
                beside = tried.peak_bytes - max(peak.peak_bytes for peak in peaks)
            self.learnt = self.learnt.further(tried.draft.choices, peaks, beside, self.budget)
