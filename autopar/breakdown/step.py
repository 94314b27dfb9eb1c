"""Split the step time by activity of the devices. The parts add up to `Prediction.simulated_s`.

For a plan with stages, the parts are those of the busiest rank, for M microbatches with all its
stages; the rest of the step is waiting. For a microbatch, let C be the seconds of compute, of which
R are recomputation in backward, and of which h overlap with communication, which makes them s · h
longer. Let E be the seconds of exposed communication, V of them for receiving from neighbours. The
microbatch takes C + s · h + E.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.breakdown.module_parts import CROSSING, breakdown
from autopar.plans import RESTING, Pipeline, Plan

WAITING = "waiting (the bubble)"


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of a step by activity; they add up to `total_s`.

    Attributes:
        rank: index of the busiest devices along the axis of the pipeline; None if there is one
            stage on the whole mesh.
        compute_s: compute without recomputation.
        again_s: recomputation in backward.
        slowed_s: slowdown of compute by overlapped communication.
        exposed_s: communication that does not overlap with compute.
        receiving_s: receiving from other stages.
        output_broadcast_s: sending outputs to all stages.
        waiting_s: idle time.
    """

    rank: int | None
    compute_s: float
    again_s: float
    slowed_s: float
    exposed_s: float
    receiving_s: float
    output_broadcast_s: float
    waiting_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the step as emitted."""
        return sum(time_s for _, time_s in self.items())

    def items(self) -> Iterator[tuple[str, float]]:
        """Yield the parts as (name, seconds)."""
        yield "compute", self.compute_s
        yield "run again", self.again_s
        yield "slowdown by overlapped communication", self.slowed_s
        yield "exposed communication", self.exposed_s
        yield "receiving from other stages", self.receiving_s
        yield "sending outputs to all stages", self.output_broadcast_s
        yield WAITING, self.waiting_s


def step_parts(plan: Plan) -> StepParts:
    """Split the step of a whole plan, not of a stage."""
    pipeline = plan.as_pipeline
    busy_s = [sum(stage.prediction.simulated_s for stage in stages) for stages in pipeline.ranks]
    rank = max(range(len(busy_s)), key=busy_s.__getitem__)
    rank_sums = zip(*map(_busy, pipeline.ranks[rank]), strict=True)
    compute_s, again_s, slowed_s, exposed_s, arriving_s = (
        pipeline.num_microbatches * sum(part) for part in rank_sums
    )
    waiting_s = (
        plan.prediction.simulated_s - pipeline.num_microbatches * busy_s[rank] - pipeline.handed_s
    )
    rank_key = rank if pipeline.axis else None
    return StepParts(
        rank_key, compute_s, again_s, slowed_s, exposed_s, arriving_s, pipeline.handed_s, waiting_s
    )


def receiving_s(stage: Plan) -> float:
    """Return the seconds of a microbatch that a stage spends receiving from its neighbours."""
    return sum(
        t.time_s
        for part in breakdown(stage)
        if part.module in CROSSING
        for t in part.transfers
        if t.kind == "receive"
    )


def _busy(plan: Plan) -> tuple[float, float, float, float, float]:
    """Return the seconds of a step, or of a stage's microbatch: compute, recomputation, slowdown,
    exposed collectives, receiving.
    """
    p, arriving_s = plan.prediction, receiving_s(plan)
    again_s = sum(entry.again_s * len(entry.instances) for entry in plan.entries)
    return (
        p.compute_s - again_s,
        again_s,
        plan.overlap.slowdown * p.hidden_s,
        p.exposed_s - arriving_s,
        arriving_s,
    )


# --------------------------------------------------------------------------------------------------
# The memory of a device at the peak, by kind.

_EITHER = ("activations", "gradients")  # activations are freed when the last gradient exists
_KINDS = (*RESTING, *_EITHER, "transient")


def rank_memory(pipeline: Pipeline, rank: int) -> tuple[int, Mapping[str, int]]:
    """Return a rank's peak in bytes, and the bytes by kind. If the rank has several stages, the
    resident tensors of all are counted.
    """
    chunks = [stage.prediction for stage in pipeline.ranks[rank]]
    if not pipeline.rank_bytes:
        return chunks[0].peak_bytes, chunks[0].memory_bytes
    peak, kinds = (
        pipeline.rank_bytes[rank],
        {kind: sum(p.memory_bytes.get(kind, 0) for p in chunks) for kind in _KINDS},
    )
    rests = sum(kinds[kind] for kind in RESTING)
    return peak, {**kinds, "transient": max(peak - rests - max(kinds[kind] for kind in _EITHER), 0)}


def peak_kinds(kinds: Mapping[str, int], peak_bytes: int) -> dict[str, int]:
    """Select the kinds of memory that make up the peak, in stacking order: resident tensors, the
    larger one of activations and gradients, and transient memory.

    Activations are the bytes of all kept values. Values that share memory, such as a tensor and a
    view of it, take less, so the activations are at most what the resident tensors leave.

    Args:
        kinds: bytes by kind.
        peak_bytes: the peak in bytes.
    """
    either = max(_EITHER, key=lambda kind: kinds.get(kind, 0))
    rests = sum(kinds.get(kind, 0) for kind in RESTING)
    sizes = {**kinds, either: min(kinds.get(either, 0), peak_bytes - rests)}
    return {kind: sizes[kind] for kind in (*RESTING, either, "transient") if sizes.get(kind)}
