"""The planner's search on a problem that a benchmark has changed."""

from __future__ import annotations

from collections.abc import Callable

from autopar.capture import Trace
from autopar.cost.priced import Priced
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.planning import PlanOptions
from autopar.planning.assembly import fingerprint
from autopar.planning.clock import Clock
from autopar.planning.emitter import Emitter
from autopar.planning.job import PlannerLoop
from autopar.planning.peaks import Peaks
from autopar.planning.tried import Candidate
from autopar.strategies import Starts
from autopar.version import VERSION


def searched(
    trace: Trace,
    mesh: Mesh,
    profile: HardwareProfile,
    pricing: Callable[[Starts], Priced],
    options: PlanOptions,
    *,
    peaks: Peaks | None = None,
    whole: bool = False,
) -> Candidate:
    """The best plan, emitted, with its peak re-derived, as `make_plan` would find it for this problem; runner-ups are not sought.

    Args:
        pricing: gives the problem under the budget of the options, where layers decide in these groups. whole: equal layers decide alike.
        peaks: measures the programs, by default as the planner does.

    Raises:
        InfeasibleError: where none was found.
    """
    budget = options.budget(profile)
    mark = fingerprint(trace, "", profile, VERSION)
    options = options.of_a_trace()
    clock, recorded = Clock(lambda _: None), options.to_json(profile)
    peaks = peaks or Peaks(options)
    emitter = Emitter(trace, mesh, options, clock, mark, recorded, budget, peaks)
    return PlannerLoop(emitter, pricing, whole=whole).find_best()
