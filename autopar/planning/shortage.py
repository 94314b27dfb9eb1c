"""What a plan of one kind needs at least: in one piece, in microbatches, or in stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.analysis.microbatches import Microbatching
from autopar.capture.trace import Trace
from autopar.constraints import Pipelined
from autopar.cost.priced import Priced
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.planning.assembly import fingerprint
from autopar.planning.clock import Clock
from autopar.planning.job import Job
from autopar.planning.options import PlanOptions
from autopar.planning.repricing import priced_under
from autopar.planning.smallest import proven_bytes
from autopar.planning.staged import StagedSearch, staged_search
from autopar.strategies import Starts
from autopar.version import VERSION


@dataclass(frozen=True, slots=True)
class Kind:
    """Plans of one kind under some constraints.

    Attributes:
        proven_bytes: none needs less. smallest_bytes: what one that was found needs; 0 where none was.
    """

    proven_bytes: Callable[[], int]
    smallest_bytes: Callable[[], int]


def in_one_piece(trace: Trace, mesh: Mesh, profile: HardwareProfile, options: PlanOptions, clock: Clock) -> Kind:
    """Of the batch in one piece on the whole mesh.

    Raises:
        ConstraintError: where the constraints cannot hold.
    """

    def pricing(starts: Starts) -> Priced:
        return priced_under(trace, mesh, profile, options, options.constraints, starts)

    def smallest() -> int:
        mark = fingerprint(trace, "", profile.name, profile.hash, VERSION)
        job = Job(trace, mesh, pricing, options, clock, mark, options.to_json(profile), options.budget(profile))
        found = job.smallest()
        return 0 if found is None else found.peak_bytes

    return Kind(lambda: proven_bytes(trace, pricing({}), options.time_limit_s), smallest)


def in_stages(
    whole: Trace, part: Trace, how: Microbatching, mesh: Mesh, profile: HardwareProfile, options: PlanOptions, wish: Pipelined, clock: Clock
) -> Kind:
    """Of a pipeline, or of one stage that works through microbatches; arguments as of `make_staged_plan`.

    Raises:
        ConstraintError: where the constraints cannot hold.
    """

    def search() -> StagedSearch:
        return staged_search(whole, part, how, mesh, profile, options, wish, clock)

    def smallest() -> int:
        found = search().smallest()
        return 0 if found is None else found.plan.prediction.peak_bytes

    return Kind(lambda: search().proven_bytes(), smallest)
