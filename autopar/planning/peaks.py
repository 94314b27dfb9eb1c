"""What an emitted program holds, under the schedule that it is planned for."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.planning.alike import Alike
from autopar.request import PlanOptions
from autopar.run.memory import NodePeak, PeakMemory, all_peaks
from autopar.run.orders import Action
from autopar.run.program import Program
from autopar.run.rank_memory import chunk_memory, rank_peak
from autopar.run.reordered import written
from autopar.run.returned import Returned
from autopar.run.stage_memory import StagePeak, trace_stage_peak


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a stage is planned for.

    Attributes:
        name: of the schedule. batch_bytes: of the whole batch, which is there during the whole step.
        returned: what calls of the pipeline return.
        stage, actions: its number, and what its rank does, where the rank holds other stages beside it.
    """

    name: str
    num_microbatches: int
    batch_bytes: int
    returned: Returned
    stage: int = 0
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of programs that one search emits.

    Attributes:
        schedule: None where the batch is worked on in one piece. num_in_flight: microbatches that wait for their backward.
    """

    options: PlanOptions
    schedule: Schedule | None = None
    num_in_flight: int = 1
    alike: Alike = field(default_factory=Alike)

    def peak_bytes(self, program: Program) -> int:
        """The most that the program holds at any moment of a step."""
        schedule = self.schedule
        if schedule is None:
            return self._rehearsed(program)[0].peak_bytes
        return schedule.batch_bytes + self._of_stage(schedule, written(program))

    def by_node(self, program: Program) -> tuple[NodePeak, ...]:
        """What it holds while each node runs, for one microbatch."""
        return self._rehearsed(program)[1]

    def _rehearsed(self, program: Program) -> tuple[PeakMemory, tuple[NodePeak, ...]]:
        return self.alike.rehearsed(program, lambda: all_peaks(program, batch=self.options.batch, outputs=self.options.outputs))

    def _of_stage(self, schedule: Schedule, program: Program) -> int:
        if schedule.actions:
            memory = self.alike.memory(program, lambda: chunk_memory(program, self.options.outputs))
            return rank_peak({schedule.stage: memory}, schedule.actions, schedule.num_microbatches)

        def measured() -> StagePeak:
            kind, num = schedule.name, schedule.num_microbatches
            return trace_stage_peak(program, kind, self.num_in_flight, num, self.options.outputs, schedule.returned)

        return self.alike.peak(program, self.num_in_flight, measured).peak_bytes
