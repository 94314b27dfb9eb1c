"""Check a pipeline with several stages per rank: the order of the ranks' work, and the memory that
the stages of a rank share.

The certificate of a stage covers the memory of this stage alone. Here the memory of all stages of a
rank is counted on the emitted programs. The last section derives schedules and their times.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from autopar.capture.trace import Trace
from autopar.certificate.kernel_claims import shared_forms
from autopar.certificate.report import Finding
from autopar.core.hardware import Hardware, profile_of
from autopar.core.schedules import INTERLEAVED
from autopar.cost.priced import OPTIMIZERS
from autopar.plans import KERNELS_BUFFERS, Pipeline, Plan
from autopar.program.program import Program, ProgramTensor
from autopar.program.schedule import Action, interleaved_schedule, num_rounds
from autopar.program.stage_memory import chunk_memory, rank_peak

_STATIC = ("parameters", "optimizer", "copies", "buffers", "inputs")


def actions_of(pipeline: Pipeline, stage: int) -> tuple[Action, ...]:
    """Return the actions of the rank that holds a stage. Return none if the rank holds no other
    stage."""
    num_ranks = len(pipeline.rank_bytes)
    return (
        interleaved_schedule(num_ranks, pipeline.num_chunks, pipeline.num_microbatches)[
            stage % num_ranks
        ]
        if num_ranks
        else ()
    )


def interleaves(pipeline: Pipeline) -> Iterator[Finding]:
    """Yield a finding if the schedule does not allow this number of stages per rank or of
    microbatches."""
    if (pipeline.schedule == INTERLEAVED) != (pipeline.num_chunks > 1):
        yield Finding(
            "memory", f"{pipeline.schedule} does not support {pipeline.num_chunks} stages per rank"
        )
    elif pipeline.num_chunks > 1 and not num_rounds(
        len(pipeline.rank_bytes), pipeline.num_microbatches
    ):
        yield Finding(
            "emission",
            f"{pipeline.num_microbatches} microbatches is not a multiple of"
            f" {len(pipeline.rank_bytes)} ranks",
        )


def shared_memory(
    plan: Plan, program: Program, traces: Sequence[Trace], hardware: Hardware
) -> Iterator[Finding]:
    """Yield a finding for each rank whose stages together hold other bytes than claimed, or exceed
    the budget.

    Args:
        plan: a plan with a pipeline.
        program: the programs of all stages.
        traces: the traces of all stages, in order.
        hardware: the profile, or one profile per index along an axis.
    """
    pipeline = plan.as_pipeline
    several = [*zip(traces, pipeline.stages, strict=True)] if pipeline.rank_bytes else []
    forms = [
        shared_forms(t, stage, profile_of(hardware, pipeline.axis, number))
        for number, (t, stage) in enumerate(several)
    ]
    derived = [
        _rank(plan, pipeline, program, rank, forms) for rank in range(len(pipeline.rank_bytes))
    ]
    for rank, (peak, _) in enumerate(derived):
        if peak != pipeline.rank_bytes[rank]:
            yield Finding(
                "memory",
                f"the stages of rank {rank} hold {peak} bytes together, not"
                f" {pipeline.rank_bytes[rank]}",
            )
        if peak > plan.budget_of(rank):
            yield Finding(
                "memory",
                f"the peak of rank {rank}, {peak} bytes, is over the budget of"
                f" {plan.budget_of(rank)}",
            )
    claimed = plan.prediction
    if derived and (claimed.peak_bytes, dict(claimed.memory_bytes)) != max(
        derived, key=lambda rank: rank[0]
    ):
        yield Finding(
            "memory",
            f"the peak of the fullest rank is not {claimed.peak_bytes} bytes, or its parts differ",
        )


def _rank(
    plan: Plan,
    pipeline: Pipeline,
    program: Program,
    rank: int,
    forms: Sequence[Mapping[tuple[object, ...], int]],
) -> tuple[int, dict[str, int]]:
    """Return the peak of a rank in bytes, and its parts by kind.

    Tensors that several stages of the rank read count once. So does the memory that their kernels
    share.
    """
    numbers = range(rank, len(pipeline.stages), len(pipeline.rank_bytes))
    outputs = plan.options.get("outputs", "dtensor")
    chunks = {n: chunk_memory(program.stages[n], outputs) for n in numbers}
    kinds: dict[str, int] = dict.fromkeys(_STATIC, 0)
    for n in numbers:
        for kind, size in pipeline.stages[n].prediction.memory_bytes.items():
            kinds[kind] = kinds.get(kind, 0) + size
    state, _ = OPTIMIZERS[str(plan.options["optimizer"])]
    names: set[str] = set()
    for n in numbers:
        for kind, tensors in (
            ("parameters", program.stages[n].parameters),
            ("buffers", program.stages[n].buffers),
        ):
            for tensor in (t for t in tensors if t.name in names):
                kinds[kind] -= chunks[n].resting[tensor.name]
                kinds["optimizer"] -= (
                    state * chunks[n].resting[tensor.name] if tensor.has_gradient else 0
                )
        names |= chunks[n].resting.keys()
    buffers = sum({form: size for n in numbers for form, size in forms[n].items()}.values())
    kinds |= {KERNELS_BUFFERS: buffers} if buffers or KERNELS_BUFFERS in kinds else {}
    batch = sum(_bytes(tensor) for tensor in program.inputs)
    peak = (
        rank_peak(chunks, actions_of(pipeline, rank), pipeline.num_microbatches)
        + batch
        + kinds["optimizer"]
        + buffers
    )
    accounted = (
        sum(kinds[kind] for kind in _STATIC)
        + buffers
        + max(kinds["activations"], kinds["gradients"])
    )
    gathered = {} if kinds["copies"] else {"copies"}
    return peak, {
        **{k: v for k, v in kinds.items() if k not in gathered},
        "transient": max(peak - accounted, 0),
    }


def _bytes(tensor: ProgramTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


# --------------------------------------------------------------------------------------------------
# The interleaved schedule from its formulas: the order of work, the microbatches in flight and the
# seconds of a step. This does not use the planner's code.
#
# With v·P stages on P ranks, M microbatches run in R = max(1, M // P) rounds of n = M / R. Forward
# number k = 0, 1, … of a rank is of chunk (k // n) mod v and of microbatch n·(k // (n·v)) + k mod
# n. Backwards are numbered in the same way, with the last chunk first. Rank r first runs w = (v −
# 1)·n + 2·(P − 1 − r) forwards, but at most all. Then it alternates between forward and backward.
# The remaining backwards come last (Narayanan et al., "Efficient Large-Scale Language Model
# Training on GPU Clusters Using Megatron-LM", 2021, section 2.2; with torch's rounds).

Piece = tuple[str, int, int]  # "F" or "B", stage, microbatch


def order_of(rank: int, num_ranks: int, num_chunks: int, num_microbatches: int) -> list[Piece]:
    """Return the order in which a rank runs its forwards and backwards.

    Args:
        rank: index along the pipeline's axis.
        num_ranks: number of devices along this axis.
        num_chunks: number of stages per rank.
        num_microbatches: number of microbatches per step.
    """
    per_round = num_microbatches // max(1, num_microbatches // num_ranks)

    def piece(phase: str, k: int) -> Piece:
        """Return the rank's `k`-th forward or backward."""
        chunk = k // per_round % num_chunks
        chunk = chunk if phase == "F" else num_chunks - 1 - chunk
        return (
            phase,
            chunk * num_ranks + rank,
            per_round * (k // (per_round * num_chunks)) + k % per_round,
        )

    every = num_chunks * num_microbatches
    first = min((num_chunks - 1) * per_round + 2 * (num_ranks - 1 - rank), every)
    order = [piece("F", k) for k in range(first)]
    for k in range(every):
        order += [piece("F", first + k)] if first + k < every else []
        order.append(piece("B", k))
    return order


def held_by_chunks(stage: int, num_ranks: int, num_chunks: int, num_microbatches: int) -> int:
    """Return the largest number of microbatches whose saved values a stage holds at the same time.

    After forward k of its rank, k − w backwards have run. Chunks take turns with n backwards each.

    Args:
        stage: index among all stages.
        num_ranks: number of devices along the pipeline's axis.
        num_chunks: number of stages per rank.
        num_microbatches: number of microbatches per step.
    """
    rank, chunk = stage % num_ranks, stage // num_ranks
    per_round = num_microbatches // max(1, num_microbatches // num_ranks)
    first = min(
        (num_chunks - 1) * per_round + 2 * (num_ranks - 1 - rank), num_chunks * num_microbatches
    )

    def among(count: int, which: int) -> int:
        """Return how many of the first `count` pieces belong to the chunk in position `which`."""
        rounds, rest = divmod(count, per_round * num_chunks)
        return rounds * per_round + min(max(rest - which * per_round, 0), per_round)

    forwards = range(1, num_chunks * num_microbatches + 1)
    return max(
        among(k, chunk) - among(max(k - 1 - first, 0), num_chunks - 1 - chunk) for k in forwards
    )


def phases_of(stage: Plan, *, simulated: bool) -> tuple[float, float]:
    """Return the seconds of a microbatch's forward, and the seconds of all other work of a stage
    for it.

    Args:
        stage: the plan of the stage.
        simulated: whether to use the plan's timeline instead of the sums over entries and
            collectives.
    """
    claimed = stage.prediction
    if simulated:
        starts = [start_s for _, phase, _, start_s, _ in claimed.timeline if phase == "backward"]
        forward_s = min(starts) if starts else claimed.simulated_s
        return forward_s, claimed.simulated_s - forward_s
    forward_s = _sum_forward(stage)
    return forward_s, claimed.step_s - forward_s


def _sum_forward(stage: Plan) -> float:
    """Return the seconds of a microbatch's forward: ``max(C + s·P, P) + R``.

    C is the time of ops and slices, minus the savings of kernels. P is the time of overlapped
    collectives, which slow compute down by s. R is the rest: other collectives, and values that
    arrive from the previous stage.
    """
    ops = [e for e in stage.entries if e.kind == "compute" and e.phase == "forward"]
    compute_s = sum(e.time_s * len(e.instances) for e in ops)
    early_s, other_s = (
        0.0,
        sum(e.time_s * len(e.instances) for e in stage.entries if e.kind == "input"),
    )
    for move in stage.communications:
        if move.phase != "forward" or not move.time_s:
            continue
        move_s, is_slice = move.time_s * len(move.instances), move.collective.kind == "slice"
        if move.kernel is not None:
            compute_s -= move.kernel.saved_s * len(move.instances)
        compute_s += move_s if is_slice else 0.0
        early_s += move_s if move.beside else 0.0
        other_s += 0.0 if move.beside or is_slice else move_s
    return max(compute_s + stage.overlap.slowdown * early_s, early_s) + other_s


def step_by_longest_path(
    phases: Sequence[tuple[float, float]], num_ranks: int, num_microbatches: int
) -> float:
    """Return the seconds of a step: the longest path through all pieces. A piece starts after the
    previous piece of its rank and after the pieces that it reads.

    Args:
        phases: for each stage, the seconds of forward and of backward of a microbatch.
        num_ranks: number of devices along the pipeline's axis.
        num_microbatches: number of microbatches per step.
    """
    num_stages = len(phases)
    after: Mapping[Piece, list[Piece]] = defaultdict(list)
    waits_for: dict[Piece, int] = {}
    for rank in range(num_ranks):
        order = order_of(rank, num_ranks, num_stages // num_ranks, num_microbatches)
        for before, piece in zip([None, *order], order, strict=False):
            phase, stage, microbatch = piece
            read = stage - 1 if phase == "F" else stage + 1
            needs = ([before] if before else []) + (
                [(phase, read, microbatch)] if 0 <= read < num_stages else []
            )
            waits_for[piece] = len(needs)
            for needed in needs:
                after[needed].append(piece)
    starts: dict[Piece, float] = defaultdict(float)
    ready, end = deque(piece for piece, count in waits_for.items() if not count), 0.0
    while ready:
        piece = ready.popleft()
        ends = starts[piece] + phases[piece[1]][piece[0] == "B"]
        end = max(end, ends)
        for later in after[piece]:
            starts[later] = max(starts[later], ends)
            waits_for[later] -= 1
            if not waits_for[later]:
                ready.append(later)
    return end


def least_of_cuts(least_s: float, num_ranks: int, num_microbatches: int) -> float:
    """Return a lower bound of the step in seconds, over all cuts.

    The busiest rank has at least 1/P of the work for each microbatch.

    Args:
        least_s: lower bound of the seconds of a microbatch through all stages.
        num_ranks: P, number of devices along the pipeline's axis.
        num_microbatches: number of microbatches per step.
    """
    return least_s * max(1.0, num_microbatches / num_ranks)


def least_of_ranks(bounds_s: Sequence[float], num_ranks: int, num_microbatches: int) -> float:
    """Return a lower bound of the step in seconds, from lower bounds of its stages.

    Rank r begins after forward of the first microbatch on the previous stages, and ends before
    their backward of the last: M · (sum of b over its stages) + the sum of b over stages 0 to r −
    1.

    Args:
        bounds_s: b, lower bound of the seconds of each stage for a microbatch.
        num_ranks: number of devices along the pipeline's axis.
        num_microbatches: M, number of microbatches per step.
    """
    busy = (
        num_microbatches * sum(bounds_s[rank::num_ranks]) + sum(bounds_s[:rank])
        for rank in range(num_ranks)
    )
    return max(sum(bounds_s), *busy)
