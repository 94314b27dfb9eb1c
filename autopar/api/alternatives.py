"""The order in which alternatives to the first plan are searched, and where the search ends.

An alternative is a pipeline along one axis of one mesh shape, with one number of microbatches. Its
bound needs no capture: it is the compute of the trace, divided perfectly, plus the waiting of the
schedule (`autopar.cost.op_times`). Alternatives are searched in the order of their bounds. An
alternative whose bound is not below the step to beat is not searched. The result of a search raises
the bounds of other alternatives, or excludes them:

- Let t(M) be the time that one of M microbatches takes through all stages. Launches and latencies
  do not shrink with a microbatch, so M · t(M) does not fall as M grows. A bound for M microbatches
  is therefore also a bound for more microbatches. Before the first capture, the program of the
  whole batch on the mesh of a stage bounds all numbers of microbatches
  (`autopar.planner.pipeline.pipeline_bound`).
- A larger microbatch takes at least as long, if its tensors can be split over no more devices. So
  t(M) also bounds fewer microbatches that can be split over the same devices.
- The step falls with M, since stages wait less, and then rises. So larger numbers than one that is
  slower are excluded.
- Fewer microbatches are larger ones. If M microbatches do not fit, fewer do not.

The work of a search is estimated before it begins, in variables of the integer program. Estimates
count work, not seconds, so that planning is deterministic.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from autopar.core.mesh import Mesh
from autopar.core.terminal import PHASES
from autopar.core.units import microbatches, seconds, share
from autopar.errors import AutoparError, ConstraintError, CoupledError, InfeasibleError
from autopar.planner import Planned, TooSlow
from autopar.planner.clock import Progress
from autopar.request import PlanOptions

log = logging.getLogger("autopar")

# Variables of the program of a published model with equal layers on a mesh without axes, and the
# factor per axis (measured: 9,578 on one axis, 45,078 and 82,226 on two).
_VARIABLES, _PER_AXIS = 2_000, 5
# Variables whose search takes as long as the capture of a microbatch (about 5 s on one core).
CAPTURE_WORK = 40_000.0
EFFORTS = {"quick": 0.0, "normal": 100_000.0, "thorough": math.inf}
"""Work that alternatives to the first plan may take, by value of the option `effort`."""


def search_work(num_axes: int) -> float:
    """Estimate the work of a search, in variables.

    Args:
        num_axes: number of mesh axes over which ops are divided.
    """
    return float(_VARIABLES * _PER_AXIS**num_axes)


@dataclass
class WorkBudget:
    """Budget of work for alternatives to the first plan.

    Attributes:
        left: remaining work, in variables.
        is_late: whether the time limit of planning is over.
        size: variables of the first plan's program, as a multiple of the estimate.
        was_interrupted: whether the user ended the search with Ctrl-C.
        parent: the budget that contains this one; both are interrupted together.
    """

    left: float = math.inf
    is_late: Callable[[], bool] = lambda: False
    size: float = 1.0
    was_interrupted: bool = False
    parent: WorkBudget | None = None

    @staticmethod
    def of(options: PlanOptions) -> WorkBudget:
        """Return the budget that the options request."""
        return WorkBudget(EFFORTS[options.effort], lambda: options.is_late)

    def unlimited(self) -> WorkBudget:
        """Return the budget for requested searches, which only the time limit or Ctrl-C ends."""
        return WorkBudget(is_late=lambda: self.is_over, parent=self)

    @property
    def is_over(self) -> bool:
        """Whether the search ends as soon as there is a plan, regardless of the work left."""
        return self.was_interrupted or self.is_late()

    def interrupt(self) -> None:
        """End the search after Ctrl-C; a plan exists."""
        log.warning(
            "interrupted: using the best plan so far; the remaining alternatives are not tried"
        )
        self.was_interrupted = True
        if self.parent is not None:
            self.parent.was_interrupted = True

    def measure(self, num_axes: int, num_variables: int) -> None:
        """Correct the estimates using the number of variables of the first plan's program.

        Args:
            num_axes: number of axes of the mesh of the program.
            num_variables: number of variables of the program.
        """
        self.size = num_variables / search_work(num_axes)

    def take(self, work: float) -> bool:
        """Take estimated work from the budget. Return whether enough work and time were left."""
        if work * self.size > self.left or self.is_over:
            return False
        self.left -= work * self.size
        return True


@dataclass
class SearchStatus:
    """Progress of a search: the phase, the alternative being searched, and the best plan so far.

    Attributes:
        tell: function that shows a text.
        searched: the alternative being searched, and the number of waiting ones.
        best: description of the best plan so far.
    """

    tell: Progress = lambda _: None
    searched: str = ""
    best: str = ""

    def __call__(self, phase: str) -> None:
        """Report the start of a phase of planning."""
        parts = (PHASES.get(phase, phase), self.searched, self.best)
        self.tell(", ".join(filter(None, parts)))

    def begin(self, name: str, num_waiting: int) -> None:
        """Report the next search.

        Args:
            name: name of the alternative.
            num_waiting: number of searches that may follow.
        """
        self.searched = f"{name} ({num_waiting} more)" if num_waiting else name

    def add(self, found: Planned) -> None:
        """Record the best plan so far."""
        proof = found.plan.proof
        self.best = (
            f"best so far: {seconds(found.plan.prediction.step_s)} per step, gap {share(proof.gap)}"
        )


Splits = frozenset[tuple[int, int, bool]]
"""(number of a dim, number of devices that it can be split over, whether evenly)."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A pipeline that may be searched.

    Attributes:
        mesh: the whole mesh.
        axis: mesh axis of the stages.
        num: number of microbatches, M.
        waiting: the step, as a multiple of the time that the batch takes through all stages, one
            after another: (M + (P − 1) / v) / (P · M) for P devices along the axis with v stages
            each.
        bound_s: lower bound of the step.
        splits: how the tensors of a microbatch can be split over the devices of a stage; equal
            for two numbers of microbatches if the same splits are possible.
        least_batch_s: returns a lower bound of the time of the batch through all stages, for all
            numbers of microbatches; takes less work than `search`.
        search: searches for a plan whose step takes less than a given number of seconds.
    """

    mesh: Mesh
    axis: str
    num: int
    waiting: float
    bound_s: float
    splits: Splits
    least_batch_s: Callable[[], float]
    search: Callable[[float], Planned]

    @property
    def bound_work(self) -> float:
        """The estimated work of `least_batch_s`, in variables."""
        return search_work(len(self.mesh.axes) - 1)

    @property
    def search_work(self) -> float:
        """The estimated work of `search`, in variables: a capture, and the stages' programs."""
        return CAPTURE_WORK + search_work(len(self.mesh.axes) - 1)

    def differs_in_microbatches(self, other: Alternative) -> bool:
        """Whether two alternatives differ in the number of microbatches alone."""
        return (self.mesh, self.axis) == (other.mesh, other.axis)

    def raised(self, batch_s: float) -> Alternative:
        """Raise the bound, given a lower bound of the time of the batch through all stages."""
        return replace(self, bound_s=max(self.bound_s, batch_s * self.waiting))

    def raised_by(self, other: Alternative, batch_s: float) -> Alternative:
        """Raise the bound, given the bound of another alternative.

        Args:
            other: the alternative whose bound is known.
            batch_s: lower bound of its time of the batch through all stages, in seconds.
        """
        if not self.differs_in_microbatches(other):
            return self
        if self.num > other.num:
            return self.raised(batch_s)
        return self.raised(batch_s * self.num / other.num) if self.splits == other.splits else self


