"""What a plan of one kind needs at least: in one piece, in microbatches, or in stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.analysis.microbatches import Microbatching
from autopar.capture.trace import Trace
from autopar.constraints import Pipelined
from autopar.hardware import Hardware, slowest
from autopar.mesh import Mesh
from autopar.planning import Planned
from autopar.planning.clock import Clock
from autopar.planning.search import finished, prepare_search
from autopar.planning.smallest import Need, proven_bytes
from autopar.planning.staged import staged_search
from autopar.request import PlanOptions


@dataclass(frozen=True, slots=True)
class Kind:
    """Plans of one kind under some constraints.

    Attributes:
        proven: none needs less. lightest: of some plans of little memory the fastest that fits, else the one that needs least; None
            where none was found.
    """

    proven: Need
    lightest: Callable[[], Planned | None]


def in_one_piece(trace: Trace, mesh: Mesh, hardware: Hardware, options: PlanOptions, model_name: str, clock: Clock) -> Kind:
    """Of the batch in one piece on the whole mesh.

    Raises:
        ConstraintError: where the constraints cannot hold.
    """
    search = prepare_search(trace, mesh, hardware, options, clock, model_name=model_name)

    def lightest() -> Planned | None:
        found = search.find_lightest()
        return None if found is None else finished(found, clock, options)

    proven = proven_bytes(trace, search.ungrouped.priced, options.solve_s)
    return Kind(Need(proven, options.budget(slowest(hardware))), lightest)


def in_stages(
    whole: Trace, part: Trace, how: Microbatching, mesh: Mesh, hardware: Hardware, options: PlanOptions, wish: Pipelined,
    model_name: str, clock: Clock,
) -> Kind:  # fmt: skip
    """Of a pipeline, or of one stage that works through microbatches; arguments as of `make_staged_plan`.

    Raises:
        ConstraintError: where the constraints cannot hold.
    """
    search = staged_search(whole, part, how, mesh, hardware, options, wish, clock, model_name=model_name)
    return Kind(search.proven(), search.lightest)
