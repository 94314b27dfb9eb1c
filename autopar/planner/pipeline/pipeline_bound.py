"""The lower bound of all pipelines of a model over all cuts, from the relaxation of a problem to
the minimum step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.capture.trace import Trace
from autopar.constraints import Pipelined
from autopar.core.hardware import Hardware, Mixed
from autopar.core.mesh import Mesh
from autopar.core.problem import Op, Use, Value, Variant, at_best
from autopar.core.solution import Multipliers
from autopar.cost.kernel_offers import in_any_stage
from autopar.cost.price import price
from autopar.cost.priced import Crossing, Priced
from autopar.errors import ConstraintError
from autopar.planner.pipeline.cuts import LeastStep, Parts, least_step
from autopar.planner.pipeline.lagrangian import UnitLagrangian
from autopar.planner.pipeline.unfold import Instance, Instances
from autopar.request import UNLIMITED, PlanOptions
from autopar.sharding import Forced, Ref, classes_of, resolve
from autopar.solve.relaxation import PricedPart, Spread, least_of, relax_problem
from autopar.stages import Seams
from autopar.stages.placing import Placing

# --------------------------------------------------------------------------------------------------
# Lower bounds of units that are tighter than the sum over their ops
# (`autopar.planner.pipeline.lagrangian`): each unit is solved as a separate integer program.
#
# The rows of tensors that only one unit has remain constraints of the unit's program. The rows of
# all other tensors are relaxed with the same multipliers, whatever these are. The minimum of a
# unit's program, plus the relaxed rows, is at least the sum of the least reduced costs of its ops,
# and at most the unit's part of any plan: with fewer relaxed rows the bound can only increase
# (Geoffrion, Lagrangean relaxation, 1974: the bound is between that of the relaxation and that of
# the integer program). The rows of tensors that may cross stay relaxed. So do those of tensors for
# which kernels are offered, since rows (12) to (18) are not in the units' programs.

_RELAXATIONS = 150  # solved relaxations per unit
_MOST = 450  # solved relaxations in total; the bounds of the remaining units are not raised
_MORE = 1.3  # factor on the requested increase, since small units and borders do not increase
_MIN_SHARE = 1e-3  # equal units that together take a smaller share of all units are not raised


@dataclass
class UnitPrograms:
    """The integer programs of units, given the bounds of their parts."""

    parting: UnitLagrangian
    parts: Parts
    time_limit_s: float
    _members: list[list[Instance]] = field(init=False)
    _inside: set[Ref] = field(init=False)

    def __post_init__(self) -> None:
        self._members = [[] for _ in self.parts.units]
        for instance in self.parting.instances.instances:
            self._members[instance.unit].append(instance)
        self._inside = self._tensors_of_one_unit()

    def raise_units(self, factor: float) -> Parts:
        """Raise the bounds of units, the heaviest first.

        Args:
            factor: requested sum of all bounds, relative to the present one.

        Returns:
            The parts with the proven bounds of units.
        """
        factor = 1.0 + _MORE * (factor - 1.0)
        units_by_kind: dict[object, list[int]] = {}
        for unit, members in enumerate(self._members):
            units_by_kind.setdefault(self._kind(members), []).append(unit)
        units, relaxations_left = list(self.parts.units), _MOST
        heavy = sorted(
            units_by_kind.values(), key=lambda same: (-len(same) * units[same[0]], same[0])
        )
        for same in heavy:
            known_s = units[same[0]]
            if relaxations_left <= 0 or len(same) * known_s < _MIN_SHARE * sum(self.parts.units):
                break
            part, beside_s = self._part(self._members[same[0]])
            least_s, num = least_of(
                part,
                known_s * factor - beside_s,
                min(_RELAXATIONS, relaxations_left),
                self.time_limit_s,
            )
            relaxations_left -= num
            for unit in same:
                units[unit] = max(known_s, least_s + beside_s)
        return replace(self.parts, units=tuple(units))

    def _tensors_of_one_unit(self) -> set[Ref]:
        """Find the tensors that only one unit makes and reads, and whose prices are the same in the
        whole model and in any stage."""
        parting, instances = self.parting, self.parting.instances
        with_kernels = {v for v, _ in parting.kernels}
        several = {
            ref
            for i in instances.instances
            if i.alone
            for ref in (*i.results, *(ref for _, ref in i.operands))
        }
        several |= instances.hidden | instances.everywhere
        refs = set[Ref]()
        for instance in instances.instances:
            if any(name in parting.exposed for name, _ in instance.results):
                continue  # backward of a stage that ends here may not recompute it
            for ref in instance.results:
                v = instances.variant.get(ref)
                if (
                    v is None
                    or v in with_kernels
                    or ref in several
                    or parting.worths.narrower(v, False)
                ):
                    continue
                if all(read.unit == instance.unit for read in instances.reads.get(ref, ())):
                    refs.add(ref)
        return refs

    def _kind(self, members: Sequence[Instance]) -> object:
        """Return a key of a unit's program. Units with equal keys have equal programs."""
        place = {
            ref: (n, r)
            for n, i in enumerate(members)
            for r, ref in enumerate(i.results)
            if ref in self._inside
        }
        return tuple(
            (
                self.parting.kind(i),
                i.alone,
                tuple(place.get(ref) for _, ref in i.operands),
                tuple(ref in place for ref in i.results),
            )
            for i in members
        )

    def _part(self, members: Sequence[Instance]) -> tuple[PricedPart, float]:
        """Build a unit's program. Return it with the seconds of the unit outside of it."""
        parting, problem = self.parting, self.parting.problem
        mine = [i for i in members if not i.alone]
        beside_s = sum(parting.least(i) for i in members if i.alone)
        beside_s += sum(
            parting.worths.of(ref).loss_s
            for i in members
            for ref in i.results
            if self._is_priced(ref)
        )
        ops: list[Op] = []
        further = []
        uses: dict[Ref, list[Use]] = {}
        for n, instance in enumerate(mine):
            op = problem.ops[instance.op]
            times = np.array([s.time_s for s in op.strategies])
            first, again = parting.reduced_costs(
                instance, parting.readers_of(instance), self._inside
            )
            ops.append(replace(op, count=1))
            further.append((first - times, again - times))
            for operand, ref in instance.operands:
                if ref in self._inside:
                    use = problem.variants[parting.instances.variant[ref]].uses[
                        parting.instances.use(instance.op, operand, ref)
                    ]
                    uses.setdefault(ref, []).append(replace(use, op=n))
        values: list[Value] = []
        variants: list[Variant] = []
        for n, instance in enumerate(mine):
            for ref in instance.results:
                if ref in uses:
                    worth = parting.worths.of(ref)
                    versions = frozenset(np.flatnonzero(worth.versions).tolist())
                    values.append(
                        replace(parting.worths.value(ref), op=n, away_s=(), keepable=versions)
                    )
                    variants.append(
                        Variant(
                            len(values) - 1,
                            1,
                            tuple(sorted(uses[ref], key=lambda use: (use.op, use.operand))),
                        )
                    )
        unit_problem = replace(
            problem,
            ops=tuple(ops),
            values=tuple(values),
            variants=tuple(variants),
            moments=(),
            kernels={},
            routes={},
            regions=(),
        )
        return PricedPart(
            unit_problem, frozenset(n for n, i in enumerate(mine) if i.recomputable), tuple(further)
        ), beside_s

    def _is_priced(self, ref: Ref) -> bool:
        return ref in self.parting.instances.variant and ref not in self._inside


