"""The planner's search on a problem that a benchmark has changed."""

from __future__ import annotations

from collections.abc import Callable

from autopar.capture import Trace
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.cost.priced import Priced
from autopar.planner import PlanOptions
from autopar.planner.candidates import Candidate
from autopar.planner.clock import Clock
from autopar.planner.comm_schedule import Peaks
from autopar.planner.emitter import Emitter
from autopar.planner.plan_assembly import fingerprint
from autopar.planner.rounds import PlannerLoop
from autopar.sharding import Starts
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
    """The best plan, emitted, with its peak re-derived, as `make_plan` would find it for this
    problem; runner-ups are not sought.

    Args:
        pricing: gives the problem under the budget of the options, where layers decide in these
            groups. whole: equal layers decide alike.
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
