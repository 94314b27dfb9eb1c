"""Stages that share a rank's memory.

Each is planned as if it were alone, within a budget of its own. Then their memory is simulated
together (`autopar.program.stage_memory`). If that is over the rank's budget, each is planned again
with less, in proportion to the bytes that it keeps for backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.priced import OPTIMIZERS
from autopar.errors import InfeasibleError, size_text
from autopar.planner.comm_schedule import StageSchedule
from autopar.planner.pipeline.stage_cache import Alike
from autopar.planner.search import Planned
from autopar.plans import KERNELS_BUFFERS, RESTING
from autopar.program.executor import Returned
from autopar.program.schedule import interleaved_schedule
from autopar.program.stage_memory import ChunkMemory, chunk_memory, rank_peak
from autopar.request import PlanOptions
from autopar.solve import shortage

_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes at the peak of a rank's devices, and bytes by kind."""

    peak_bytes: int
    memory_bytes: Mapping[str, int]


@dataclass
class Sharing:
    """The memory of ranks with `num_chunks` stages each, and the budgets of the stages, which go
    down round by round.

    Args:
        rank_budgets: bytes of a device, by rank. devices: the names of these, where they are not
            all alike.
    """

    num_stages: int
    num_chunks: int
    in_flight: Sequence[int]
    num_microbatches: int
    batch_bytes: int
    returned: Returned
    rank_budgets: Sequence[int]
    options: PlanOptions
    alike: Alike
    devices: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.budgets = [*self.rank_budgets] * self.num_chunks
        self.lowered: set[int] = set()  # the stages whose budgets went down last
        self._round = 0

    def schedule(self, name: str, stage: int) -> StageSchedule:
        """Return the schedule that a stage is planned for, under its name."""
        num_ranks = self.num_stages // self.num_chunks
        actions = (
            interleaved_schedule(num_ranks, self.num_chunks, self.num_microbatches)[
                stage % num_ranks
            ]
            if self.num_chunks > 1
            else ()
        )
        return StageSchedule(
            name, self.num_microbatches, self.batch_bytes, self.returned, stage, actions
        )

    def fits(self, stages: Sequence[Planned]) -> bool:
        """Check whether the stages fit on every rank; if not, lower the budgets of stages.

        Raises:
            InfeasibleError: after `_ROUNDS` rounds.
        """
        if self.num_chunks == 1:
            return True
        self.lowered.clear()
        over = [
            rank
            for rank, memory in enumerate(self.ranks(stages))
            if memory.peak_bytes > self.rank_budgets[rank]
        ]
        for rank in over:
            self._lower(rank, stages)
        self._round += 1
        return not over

    def refusal(self, stage: int, error: InfeasibleError) -> InfeasibleError:
        """Add the stage, and its devices, to the error of its search."""
        rank = stage % (self.num_stages // self.num_chunks)
        budget = self.rank_budgets[rank]
        shares = self.budgets[stage] < budget
        on = f" on {self.devices[rank]}" if self.devices else ""
        which = (
            f", whose share of the {size_text(budget)} of rank {rank} was lowered" if shares else ""
        )
        needed = 0 if shares else error.needed_bytes
        return InfeasibleError(
            f"stage {stage} of {self.num_stages}{on}{which}: {error.what}",
            remedy=error.remedy,
            needed_bytes=needed,
        )

    def ranks(self, stages: Sequence[Planned]) -> tuple[RankMemory, ...]:
        """Compute the memory of each rank."""
        num_ranks = self.num_stages // self.num_chunks
        return tuple(
            self._rank(rank, {n: stages[n] for n in range(rank, self.num_stages, num_ranks)})
            for rank in range(num_ranks)
        )

    def _rank(self, rank: int, chunks: Mapping[int, Planned]) -> RankMemory:
        if len(chunks) == 1:
            (alone,) = chunks.values()
            return RankMemory(alone.plan.prediction.peak_bytes, alone.plan.prediction.memory_bytes)
        memories = {number: self._chunk(planned) for number, planned in chunks.items()}
        actions = interleaved_schedule(
            self.num_stages // self.num_chunks, self.num_chunks, self.num_microbatches
        )[rank]
        kinds: dict[str, int] = {}
        for planned in chunks.values():
            for kind, size in planned.plan.prediction.memory_bytes.items():
                kinds[kind] = kinds.get(kind, 0) + size
        for kind, size in self._twice(chunks, memories).items():
            kinds[kind] -= size
        kinds |= _kernels_buffers(chunks) if KERNELS_BUFFERS in kinds else {}
        peak = (
            rank_peak(memories, actions, self.num_microbatches)
            + self.batch_bytes
            + kinds["optimizer"]
            + kinds.get(KERNELS_BUFFERS, 0)
        )
        static = sum(kinds.get(kind, 0) for kind in RESTING)
        kinds["transient"] = max(peak - static - max(kinds["activations"], kinds["gradients"]), 0)
        return RankMemory(peak, kinds)

    def _twice(
        self, chunks: Mapping[int, Planned], memories: Mapping[int, ChunkMemory]
    ) -> dict[str, int]:
        """Bytes that are counted more than once, of tensors that several chunks read."""
        seen: set[str] = set()
        found = {"parameters": 0, "optimizer": 0, "buffers": 0}
        state, _ = OPTIMIZERS[self.options.optimizer]
        for number, planned in chunks.items():
            program = planned.stage_program()
            for t in (*program.parameters, *program.buffers):
                if t.name in seen:
                    size = memories[number].resting[t.name]
                    found["parameters" if t in program.parameters else "buffers"] += size
                    found["optimizer"] += state * size if t.has_gradient else 0
            seen |= memories[number].resting.keys()
        return found

    def _chunk(self, planned: Planned) -> ChunkMemory:
        program = planned.stage_program()
        return self.alike.memory(program, lambda: chunk_memory(program, self.options.outputs))

    def _lower(self, rank: int, stages: Sequence[Planned]) -> None:
        numbers = range(rank, self.num_stages, self.num_stages // self.num_chunks)
        peak, budget = self.ranks(stages)[rank].peak_bytes, self.rank_budgets[rank]
        if self._round == _ROUNDS:
            which = ", ".join(map(str, numbers))
            what = (
                f"no plan was found in which stages {which} of rank {rank} fit into"
                f" {size_text(budget)} together"
            )
            raise shortage(f"{what}; the last that was tried needs {size_text(peak)}")
        predictions = {n: stages[n].plan.prediction for n in numbers}
        kept = {
            n: self.in_flight[n] * p.memory_bytes["activations"] + 1 for n, p in predictions.items()
        }
        for n, p in predictions.items():
            share = -(-(peak - budget) * kept[n] // sum(kept.values()))
            self.lowered.add(n)
            self.budgets[n] = max(min(self.budgets[n], p.peak_bytes) - share, 1)


def neediest(refused: Sequence[tuple[InfeasibleError, int]]) -> InfeasibleError:
    """Choose the error of the stage that needs the largest share of its memory: with less, some
    stage does not fit.

    Args:
        refused: with the bytes that each stage has.
    """
    most, _ = max(refused, key=lambda found: found[0].needed_bytes / found[1])
    if len(refused) == 1:
        return most
    of = " of what it has" if len({budget for _, budget in refused}) > 1 else ""
    of_all = f"{len(refused)} stages do not fit, and of them this one needs the most{of}"
    return InfeasibleError(
        f"{most.what}; {of_all}", remedy=most.remedy, needed_bytes=most.needed_bytes
    )


def _kernels_buffers(chunks: Mapping[int, Planned]) -> dict[str, int]:
    """Bytes that the kernels of a rank's stages share with their peers. Kernels that move tensors
    of one form along an axis share one buffer."""
    found: dict[object, int] = {}
    for planned in chunks.values():
        program = planned.stage_program()
        for node in (*program.forward.graph.nodes, *program.backward.graph.nodes):
            if "kernel" in node.meta:
                step = node.meta["kernel"]
                found[step.collective.kind, step.collective.axis, step.shards] = step.num_bytes
            found |= {rows: rows.num_bytes for rows in node.meta.get("routes", ())}
    return {KERNELS_BUFFERS: sum(found.values())}
