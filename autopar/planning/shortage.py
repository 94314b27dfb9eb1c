"""What is said where no plan fits: which constraints ask for more than the budget, and a plan that would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.capture.trace import Trace
from autopar.constraints import Constraint, pipeline_in
from autopar.constraints.words import in_words
from autopar.cost.moments import Liveness
from autopar.cost.priced import Priced
from autopar.errors import ConstraintError, InfeasibleError, size_text
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.planning.assembly import fingerprint
from autopar.planning.clock import Clock, Progress
from autopar.planning.conflicts import conflicting
from autopar.planning.job import Job
from autopar.planning.options import PlanOptions
from autopar.planning.repricing import priced_under
from autopar.solve import least_budget
from autopar.strategies import Starts
from autopar.version import VERSION


def told(
    error: InfeasibleError, trace: Trace, mesh: Mesh, profile: HardwareProfile, options: PlanOptions, progress: Progress
) -> InfeasibleError:
    """The refusal, with a smallest set of constraints that the budget cannot hold, and the least memory of a plan that was found.

    Both are of the batch in one piece on the whole mesh; where stages or microbatches are asked for, the refusal as it is.
    """
    if pipeline_in(options.constraints, mesh) is not None or options.num_microbatches not in (1, "auto"):
        return error
    shortage, clock = _Shortage(trace, mesh, profile, options), Clock(progress)
    with clock.phase("explain"):
        said = shortage.asking()
    smallest = shortage.smallest_bytes(clock)
    if smallest <= shortage.budget:  # none was found, or one that no search for a fast plan came upon
        return InfeasibleError(error.what + said, where=error.where, remedy=error.remedy, needed_bytes=error.needed_bytes)
    said += f"; a plan that needs {size_text(smallest)} was found"
    return InfeasibleError(error.what + said, where=error.where, remedy=error.remedy, needed_bytes=smallest)


@dataclass
class _Shortage:
    """A call that does not fit."""

    trace: Trace
    mesh: Mesh
    profile: HardwareProfile
    options: PlanOptions

    @property
    def budget(self) -> int:
        """Bytes per device."""
        return self.options.budget(self.profile)

    def asking(self) -> str:
        """Which constraints ask for more than there is; nothing where that is not proven, or where no plan at all needs less."""
        constraints = self.options.constraints
        if not constraints or self._least_bytes(constraints) <= self.budget or self._least_bytes(()) > self.budget:
            return ""

        def hold(chosen: Sequence[Constraint]) -> None:
            if self._least_bytes(chosen) > self.budget:
                raise ConstraintError("it asks for more than there is")

        found = conflicting(constraints, hold)
        rest = [c for c in constraints if c not in found]
        names, without = " and ".join(map(in_words, found)), "it" if len(found) == 1 else "them"
        least = size_text(self._least_bytes(rest))
        ask = "asks" if len(found) == 1 else "together ask"
        return f"; {names} {ask} for more than there is: without {without} at least {least} is needed"

    def _least_bytes(self, constraints: Sequence[Constraint]) -> int:
        """Any plan under these constraints needs so much."""
        priced = priced_under(self.trace, self.mesh, self.profile, self.options, constraints, {})
        problem = replace(priced.problem, moments=Liveness(self.trace, priced).certain())
        return least_budget(problem, self.options.time_limit_s, bound_only=True).bound_bytes

    def smallest_bytes(self, clock: Clock) -> int:
        """What a plan of little memory needs, emitted as it is; 0 where none was found."""

        def pricing(starts: Starts) -> Priced:
            return priced_under(self.trace, self.mesh, self.profile, self.options, self.options.constraints, starts)

        mark = fingerprint(self.trace, "", self.profile.name, self.profile.hash, VERSION)
        job = Job(self.trace, self.mesh, pricing, self.options, clock, mark, self.options.to_json(self.profile), self.budget)
        return job.smallest_bytes()
