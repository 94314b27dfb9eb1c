"""Joins the plans of stages into one plan, with its cuts, crossing values, step, peak and the bound
over all cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.capture.trace import Trace
from autopar.constraints import Pipelined
from autopar.core.layout_graph import local_bytes
from autopar.core.schedules import GPIPE, INTERLEAVED
from autopar.cost.priced import OPTIMIZERS
from autopar.emit import emit
from autopar.errors import InfeasibleError, size_text
from autopar.planner.candidates import PlanDraft
from autopar.planner.clock import Clock
from autopar.planner.comm_schedule import StageSchedule
from autopar.planner.pipeline.pipeline_request import OnKind, PipelineRequest, UncutSolution
from autopar.planner.pipeline.stage_cache import StageCache
from autopar.planner.pipeline.step_schedule import simulated_step_of, slowest_rank, step_of
from autopar.planner.plan_assembly import SHARES, with_multipliers
from autopar.planner.plan_collectives import of_kernels
from autopar.planner.search import Planned
from autopar.plans import (
    KERNELS_BUFFERS,
    RESTING,
    Crossed,
    OnProfile,
    Pipeline,
    Plan,
    Prediction,
    Proof,
)
from autopar.program.executor import ReturnedOutputs
from autopar.program.schedule import interleaved_schedule
from autopar.program.stage_memory import ChunkMemory, chunk_memory, rank_peak
from autopar.request import PlanOptions
from autopar.solve import shortage
from autopar.stages import Cut

# --------------------------------------------------------------------------------------------------
# Stages that share a rank's memory.
#
# Each stage is planned alone within its own budget. Then the memory of the stages is simulated
# together (`autopar.program.stage_memory`). If the peak exceeds the rank's budget, the budgets of
# the stages are reduced in proportion to the bytes that they keep for backward, and the stages are
# planned again.

_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The peak of a rank's devices in bytes, and bytes by kind."""

    peak_bytes: int
    memory_bytes: Mapping[str, int]


