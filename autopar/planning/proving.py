"""What is proven of all pipelines of a model, over all cuts: from a problem's relaxation to the least step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from autopar.capture.trace import Trace
from autopar.choices import Multipliers
from autopar.cost.kernels import in_any_stage
from autopar.cost.priced import Crossing, Priced
from autopar.planning.instances import Instances
from autopar.planning.over_cuts import Least, Parts, least_step
from autopar.planning.parted import Parting
from autopar.planning.spreading import spread
from autopar.planning.unit_programs import UnitPrograms
from autopar.problem import at_best
from autopar.solve.relaxed import relaxed
from autopar.stages import Seams
from autopar.stages.placing import Placing
from autopar.strategies import Forced


@dataclass(frozen=True, slots=True)
class Pipelines:
    """All pipelines of one microbatch's trace along one axis.

    Attributes:
        placing: of a cut at all places, into `num_units`. allowed: units that may begin a stage; None for all.
        crossing: the link between stages.
    """

    trace: Trace
    mesh_shape: tuple[int, ...]
    placing: Placing
    num_units: int
    crossing: Crossing
    num_stages: int
    num_microbatches: int
    allowed: Collection[int] | None = None


def parted(forced: Forced, seams: Seams) -> Forced:
    """What is forced on the whole, no cluster of which crosses a border."""
    return replace(forced, named=replace(forced.named, apart=forced.named.apart | seams.apart))


@dataclass(frozen=True)
class Proven:
    """The least step that multipliers prove of pipelines.

    Attributes:
        closer: the least step where every unit is searched for that it takes so many times what these prove (no less is proven).
    """

    least: Least
    multipliers: Multipliers
    closer: Callable[[float], Least]


def proven(priced: Priced, forced: Forced, seams: Seams, ways: Pipelines, time_limit_s: float) -> Proven:
    """What the multipliers of the whole's relaxation prove of all these pipelines, whatever the memory.

    Args:
        priced: of the whole, under `parted` constraints `forced` and with what the seams expose.
    """
    priced = replace(priced, problem=at_best(priced.problem))
    instances = Instances(ways.trace, priced, ways.placing, forced)
    multipliers = relaxed(priced.problem, time_limit_s, spread(instances))
    kernels = in_any_stage(ways.trace, priced, ways.mesh_shape, {i.op for i in instances.found if i.again})
    parting = Parting(instances, ways.num_units, ways.mesh_shape, ways.crossing, multipliers, seams.exposed, kernels)
    parts = parting.parts()

    def closer(factor: float) -> Least:
        return least(UnitPrograms(parting, parts, time_limit_s).raised(factor))

    def least(parts: Parts) -> Least:
        return least_step(parts, ways.num_stages, ways.num_microbatches, ways.allowed)

    return Proven(least(parts), multipliers, closer)
