"""A bound of the pipelines along one axis that needs no capture of a microbatch.

The program of the whole batch on the mesh of a stage is relaxed, without a limit of memory; a
relaxation lets equal layers decide differently, as stages may. With U its bound, M microbatches
take at least U through all stages together: compute and activations of a part of the batch take at
least their share, and gradients are reduced once a step. So a step of P equal stages with v stages
per device takes at least

    U · (M + (P − 1) / v) / (P · M)

This holds for every number of microbatches, so one small program serves all alternatives along the
axis.
"""

from __future__ import annotations

from autopar.capture.trace import Trace
from autopar.constraints import Pipelined
from autopar.core.hardware import Hardware, Mixed
from autopar.core.mesh import Mesh
from autopar.cost.price import price
from autopar.errors import ConstraintError
from autopar.request import UNLIMITED, PlanOptions
from autopar.sharding import classes_of, resolve
from autopar.solve.relaxation import relax_problem


def least_batch_s(trace: Trace, mesh: Mesh, hardware: Hardware, options: PlanOptions) -> float:
    """Bound the seconds that the whole batch takes on the mesh of a stage.

    Args:
        trace: of the whole batch.
        mesh: of a stage.
        hardware: of its devices; if stages have unequal devices, the fastest bound is taken.
        options: constraints, the optimizer and the time limit.

    Returns:
        Seconds; 0 if constraints do not hold on this mesh, which the search for the pipeline
        explains.
    """
    profiles = dict.fromkeys(hardware.profiles) if isinstance(hardware, Mixed) else (hardware,)
    constraints = [c for c in options.constraints if not isinstance(c, Pipelined)]
    try:
        forced = resolve(trace, constraints, mesh)
        classes = classes_of(trace, mesh.shape, forced)
    except ConstraintError:
        return 0.0
    bounds = []
    for profile in profiles:
        priced = price(
            trace,
            classes,
            mesh,
            profile,
            budget_bytes=UNLIMITED,
            optimizer=options.optimizer,
            forced=forced,
        )
        bounds.append(relax_problem(priced.problem, options.solve_s).bound_s)
    return min(bounds)