@dataclass
class Tries:
    """The fastest plan, and a description of what was tried.

    Attributes:
        best: the fastest accepted plan.
        summaries: one text per plan that was tried, or per group of plans that were not, with
            what is known about the step time.
    """

    best: Planned | None = None
    summaries: list[str] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        """Step time of the fastest plan in seconds; infinite if there is none."""
        return math.inf if self.best is None else self.best.plan.prediction.step_s

    def add(self, name: str, found: Planned) -> float:
        """Record a plan and return its step time in seconds."""
        step_s = found.plan.prediction.step_s
        self.summaries.append(f"{name} ({seconds(step_s)})")
        if step_s < self.best_s:
            self.best = found
        return step_s

    def add_bound(self, name: str, bound_s: float) -> None:
        """Record that the bound shows that no plan of a kind is faster than the best."""
        self.summaries.append(f"{name} (at least {seconds(bound_s)})")

    def add_refused(self, name: str) -> None:
        """Record that there is no plan of a kind."""
        self.summaries.append(f"{name} (no plan)")

    def add_untried(self, name: str, bound_s: float) -> None:
        """Record that plans of a kind were not tried."""
        self.summaries.append(f"{name} (not tried, at least {seconds(bound_s)})")


def name_of(axis: str, num: int, per_device: int = 1) -> str:
    """Return the name of a kind of plan.

    Args:
        axis: mesh axis of the stages; empty for sequential microbatches.
        num: number of microbatches; 0 for no microbatches.
        per_device: stages per device.
    """
    if not num:
        return "one microbatch"
    stages = f" in stages along {axis}" if axis else " without stages"
    return microbatches(num) + stages + (f", {per_device} per device" if per_device > 1 else "")


