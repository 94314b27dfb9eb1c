"""The planner's search on a problem that a benchmark has changed."""

from __future__ import annotations

from autopar.capture import Trace
from autopar.cost.moments import Liveness
from autopar.cost.priced import Priced
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.planning import PlanOptions
from autopar.planning.assembly import fingerprint
from autopar.planning.search import Clock, Job, Tried
from autopar.version import VERSION


def searched(trace: Trace, mesh: Mesh, profile: HardwareProfile, priced: Priced, options: PlanOptions, job: type[Job] = Job) -> Tried:
    """The best plan, emitted, with its peak re-derived, as `make_plan` would find it for this problem; runner-ups are not sought.

    Args:
        priced: under the budget of the options.

    Raises:
        InfeasibleError: where none was found.
    """
    budget = options.budget(profile)
    assert priced.problem.budget_bytes == budget
    mark = fingerprint(trace, "", profile.name, profile.hash, VERSION)
    clock, recorded = Clock(lambda _: None), options.to_json(profile)
    return job(trace, mesh, priced, Liveness(trace, priced), options, clock, mark, recorded, budget).best_tried()
