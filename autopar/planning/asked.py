"""What a pipeline is planned for, and what a plan without stages says of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.analysis.microbatches import Microbatching
from autopar.capture.trace import Trace
from autopar.constraints import Pipelined
from autopar.cost.priced import Crossing, Priced
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.planning.assembly import fingerprint
from autopar.planning.options import PlanOptions
from autopar.planning.over_cuts import Least
from autopar.planning.units import Unit
from autopar.plans import Fingerprint
from autopar.problem import Choices, Multipliers
from autopar.solve import Evaluation
from autopar.stages import CutPoint
from autopar.version import VERSION


@dataclass(frozen=True, slots=True)
class Asked:
    """One axis, one number of microbatches, one schedule.

    Attributes:
        part: the trace of one microbatch. how: how microbatches make the batch. batch_bytes: of the whole batch.
        wish: the pipeline. model_fingerprint: of the whole batch's trace.
    """

    part: Trace
    how: Microbatching
    batch_bytes: int
    mesh: Mesh
    profile: HardwareProfile
    options: PlanOptions
    wish: Pipelined
    model_name: str
    model_fingerprint: str

    @property
    def axis(self) -> str:
        """Along which stages lie; empty for one stage on the whole mesh."""
        return self.wish.axis or ""

    @property
    def left(self) -> Mesh:
        """What a stage runs on."""
        return self.mesh.without(self.axis) if self.axis else self.mesh

    @property
    def num_stages(self) -> int:
        return self.wish.chunks * (self.mesh.shape[self.mesh.names.index(self.axis)] if self.axis else 1)

    @property
    def crossing(self) -> Crossing:
        """Over the link between neighbours."""
        return Crossing.along(self.axis, self.mesh, self.profile)

    def mark(self, model: str) -> Fingerprint:
        """Of a plan for a trace of this fingerprint."""
        return replace(fingerprint(self.part, self.model_name, self.profile.name, self.profile.hash, VERSION), model=model)


@dataclass(frozen=True, slots=True)
class Whole:
    """The plan of one microbatch without stages and without a limit of memory."""

    priced: Priced
    choices: Choices
    evaluation: Evaluation
    points: tuple[CutPoint, ...]
    units: tuple[Unit, ...]
    least: Least
    multipliers: Multipliers | None
