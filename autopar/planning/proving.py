"""What is proven of all pipelines of a model, over all cuts: from a problem's relaxation to the least step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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
        kinds: per stage, which kind of device it is on. crossings: per stage, the links to its neighbours.
    """

    trace: Trace
    mesh_shape: tuple[int, ...]
    placing: Placing
    num_units: int
    kinds: tuple[int, ...]
    crossings: tuple[Crossing, ...]
    num_microbatches: int
    allowed: Collection[int] | None = None


def parted(forced: Forced, seams: Seams) -> Forced:
    """What is forced on the whole, no cluster of which crosses a border."""
    return replace(forced, named=replace(forced.named, apart=forced.named.apart | seams.apart))


@dataclass(frozen=True)
class Proven:
    """The least step that multipliers prove of pipelines.

    Attributes:
        multipliers: by kind of device, at its prices.
        closer: the least step where every unit is searched for that it takes so many times what these prove (no less is proven).
    """

    least: Least
    multipliers: tuple[Multipliers, ...]
    closer: Callable[[float], Least]


def proven(priced: Sequence[Priced], forced: Forced, seams: Seams, ways: Pipelines, time_limit_s: float) -> Proven:
    """What the multipliers of the whole's relaxations prove of all these pipelines, whatever the memory.

    Each stage is bounded by itself, at the prices of its own devices and by multipliers that were found at these.

    Args:
        priced: of the whole, on each kind of device, under `parted` constraints `forced` and with what the seams expose.
    """
    partings = [_parting(each, forced, seams, ways, time_limit_s) for each in priced]
    parts = list(_by_stage(partings, ways))

    def closer(factor: float) -> Least:
        first = {kind: parts[ways.kinds.index(kind)] for kind in dict.fromkeys(ways.kinds)}
        units = {kind: UnitPrograms(partings[kind], part, time_limit_s).raised(factor).units for kind, part in first.items()}
        return least([replace(part, units=units[kind]) for part, kind in zip(parts, ways.kinds, strict=True)])

    def least(parts: Sequence[Parts]) -> Least:
        return least_step(parts, len(ways.kinds), ways.num_microbatches, ways.allowed)

    return Proven(least(parts), tuple(parting.multipliers for parting in partings), closer)


def _parting(priced: Priced, forced: Forced, seams: Seams, ways: Pipelines, time_limit_s: float) -> Parting:
    """Of the whole on one kind of device."""
    priced = replace(priced, problem=at_best(priced.problem))
    instances = Instances(ways.trace, priced, ways.placing, forced)
    multipliers = relaxed(priced.problem, time_limit_s, spread(instances))
    kernels = in_any_stage(ways.trace, priced, {i.op for i in instances.found if i.again})
    return Parting(instances, ways.num_units, ways.mesh_shape, ways.crossings[0], multipliers, seams.exposed, kernels)


def _by_stage(partings: Sequence[Parting], ways: Pipelines) -> Iterator[Parts]:
    """Per stage its units and the borders to the one behind; of the last, to one like it, which there is not."""
    known: dict[object, Parts] = {}
    for kind, behind, crossing in zip(ways.kinds, (*ways.kinds[1:], ways.kinds[-1]), ways.crossings, strict=True):
        key = kind, behind, crossing.behind
        if key not in known:
            known[key] = partings[kind].parts(partings[behind], crossing.behind)
        yield known[key]