def _order(alternative: Alternative) -> tuple[bool, float]:
    """Sort key by bound. One microbatch comes last because all stages but one wait: it is for
    models whose samples depend on each other.
    """
    return alternative.num == 1, alternative.bound_s


class _Step(Enum):
    """Next action for an alternative: exclude it by its bound, stop for lack of work, raise its
    bound, or search it.
    """

    EXCLUDE = auto()
    LEAVE_OUT = auto()
    BOUND = auto()
    SEARCH = auto()


@dataclass
class AlternativeSearch:
    """Search of alternatives in the order of their bounds.

    Attributes:
        budget: work that all searches may take.
        limit: returns the step time that a plan has to beat, given that of the fastest plan so far
            (seconds).
        several: whether the alternatives have several mesh shapes, so that names include the shape.
        status: receives progress reports.
        coupled: the error that says why samples depend on each other, once known.
    """

    budget: WorkBudget
    limit: Callable[[float], float]
    several: bool = False
    status: SearchStatus = field(default_factory=SearchStatus)
    coupled: CoupledError | None = None
    _found_s: dict[tuple[Mesh, str], dict[int, float]] = field(default_factory=dict)
    _bounded: set[tuple[Mesh, str]] = field(default_factory=set)

    def run(
        self, alternatives: Iterable[Alternative], tries: Tries
    ) -> AutoparError | TooSlow | None:
        """Search the alternatives: within the budget once there is a plan, otherwise until there is
        one.

        Args:
            alternatives: those that may be searched.
            tries: records them.

        Returns:
            The reason why an alternative has no faster plan; None if each alternative has one.
        """
        refusal: AutoparError | TooSlow | None = None
        waiting = sorted(alternatives, key=_order)
        aside: dict[_Step, list[Alternative]] = {_Step.EXCLUDE: [], _Step.LEAVE_OUT: []}
        while waiting:
            limit_s, first = self.limit(tries.best_s), waiting[0]
            step = self._next_step(first, limit_s, tries)
            if step in aside:
                aside[step].append(waiting.pop(0))
                continue
            self.status.begin(self._name(first, first.num), len(waiting) - 1)
            try:
                if step is _Step.SEARCH:
                    waiting, error = self._search(first, limit_s, waiting[1:], tries)
                    refusal = error or refusal
                else:
                    waiting = self._bound_axis(first, waiting)
            except KeyboardInterrupt:
                if math.isinf(self.limit(tries.best_s)):
                    raise  # there is no plan
                self.budget.interrupt()
        excluded = aside[_Step.EXCLUDE]
        self._record_unsearched(excluded, tries.add_bound)
        self._record_unsearched(aside[_Step.LEAVE_OUT], tries.add_untried)
        return refusal or (TooSlow(excluded[0].bound_s) if excluded else None)

    def _next_step(self, first: Alternative, limit_s: float, tries: Tries) -> _Step:
        """Return the next action for an alternative, and take its work from the budget."""
        if first.bound_s >= limit_s:
            return _Step.EXCLUDE
        if first.num == 1 and tries.best is not None and self.coupled is None:
            return _Step.LEAVE_OUT
        is_free = tries.best is None and math.isinf(limit_s)
        is_bounded = is_free or (first.mesh, first.axis) in self._bounded
        work = first.search_work if is_bounded else first.bound_work
        if not is_free and not self.budget.take(work):
            return _Step.LEAVE_OUT
        return _Step.SEARCH if is_bounded else _Step.BOUND

    def _bound_axis(self, first: Alternative, waiting: list[Alternative]) -> list[Alternative]:
        """Raise the bounds of all alternatives along an axis without a capture."""
        self._bounded.add((first.mesh, first.axis))
        batch_s = first.least_batch_s()
        raised = [
            each.raised(batch_s) if each.differs_in_microbatches(first) else each
            for each in waiting
        ]
        return sorted(raised, key=_order)

    def _search(
        self, first: Alternative, limit_s: float, others: list[Alternative], tries: Tries
    ) -> tuple[list[Alternative], AutoparError | TooSlow | None]:
        """Search one alternative.

        Returns:
            The remaining alternatives in the order of their bounds, and the reason if there is no
            plan.
        """
        error: AutoparError | TooSlow | None = None
        name = self._name(first, first.num)
        try:
            result = first.search(limit_s)
        except TooSlow as slow:
            error, bound_s = slow, max(float(slow.args[0]), first.bound_s)
            log.info("no plan of %s is faster: at least %.4g s", name, bound_s)
            tries.add_bound(name, bound_s)
            batch_s = bound_s / first.waiting
            others = [other.raised_by(first, batch_s) for other in others]
        except (InfeasibleError, ConstraintError) as refused:
            error = refused
            log.info("no plan of %s: %s", name, refused.what)
            tries.add_refused(name)
            others = self._without_refused(first, refused, others)
        else:
            chunks = result.plan.as_pipeline.num_chunks
            step_s = tries.add(self._name(first, first.num, chunks), result)
            if result is tries.best:
                self.status.add(result)
            others = list(self._without_slower(first, step_s, others))
        return sorted(others, key=_order), error

    def _without_refused(
        self, first: Alternative, error: AutoparError, others: list[Alternative]
    ) -> list[Alternative]:
        """Exclude the alternatives that have no plan because this one has none."""
        if isinstance(error, CoupledError):
            self.coupled = error
            return [other for other in others if other.num == 1]
        if isinstance(error, InfeasibleError):
            return [
                o for o in others if not (o.differs_in_microbatches(first) and o.num < first.num)
            ]
        return others

    def _without_slower(
        self, first: Alternative, step_s: float, others: list[Alternative]
    ) -> Iterator[Alternative]:
        """Exclude numbers of microbatches larger than a slower one."""
        found_s = self._found_s.setdefault((first.mesh, first.axis), {})
        found_s[first.num] = step_s
        best = min(found_s, key=lambda num: found_s[num])
        for other in others:
            beyond = (num for num in found_s if num != best and found_s[num] > found_s[best])
            if not (
                other.differs_in_microbatches(first)
                and any(other.num < num < best or other.num > num > best for num in beyond)
            ):
                yield other

    def _record_unsearched(
        self, alternatives: Iterable[Alternative], record: Callable[[str, float], None]
    ) -> None:
        """Record the alternatives that are not searched, grouped by axis."""
        groups: dict[tuple[Mesh, str], list[Alternative]] = {}
        for alternative in alternatives:
            groups.setdefault((alternative.mesh, alternative.axis), []).append(alternative)
        for same in groups.values():
            numbers = sorted(alternative.num for alternative in same)
            name = self._name(same[0], numbers[-1])
            span = f"{numbers[0]} to " if len(numbers) > 1 else ""
            record(span + name, min(alternative.bound_s for alternative in same))

    def _name(self, alternative: Alternative, num: int, per_device: int = 1) -> str:
        of_mesh = f" of {alternative.mesh}" if self.several else ""
        return name_of(alternative.axis, num, per_device) + of_mesh