# --------------------------------------------------------------------------------------------------
# Groups of a folded problem's instances whose neighbours are alike, for
# `autopar.solve.relaxation`.


def spread(instances: Instances) -> Spread:
    """Group the instances of each op by the variants of their tensors."""
    problem = instances.priced.problem
    groups: list[dict[object, int]] = [{} for _ in problem.ops]
    times: list[list[float]] = [[] for _ in problem.ops]
    group_counts: list[Counter[int]] = [Counter() for _ in problem.variants]
    read: list[list[Counter[int]]] = [[Counter() for _ in v.uses] for v in problem.variants]
    for instance in instances.instances:
        mine = groups[instance.op]
        group = mine.setdefault(_key(instances, instance), len(mine))
        times[instance.op] += [0.0] * (group + 1 - len(times[instance.op]))
        times[instance.op][group] += instance.share
        for ref in instance.results:
            if ref in instances.variant:
                group_counts[instances.variant[ref]][group] += 1
        for operand, ref in instance.operands:
            read[instances.variant[ref]][instances.use(instance.op, operand, ref)][group] += 1
    group_times = tuple(tuple(each) or (0.0,) for each in times)
    separate_ops = {
        instances.variant[ref]
        for ref in instances.hidden | instances.shared_tensors()
        if ref in instances.variant
    }
    return Spread(
        group_times,
        tuple(map(_shares, group_counts)),
        tuple(tuple(map(_shares, each)) for each in read),
        frozenset(separate_ops),
    )


def _key(instances: Instances, instance: Instance) -> object:
    operands = tuple((operand, instances.variant[ref]) for operand, ref in instance.operands)
    return (
        operands,
        tuple(instances.variant.get(ref, -1) for ref in instance.results),
        instance.unit if instance.alone else -1,
    )


def _shares(counts: Counter[int]) -> Mapping[int, float]:
    total = sum(counts.values())
    return {group: num / total for group, num in sorted(counts.items())}


@dataclass(frozen=True, slots=True)
class Pipelines:
    """All pipelines of one microbatch's trace along one axis.

    Attributes:
        trace: the trace of one microbatch.
        mesh_shape: shape of the mesh of a stage.
        placing: the placing of all nodes into units.
        num_units: number of units.
        kinds: per stage, the index of its kind of device.
        crossings: per stage, the links to its neighbours.
        num_microbatches: microbatches per step.
        allowed: units that may begin a stage; None for all.
    """

    trace: Trace
    mesh_shape: tuple[int, ...]
    placing: Placing
    num_units: int
    kinds: tuple[int, ...]
    crossings: tuple[Crossing, ...]
    num_microbatches: int
    allowed: Collection[int] | None = None


