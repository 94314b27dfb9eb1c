"""The planner's search on a problem that a benchmark has modified."""

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
    """Return the best plan, emitted and with its derived peak, as `make_plan` would find it for
    this problem. Other good plans are not searched for.

    Args:
        trace: the trace.
        mesh: its mesh.
        profile: the hardware.
        pricing: groups of layers with separate decisions → the problem, under the budget of the
            options.
        options: the options of planning.
        peaks: measures the programs; by default as the planner does.
        whole: whether equal layers share decisions.

    Raises:
        InfeasibleError: if there is no plan.
    """
    budget = options.budget(profile)
    mark = fingerprint(trace, "", profile, VERSION)
    options = options.of_a_trace()
    clock, recorded = Clock(lambda _: None), options.to_json(profile)
    peaks = peaks or Peaks(options)
    emitter = Emitter(trace, mesh, options, clock, mark, recorded, budget, peaks)
    return PlannerLoop(emitter, pricing, never_regroups=whole).find_best()