@dataclass
class RankBudgets:
    """The memory of ranks with `num_chunks` stages each, and the budgets of the stages, which are
    reduced round by round.

    Args:
        rank_budgets: bytes of a device, by rank.
        devices: names of the devices by rank, if they are unequal.
    """

    num_stages: int
    num_chunks: int
    in_flight: Sequence[int]
    num_microbatches: int
    batch_bytes: int
    returned: ReturnedOutputs
    rank_budgets: Sequence[int]
    options: PlanOptions
    stage_cache: StageCache
    devices: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.budgets = [*self.rank_budgets] * self.num_chunks
        self.lowered: set[int] = set()  # the stages whose budgets the last round reduced
        self._round = 0

    def schedule(self, name: str, stage: int) -> StageSchedule:
        """Return the schedule of a stage.

        Args:
            name: the name of the schedule.
            stage: index of the stage.
        """
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
        """Check whether the stages fit on every rank; if not, reduce the budgets of stages.

        Raises:
            InfeasibleError: if the stages do not fit after `_ROUNDS` rounds.
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
        """Add the stage and its devices to the error of its search."""
        rank = stage % (self.num_stages // self.num_chunks)
        budget = self.rank_budgets[rank]
        shares = self.budgets[stage] < budget
        on = f" on {self.devices[rank]}" if self.devices else ""
        on_rank = (
            f", whose share of the {size_text(budget)} of rank {rank} was reduced" if shares else ""
        )
        needed = 0 if shares else error.needed_bytes
        return InfeasibleError(
            f"stage {stage} of {self.num_stages}{on}{on_rank}: {error.what}",
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
        """Return the bytes by kind that are counted more than once, since several chunks read the
        same tensors."""
        names: set[str] = set()
        repeated_bytes = {"parameters": 0, "optimizer": 0, "buffers": 0}
        state, _ = OPTIMIZERS[self.options.optimizer]
        for number, planned in chunks.items():
            program = planned.stage_program()
            for t in (*program.parameters, *program.buffers):
                if t.name in names:
                    size = memories[number].resting[t.name]
                    repeated_bytes["parameters" if t in program.parameters else "buffers"] += size
                    repeated_bytes["optimizer"] += state * size if t.has_gradient else 0
            names |= memories[number].resting.keys()
        return repeated_bytes

    def _chunk(self, planned: Planned) -> ChunkMemory:
        program = planned.stage_program()
        return self.stage_cache.memory(program, lambda: chunk_memory(program, self.options.outputs))

    def _lower(self, rank: int, stages: Sequence[Planned]) -> None:
        numbers = range(rank, self.num_stages, self.num_stages // self.num_chunks)
        peak, budget = self.ranks(stages)[rank].peak_bytes, self.rank_budgets[rank]
        if self._round == _ROUNDS:
            stages_text = ", ".join(map(str, numbers))
            message = (
                f"no plan found in which stages {stages_text} of rank {rank} together fit into"
                f" {size_text(budget)}"
            )
            raise shortage(f"{message}; the last plan tried needs {size_text(peak)}")
        predictions = {n: stages[n].plan.prediction for n in numbers}
        activation_bytes = {
            n: self.in_flight[n] * p.memory_bytes["activations"] + 1 for n, p in predictions.items()
        }
        for n, p in predictions.items():
            share = -(-(peak - budget) * activation_bytes[n] // sum(activation_bytes.values()))
            self.lowered.add(n)
            self.budgets[n] = max(min(self.budgets[n], p.peak_bytes) - share, 1)


def neediest(refused: Sequence[tuple[InfeasibleError, int]]) -> InfeasibleError:
    """Choose the error of the stage that needs the largest share of its memory.

    Args:
        refused: errors of stages, with the bytes that each stage has.
    """
    most, _ = max(refused, key=lambda found: found[0].needed_bytes / found[1])
    if len(refused) == 1:
        return most
    of = " of what it has" if len({budget for _, budget in refused}) > 1 else ""
    of_all = f"{len(refused)} stages do not fit; this one needs the most{of}"
    return InfeasibleError(
        f"{most.what}; {of_all}", remedy=most.remedy, needed_bytes=most.needed_bytes
    )


def _kernels_buffers(chunks: Mapping[int, Planned]) -> dict[str, int]:
    """Return the bytes that the kernels of a rank's stages share with their peers. Kernels that
    move tensors of equal form along an axis share one buffer."""
    buffer_bytes: dict[object, int] = {}
    for planned in chunks.values():
        program = planned.stage_program()
        for node in (*program.forward.graph.nodes, *program.backward.graph.nodes):
            if "kernel" in node.meta:
                step = node.meta["kernel"]
                buffer_bytes[step.collective.kind, step.collective.axis, step.shards] = (
                    step.num_bytes
                )
            buffer_bytes |= {rows: rows.num_bytes for rows in node.meta.get("routes", ())}
    return {KERNELS_BUFFERS: sum(buffer_bytes.values())}


# --------------------------------------------------------------------------------------------------
# Cuts, crossing values, the step, its peak, and the bound over all cuts.

COVERS: tuple[str, ...] = (
    (
        "every cut between layers for this axis, number of microbatches and schedule, and every"
        " layout of the tensors that cross a cut"
    ),
    (
        "per stage, every layout of every op, storage of every parameter, recomputation and kept"
        " values (see the stages' proofs); the plans of the stages respect the memory budget, the"
        " bound ignores it"
    ),
    (
        "the step takes {}; τ is a stage's time per microbatch (forward, backward, and its share of"
        " the optimizer step); the stages' proofs describe how communication and compute overlap"
    ),
    (
        "equal ops of repeated layers share one decision in a stage's plan, or one per group of its"
        " layers; in the bound each op decides separately"
    ),
)
_COVERS_REQUESTED: tuple[str, ...] = (
    (
        "the requested cuts with this axis, schedule and number of microbatches, and every layout"
        " of the tensors that cross a cut"
    ),
)
_COVERS_INTERLEAVED: tuple[str, ...] = (
    "the bound ignores the time that stages wait for each other",
)
_WAITS = (
    "all forward passes run first (GPipe), because backward needs a loss that is computed outside"
    " the model"
)
_FORWARD = "forward only"
_COVERS_ONE: tuple[str, ...] = (
    (
        "one stage with this number of microbatches: every layout of every op, storage of every"
        " parameter, recomputation and kept values, within the memory budget (see the stage's"
        " proof)"
    ),
    COVERS[2],
    "equal ops of repeated layers share one decision, or one per group of layers",
)


def join_stages(
    request: PipelineRequest,
    whole: UncutSolution,
    cuts: Sequence[int],
    stages: Sequence[Planned],
    made: Cut,
    sharing: RankBudgets,
    clock: Clock,
) -> Planned:
    """Join the plans of all stages.

    Args:
        request: the request.
        whole: the plans without stages, and the bound over all cuts.
        cuts: indices of the first units of all stages but the first.
        stages: the plans of the stages.
        made: the traces of the stages.
        sharing: the memory of the ranks.
        clock: measures phases.
    """
    plans = tuple(planned.plan for planned in stages)
    objective = (
        step_of(
            request.pipelined.schedule, plans, request.microbatching.num, request.pipelined.chunks
        )
        + request.output_broadcast_s
    )
    slowest = slowest_rank(plans, request.pipelined.chunks)
    ranks = sharing.ranks(stages)
    fullest = max(ranks, key=lambda memory: memory.peak_bytes)
    shared = request.pipelined.chunks > 1
    points = [whole.points[index - 1] for index in cuts]
    named = ", ".join(request.microbatching.promised)
    promised = (
        (f"samples are independent by the user's promise, which rules do not show at {named}",)
        if named
        else ()
    )
    pipeline = Pipeline(
        request.axis,
        tuple(p.position for p in points),
        tuple(p.module for p in points),
        request.microbatching.num,
        request.pipelined.schedule,
        request.in_flight,
        request.pipelined.independent,
        plans,
        tuple(
            _find_crossed(request, trace, planned)
            for trace, planned in zip(made.stages[:-1], stages, strict=False)
        ),
        whole.on[0].priced.problem.accumulates,
        *(
            (tuple(memory.peak_bytes for memory in ranks), tuple(sharing.budgets))
            if shared
            else ((), ())
        ),
        request.budgets if len(set(request.budgets)) > 1 else (),
        request.returned.handed_bytes if request.axis else 0,
        request.output_broadcast_s,
    )
    prediction = Prediction(
        objective,
        sum(p.compute_s for p in slowest) * request.microbatching.num,
        sum(p.communication_s for p in slowest) * request.microbatching.num,
        fullest.peak_bytes,
        fullest.memory_bytes,
        (),
        sum(p.hidden_s for p in slowest) * request.microbatching.num,
        simulated_step_of(
            request.pipelined.schedule, plans, request.microbatching.num, request.pipelined.chunks
        )
        + request.output_broadcast_s,
        sum(p.in_kernels_s for p in slowest) * request.microbatching.num,
        sum(p.in_buckets_s for p in slowest) * request.microbatching.num,
        sum(p.beyond_shares_s for p in slowest) * request.microbatching.num,
        pipeline.host_bytes,
    )
    proof = _proof(request, whole, objective, plans, promised)
    options = request.options.to_json(
        max(request.profiles, key=request.options.budget)
    )  # unequal budgets are recorded in the pipeline
    plan = Plan(
        request.mesh,
        request.mark(request.whole, request.hardware),
        options,
        (),
        (),
        (),
        prediction,
        proof,
        str(request.part.folding),
        pipeline,
    )
    with clock.phase("emit"):
        program = emit(request.part, plan, request.microbatching, made)

    def closer(factor: float) -> float:
        """Search for a bound that is `factor` times as high. Return the proven bound in seconds."""
        assert whole.closer is not None, "there are cuts"
        with clock.phase("bound"):
            return whole.closer(factor).step_s

    return Planned(plan, program, clock.seconds, closer if whole.closer is not None else None)


def _find_crossed(request: PipelineRequest, stage: Trace, planned: Planned) -> tuple[Crossed, ...]:
    """List the values that a stage sends to other stages."""
    layouts = {t.name: t.layout for t in planned.stage_program().outputs if t.crosses}
    return tuple(
        Crossed(
            o.path,
            layouts[o.path],
            local_bytes(o.shape, o.dtype, layouts[o.path], request.stage_mesh.shape),
            bool(o.tangent),
        )
        for o in stage.outputs
        if o.crosses
    )


def _proof(
    request: PipelineRequest,
    whole: UncutSolution,
    objective: float,
    plans: Sequence[Plan],
    promised: tuple[str, ...],
) -> Proof:
    """Make the proof over all cuts. With one stage, use the bound of the stage."""
    stage_proof = plans[0].proof if len(plans) == 1 else None
    bound, certified = (
        (
            stage_proof.bound_s * request.microbatching.num,
            stage_proof.certified_bound_s * request.microbatching.num,
        )
        if stage_proof
        else (whole.least.step_s,) * 2
    )
    covers = _covers(request.pipelined, one=stage_proof is not None)
    if request.returned.waits:
        covers += (_WAITS if request.part.differentiable else _FORWARD,)
    if request.axis and request.returned.handed_bytes:
        covers += (
            (
                f"outputs of {size_text(request.returned.handed_bytes)} are sent to all stages once"
                " per step, after the last forward"
            ),
        )
    kernels = (
        dict.fromkeys(of_kernels(on.priced) for on in whole.on)
        if any(profile.kernels for profile in request.profiles)
        else ()
    )
    covers += (*kernels, *dict.fromkeys(note for on in whole.on for note in on.priced.notes))
    bound, searched = (
        min(bound, objective),
        min(stage_proof.searched_bound_s * request.microbatching.num, objective)
        if stage_proof
        else 0.0,
    )
    proof = Proof(
        objective,
        bound,
        (objective - bound) / objective if objective else 0.0,
        sum(on.choices.num_variables for on in whole.on)
        + sum(p.proof.num_variables for p in plans),
        sum(on.choices.num_constraints for on in whole.on)
        + sum(p.proof.num_constraints for p in plans),
        whole.on[0].choices.solver,
        max(p.proof.memory_price_s_per_gib for p in plans),
        covers + promised,
        min(certified, bound),
        searched,
    )
    first, *further = (_with_multipliers(request, proof, on) for on in whole.on)
    others = zip(request.profiles[1:], further, strict=True)
    return replace(
        first,
        on_profiles=tuple(
            OnProfile(profile.name, each.potentials, each.versions) for profile, each in others
        ),
    )


def _with_multipliers(request: PipelineRequest, proof: Proof, on: OnKind) -> Proof:
    """Add the multipliers of one kind of device to the proof, if it has any."""
    draft = PlanDraft(request.part, request.stage_mesh, on.priced, on.choices, on.evaluation, {})
    return proof if on.multipliers is None else with_multipliers(proof, draft, on.multipliers)


def _covers(pipelined: Pipelined, *, one: bool) -> tuple[str, ...]:
    interleaved = pipelined.schedule == INTERLEAVED
    waves = (
        "(M − 1) · (max f + max b) + Σ τ with τ = f + b for forward and backward, of which the"
        " bound counts (M − 1) · max τ + Σ τ"
    )
    plain = waves if pipelined.schedule == GPIPE and not one else "(M − 1) · max τ + Σ τ"
    schedule_end = "until the end of the simulated schedule" if interleaved else plain
    several = (COVERS if pipelined.cuts is None else _COVERS_REQUESTED + COVERS[1:]) + (
        _COVERS_INTERLEAVED if interleaved else ()
    )
    covers = _COVERS_ONE if one else several
    return *(line.format(schedule_end) for line in covers), SHARES
