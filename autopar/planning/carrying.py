"""A plan's decisions on a mesh whose axes have other sizes: what they take there, and what they need."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.capture.trace import Trace
from autopar.cost.priced import Priced
from autopar.emit.choices import placeholder_keys
from autopar.errors import PlanError
from autopar.hardware import HardwareProfile
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.planning.clock import Clock
from autopar.planning.job import Job
from autopar.planning.options import PlanOptions
from autopar.planning.repricing import decisions, priced_under
from autopar.plans import Plan
from autopar.problem import Choices


@dataclass(frozen=True, slots=True)
class Carried:
    """Seconds of a step, and bytes per device."""

    step_s: float
    peak_bytes: int


def carried(plan: Plan, trace: Trace, mesh: Mesh, profile: HardwareProfile, options: PlanOptions) -> Carried:
    """A plan without stages and microbatches on a mesh of its axes with other sizes.

    Every op runs, and every value is kept, in the layouts of the plan; what is moved between them is the cheapest there. The peak is of
    the emitted program before collectives start early, which they do where memory is left.

    Raises:
        PlanError: where a decision is not one that can be taken there, or the plan has stages or several microbatches.
        ConstraintError: where a constraint that the plan records cannot hold there.
    """
    if plan.pipeline is not None:
        what = f"a plan with stages or microbatches says what it takes on meshes of its own sizes, not on {mesh}"
        raise PlanError(what, remedy="ask about the links alone, or plan for that mesh")
    priced, clock = priced_under(trace, mesh, profile, options, options.constraints, plan.starts), Clock(lambda _: None)
    job = Job(trace, mesh, lambda _: priced, options, clock, plan.fingerprint, options.to_json(profile), options.budget(profile))
    strategies, again = decisions(priced, plan)
    tried = job.tried(Choices(strategies, again, _kept(priced, plan, trace), 0.0, 0.0))
    return Carried(tried.time_s, tried.peak_bytes)


def _kept(priced: Priced, plan: Plan, trace: Trace) -> dict[int, tuple[int, ...]]:
    """By variant, what the plan keeps of it.

    Raises:
        PlanError: where it is kept in a layout that nothing makes there.
    """
    layouts: dict[tuple[str, int], tuple[Layout, ...]] = {}
    for kept in plan.kept:
        layouts |= {(kept.node.format(*at), kept.result): kept.layouts for at in kept.instances}
    keys = placeholder_keys(trace)
    keys |= {n.name: n.meta["key"] for n in trace.graph.nodes if n.op == "call_function"}
    found: dict[int, tuple[int, ...]] = {}
    for v, refs in enumerate(priced.refs):
        index = priced.problem.values[priced.problem.variants[v].value].graph.index
        name, result = refs[0]
        wanted = layouts.get((keys[name], result), ())
        if any(layout not in index for layout in wanted):
            raise PlanError(f"what the plan keeps of {keys[name]} is not made here", remedy="plan again for this model and mesh")
        if wanted:
            found[v] = tuple(index[layout] for layout in wanted)
    return found
