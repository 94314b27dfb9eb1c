"""The request for a pipeline, and the plans of one microbatch without stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.analysis.microbatches import Microbatching
from autopar.capture.trace import Trace
from autopar.constraints import Pipelined, check
from autopar.core.hardware import Hardware, HardwareProfile, profile_of
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.core.solution import Multipliers, Solution
from autopar.cost.priced import Crossing, Priced, output_broadcast_s
from autopar.emit import returned_of
from autopar.errors import ConstraintError
from autopar.planner.pipeline.cuts import LeastStep
from autopar.planner.pipeline.stage_units import Unit
from autopar.planner.pipeline.step_schedule import in_order
from autopar.planner.plan_assembly import fingerprint
from autopar.plans import Fingerprint
from autopar.program.executor import ReturnedOutputs
from autopar.program.schedule import num_in_flight
from autopar.request import PlanOptions
from autopar.solve import Evaluation
from autopar.stages import Cut, CutPoint
from autopar.version import VERSION


@dataclass(frozen=True)
class PipelineRequest:
    """The request for one axis, one number of microbatches and one schedule.

    Attributes:
        whole: the trace of the whole batch.
        part: the trace of one microbatch.
        microbatching: how the batch is divided into microbatches.
        mesh: the whole mesh.
        hardware: the hardware. If devices along the pipeline axis are unequal, each stage is
            planned for its devices.
        options: the options of planning.
        pipelined: the requested pipeline; its axis is ``""`` for one stage on the whole mesh.
        model_name: the model's name, for the plan's fingerprint.
    """

    whole: Trace
    part: Trace
    microbatching: Microbatching
    mesh: Mesh
    hardware: Hardware
    options: PlanOptions
    pipelined: Pipelined
    model_name: str = ""

    def resolve(self) -> PipelineRequest:
        """Check the request, and return it with the defaults filled in.

        Raises:
            ConstraintError: if a constraint does not fit this mesh, or the schedule cannot run.
        """
        options, pipelined = self.options.of_a_trace(), self.pipelined
        if pipelined.axis:
            check(pipelined, self.mesh)
        for constraint in options.constraints:  # all but the pipeline apply to the mesh of a stage
            if not isinstance(constraint, Pipelined):
                check(constraint, self.stage_mesh)
        request = replace(self, options=options)
        pipelined = in_order(
            pipelined,
            self.mesh,
            self.microbatching.num,
            waits=request.returned.waits,
            trained=bool(self.whole.differentiable),
        )
        if self.whole.loss is None and options.outputs != "full":
            message = (
                f"outputs={options.outputs!r}, but the model returns no loss in stages: each stage"
                " would return its own outputs"
            )
            raise ConstraintError(
                message, remedy='pass outputs="full": every rank then returns the full outputs'
            )
        return replace(request, pipelined=pipelined)

    @cached_property
    def returned(self) -> ReturnedOutputs:
        """The values that a call returns."""
        return returned_of(self.part, self.microbatching, self.options.outputs)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the whole batch."""
        return sum(math.prod(i.shape) * i.dtype.itemsize for i in self.whole.inputs)

    @property
    def axis(self) -> str:
        """The pipeline axis; empty for one stage on the whole mesh."""
        return self.pipelined.axis or ""

    @property
    def stage_mesh(self) -> Mesh:
        """The mesh that a stage runs on."""
        return self.mesh.without(self.axis)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline: ranks along its axis times stages per rank."""
        return self.pipelined.chunks * (
            self.mesh.shape[self.mesh.names.index(self.axis)] if self.axis else 1
        )

    def profile_of(self, stage: int) -> HardwareProfile:
        """Return the profile of a stage's devices."""
        return profile_of(self.hardware, self.axis, stage)

    @property
    def profiles(self) -> tuple[HardwareProfile, ...]:
        """The kinds of devices, in the order in which stages have them."""
        return tuple(dict.fromkeys(map(self.profile_of, range(self.num_stages))))

    @property
    def kinds(self) -> tuple[int, ...]:
        """Per stage, the index of the kind of its devices."""
        return tuple(
            self.profiles.index(self.profile_of(stage)) for stage in range(self.num_stages)
        )

    @property
    def budgets(self) -> tuple[int, ...]:
        """Bytes of a device, per index along the axis."""
        return tuple(
            self.options.budget(self.profile_of(rank))
            for rank in range(self.num_stages // self.pipelined.chunks)
        )

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the number of microbatches whose kept values it holds."""
        return tuple(
            num_in_flight(
                self.pipelined.schedule,
                self.num_stages,
                self.microbatching.num,
                self.pipelined.chunks,
            )
        )

    @property
    def output_broadcast_s(self) -> float:
        """Seconds per step for sending outputs from the stages that compute them to all others."""
        return output_broadcast_s(self.axis, self.mesh, self.hardware, self.returned.handed_bytes)

    def crossing_of(self, stage: int) -> Crossing:
        """Return the links to a stage's neighbours."""
        return Crossing.links_along(self.axis, self.mesh, self.hardware, stage)

    def cuts(self, points: Sequence[CutPoint]) -> tuple[int, ...]:
        """Look up the requested cuts, as indices of units.

        Raises:
            ConstraintError: if the model has no such cuts, or their number is wrong.
        """
        modules = {point.module: index + 1 for index, point in enumerate(points)}
        cut_names = self.pipelined.cuts or ()
        unknown = [name for name in cut_names if name not in modules]
        if unknown or len(cut_names) != self.num_stages - 1:
            wrong = (
                f": no cut at {unknown[0]!r}"
                if unknown
                else f" has {len(cut_names)} cuts for {self.num_stages} stages"
            )
            raise ConstraintError(
                f"{self.pipelined}{wrong}", remedy=f"the model can be cut at {', '.join(modules)}"
            )
        return tuple(sorted(modules[name] for name in cut_names))

    def mark(self, trace: Trace, hardware: Hardware) -> Fingerprint:
        """Make the fingerprint of a plan for the trace of the whole batch, or of a stage."""
        return fingerprint(trace, self.model_name, hardware, VERSION)


@dataclass(frozen=True, slots=True)
class OnKind:
    """The plan of one microbatch without stages and without a memory limit, on one kind of device.

    Attributes:
        multipliers: the multipliers of the bound over all cuts; None if there are no cuts.
    """

    priced: Priced
    choices: Solution
    evaluation: Evaluation
    units: tuple[Unit, ...]
    multipliers: Multipliers | None = None


@dataclass(frozen=True, slots=True)
class UncutSolution:
    """The plans of one microbatch without stages and without a memory limit.

    Attributes:
        on: the plans by kind of device.
        kinds: per stage, the index of its kind of device.
        points: the cut points.
        least: the proven minimum step over all cuts.
        closer: as in `autopar.planner.pipeline.pipeline_bound.ProvenPipelines`; None if there are
            no cuts.
    """

    on: tuple[OnKind, ...]
    kinds: tuple[int, ...]
    points: tuple[CutPoint, ...]
    least: LeastStep
    closer: Callable[[float], LeastStep] | None = None

    @property
    def units(self) -> tuple[tuple[Unit, ...], ...]:
        """Per stage, the costs of all units on its devices."""
        return tuple(self.on[kind].units for kind in self.kinds)


def crossing_layouts(whole: UncutSolution, part: Trace, cut: Cut) -> Mapping[str, Layout]:
    """Choose the layout of each crossing value: the layout with the fewest bytes among those that
    the plan of the whole model uses, on the devices of the sending stage.

    Args:
        whole: the plans without stages.
        part: the trace of these plans.
        cut: the stages of the trace, and the values that cross between them.

    Returns:
        Key of the value → layout, without values inside a cluster of the whole model.
    """
    keys = {n.name: n.meta["key"] for n in part.graph.nodes if n.op == "call_function"}
    variants = [
        {name: v for v, refs in enumerate(on.priced.refs) for name, _ in refs} for on in whole.on
    ]
    layouts: dict[str, Layout] = {}
    for boundary, kind in zip(cut.boundaries, whole.kinds, strict=False):
        on = whole.on[kind]
        for name in boundary.values:
            v = variants[kind].get(name)
            if v is None:  # inside a cluster of the whole model
                continue
            graph = on.priced.problem.values[on.priced.problem.variants[v].value].graph
            moves = on.evaluation.forward[v]
            plain = [
                n
                for n in (*moves.sources, *moves.read_layouts)
                if not graph.layouts[n].has_partial and not graph.layouts[n].special
            ]
            if plain:
                layouts[keys[name]] = graph.layouts[min(plain, key=lambda n: graph.bytes[n])]
    return layouts


def check_order(whole: Trace, mesh: Mesh, num: int, pipelined: Pipelined) -> None:
    """Check that a schedule can run a number of microbatches, given only the trace of the batch.

    Args:
        whole: the trace of the batch.
        mesh: the mesh of the plan.
        num: microbatches per step.
        pipelined: the requested pipeline.

    Raises:
        ConstraintError: if the schedule cannot run them.
    """
    waits = not any(o.is_loss for o in whole.differentiable)
    in_order(pipelined, mesh, num, waits=waits, trained=bool(whole.differentiable))