def part_constraints(forced: Forced, seams: Seams) -> Forced:
    """Add the restriction that no cluster crosses a border to the constraints."""
    return replace(
        forced, named=replace(forced.named, separate=forced.named.separate | seams.readers)
    )


@dataclass(frozen=True)
class ProvenPipelines:
    """The lower bound that multipliers prove for all pipelines.

    Attributes:
        least: the minimum step, given the bounds of parts.
        multipliers: the multipliers by kind of device, at its prices.
        closer: raises the bounds of units by a factor, and returns the minimum step then (never
            less than `least`).
    """

    least: LeastStep
    multipliers: tuple[Multipliers, ...]
    closer: Callable[[float], LeastStep]


def prove_bound(
    priced: Sequence[Priced], forced: Forced, seams: Seams, ways: Pipelines, time_limit_s: float
) -> ProvenPipelines:
    """Prove a lower bound of all pipelines without a memory limit, by the multipliers of the
    relaxations of the whole model.

    Each stage has a separate bound, with the prices and multipliers of its own devices.

    Args:
        priced: the problem of the whole model on each kind of device, under the constraints
            `forced` and with the exposed nodes of the seams.
        forced: constraints, as from `part_constraints`.
        seams: the seams of all cut points.
        ways: the pipelines.
        time_limit_s: time limit of each solve, in seconds.
    """
    partings = [_relax_parts(each, forced, seams, ways, time_limit_s) for each in priced]
    parts = list(_by_stage(partings, ways))

    def closer(factor: float) -> LeastStep:
        """Return the minimum step after raising the bounds of units by a factor."""
        first = {kind: parts[ways.kinds.index(kind)] for kind in dict.fromkeys(ways.kinds)}
        units = {
            kind: UnitPrograms(partings[kind], part, time_limit_s).raise_units(factor).units
            for kind, part in first.items()
        }
        return least(
            [replace(part, units=units[kind]) for part, kind in zip(parts, ways.kinds, strict=True)]
        )

    def least(parts: Sequence[Parts]) -> LeastStep:
        """Return the minimum step over all cuts, given the parts of each stage."""
        return least_step(parts, len(ways.kinds), ways.num_microbatches, ways.allowed)

    return ProvenPipelines(least(parts), tuple(parting.multipliers for parting in partings), closer)


def _relax_parts(
    priced: Priced, forced: Forced, seams: Seams, ways: Pipelines, time_limit_s: float
) -> UnitLagrangian:
    """Relax the problem of the whole model on one kind of device, and divide it into parts."""
    priced = replace(priced, problem=at_best(priced.problem))
    instances = Instances(ways.trace, priced, ways.placing, forced)
    multipliers = relax_problem(priced.problem, time_limit_s, spread(instances))
    kernels = in_any_stage(
        ways.trace, priced, {i.op for i in instances.instances if i.recomputable}
    )
    return UnitLagrangian(
        instances,
        ways.num_units,
        ways.mesh_shape,
        ways.crossings[0],
        multipliers,
        seams.exposed,
        kernels,
    )


def _by_stage(partings: Sequence[UnitLagrangian], ways: Pipelines) -> Iterator[Parts]:
    """Generate the units of each stage and the borders to the next stage. The last stage gets
    borders to an equal stage, which are not used."""
    known: dict[object, Parts] = {}
    for kind, behind, crossing in zip(
        ways.kinds, (*ways.kinds[1:], ways.kinds[-1]), ways.crossings, strict=True
    ):
        key = kind, behind, crossing.behind
        if key not in known:
            known[key] = partings[kind].parts(partings[behind], crossing.behind)
        yield known[key]


# --------------------------------------------------------------------------------------------------
# A lower bound of the pipelines along one axis that needs no capture of a microbatch.
#
# The program of the whole batch on the mesh of a stage is relaxed, without a memory limit. The
# relaxation lets equal layers decide differently, as stages may. Let U be its bound. M microbatches
# take at least U through all stages together: compute and activations of a microbatch take at
# least their share, and gradients are reduced once per step. A step of P equal stages with v stages
# per device takes at least
#
#     U · (M + (P − 1) / v) / (P · M)
#
# This holds for every number of microbatches, so one small program bounds all alternatives along
# the axis.


def least_batch_s(trace: Trace, mesh: Mesh, hardware: Hardware, options: PlanOptions) -> float:
    """Return a lower bound of the seconds that the whole batch takes on the mesh of a stage.

    Args:
        trace: the trace of the whole batch.
        mesh: the mesh of a stage.
        hardware: its devices. If stages have unequal devices, the least of their bounds is used.
        options: constraints, the optimizer and the time limit.

    Returns:
        Seconds; 0 if the constraints conflict on this mesh, which the search for the pipeline
        reports.
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
