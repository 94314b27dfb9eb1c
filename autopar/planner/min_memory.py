"""The least memory of plans: a proven bound, and emitted plans that need little.

    proven ≤ the least memory that any plan needs ≤ found

Neither depends on the budget, nor on the plans that a search within a budget found. So the plan is
found again if its size is passed as the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.capture.trace import Trace
from autopar.core.problem import Problem
from autopar.core.solution import Solution
from autopar.cost.memory import Liveness
from autopar.cost.memory_lower_bound import surely
from autopar.cost.priced import Priced
from autopar.errors import InfeasibleError, size_text
from autopar.planner.candidates import Candidate
from autopar.solve import Least, Lightest, shortage, within

T = TypeVar("T")
_WEIGHTS = (0.03, 0.003)  # of time beside memory, see `autopar.solve.min_budget`


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a plan needs on a device, and the budget of that device, which is the one that
    lacks most.

    Attributes:
        where: which devices these are, where others have other budgets.
    """

    num_bytes: int
    budget_bytes: int
    where: str = ""

    @property
    def share(self) -> float:
        """Share of the budget that is needed."""
        return self.num_bytes / self.budget_bytes

    @property
    def fits(self) -> bool:
        """Whether the budget suffices."""
        return self.num_bytes <= self.budget_bytes


def proven_bytes(trace: Trace, priced: Priced, time_limit_s: float) -> int:
    """Prove a lower bound of the bytes that any plan of a problem needs.

    Args:
        trace: of the model.
        priced: the problem; its budget plays no part.
        time_limit_s: of the solver.
    """
    return Lightest(_with_moments(trace, priced), time_limit_s).bound_bytes


def light(
    trace: Trace, priced: Priced, time_limit_s: float, emit: Callable[[Solution], Candidate]
) -> tuple[Candidate, ...]:
    """Find some plans that need little memory, without kernels.

    Args:
        trace: of the model.
        priced: the problem; its budget plays no part.
        time_limit_s: of the solver.
        emit: emits choices.
    """
    lightest = Lightest(within(_with_moments(trace, priced), frozenset()), time_limit_s)
    found: list[Solution] = []
    for weight in _WEIGHTS:
        choices = lightest.choices(weight)
        if choices is not None and choices not in found:
            found.append(choices)
    return tuple(emit(replace(choices, regions=frozenset())) for choices in found)


def prefer_fastest(plans: Sequence[T], cost: Callable[[T], tuple[Need, float]]) -> T | None:
    """Choose the fastest plan that fits; if none does, the one that needs the smallest share of its
    budget.

    Args:
        plans: may be empty; then None is returned.
        cost: memory and seconds of a plan.
    """

    def order(plan: T) -> tuple[bool, float]:
        """Sort plans that fit by time, then the others by memory."""
        need, time_s = cost(plan)
        return not need.fits, time_s if need.fits else need.share

    return min(plans, key=order, default=None)


def _with_moments(trace: Trace, priced: Priced) -> Problem:
    return replace(priced.problem, moments=surely(Liveness(trace, priced)))


def refusal(budget: int, last: Solution | Least, smallest: int) -> InfeasibleError:
    """Make the error for a budget within which no plan was found.

    Args:
        budget: bytes per device.
        last: the last answer of the solver.
        smallest: least peak of the plans that were emitted, in bytes; 0 if none was.
    """
    if smallest or isinstance(last, Solution):
        tried = f"; the smallest that was tried needs {size_text(smallest)}"
        return shortage(
            f"no plan was found that fits into {size_text(budget)} per device{tried}", smallest
        )
    needed = f"at least {size_text(last.bound_bytes)} is needed, and the transient peak beside it"
    what = f"no plan fits into {size_text(budget)} per device: {needed}"
    return shortage(what, int(last.bound_bytes))
