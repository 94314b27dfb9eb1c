"""How much memory a search needs: what is proven, and what a plan that is emitted needs.

    proven ≤ the least memory that any plan needs ≤ found

Neither depends on the budget, nor on what a search within one came upon. So a plan of the size that
was found is found again when that is the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.capture.trace import Trace
from autopar.core.problem import Problem
from autopar.core.solution import Choices
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
    """Bytes of a device that a plan needs at least, or is known to need, beside those that there
    are: of the device that is shortest.

    Attributes:
        where: which devices these are, where others have other budgets.
    """

    num_bytes: int
    budget_bytes: int
    where: str = ""

    @property
    def share(self) -> float:
        """Of the budget."""
        return self.num_bytes / self.budget_bytes

    @property
    def fits(self) -> bool:
        return self.num_bytes <= self.budget_bytes


def proven_bytes(trace: Trace, priced: Priced, time_limit_s: float) -> int:
    """No plan of this problem needs less."""
    return Lightest(_with_moments(trace, priced), time_limit_s).bound_bytes


def light(
    trace: Trace, priced: Priced, time_limit_s: float, emit: Callable[[Choices], Candidate]
) -> tuple[Candidate, ...]:
    """Some plans of little memory, each of them emitted."""
    lightest = Lightest(within(_with_moments(trace, priced), frozenset()), time_limit_s)
    found: list[Choices] = []
    for weight in _WEIGHTS:
        choices = lightest.choices(weight)
        if choices is not None and choices not in found:
            found.append(choices)
    return tuple(emit(replace(choices, regions=frozenset())) for choices in found)


def prefer_fastest(plans: Sequence[T], cost: Callable[[T], tuple[Need, float]]) -> T | None:
    """The fastest that fits; where none does, the one that needs least of what there is.

    Args:
        cost: memory and seconds of a plan.
    """

    def order(plan: T) -> tuple[bool, float]:
        need, time_s = cost(plan)
        return not need.fits, time_s if need.fits else need.share

    return min(plans, key=order, default=None)


def _with_moments(trace: Trace, priced: Priced) -> Problem:
    return replace(priced.problem, moments=surely(Liveness(trace, priced)))


def refusal(budget: int, last: Choices | Least, smallest: int) -> InfeasibleError:
    """Says what is certain: the smallest peak of a plan that was emitted, or, where none was,
    what any plan needs at least."""
    if smallest or isinstance(last, Choices):
        tried = f"; the smallest that was tried needs {size_text(smallest)}"
        return shortage(
            f"no plan was found that fits into {size_text(budget)} per device{tried}", smallest
        )
    needed = f"at least {size_text(last.bound_bytes)} is needed, and the transient peak beside it"
    what = f"no plan fits into {size_text(budget)} per device: {needed}"
    return shortage(what, int(last.bound_bytes))
