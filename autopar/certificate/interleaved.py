"""The interleaved schedule from its formulas: which order, how many in flight, how long a step. No code of the planner's.

Of v·P stages on P ranks, M microbatches come in R = max(1, M // P) rounds of n = M / R. A rank's forwards, number k = 0, 1, …: the chunk
is (k // n) mod v, the microbatch n·(k // (n·v)) + k mod n; backwards the same, with the last chunk first. Rank r runs
w = (v − 1)·n + 2·(P − 1 − r) forwards, at most all; then forward and backward in turn, then what is left of backwards (Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2; torch's rounds).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from autopar.plans import Plan

Piece = tuple[str, int, int]  # "F" or "B", stage, microbatch


def order_of(rank: int, num_ranks: int, num_chunks: int, num_microbatches: int) -> list[Piece]:
    """What a rank computes."""
    per_round = num_microbatches // max(1, num_microbatches // num_ranks)

    def piece(phase: str, k: int) -> Piece:
        chunk = k // per_round % num_chunks
        chunk = chunk if phase == "F" else num_chunks - 1 - chunk
        return phase, chunk * num_ranks + rank, per_round * (k // (per_round * num_chunks)) + k % per_round

    every = num_chunks * num_microbatches
    first = min((num_chunks - 1) * per_round + 2 * (num_ranks - 1 - rank), every)
    found = [piece("F", k) for k in range(first)]
    for k in range(every):
        found += [piece("F", first + k)] if first + k < every else []
        found.append(piece("B", k))
    return found


def held_by_chunks(stage: int, num_ranks: int, num_chunks: int, num_microbatches: int) -> int:
    """Microbatches whose kept values a stage holds: after forward k of its rank, k − w backwards have run, of n in turn per chunk."""
    rank, chunk = stage % num_ranks, stage // num_ranks
    per_round = num_microbatches // max(1, num_microbatches // num_ranks)
    first = min((num_chunks - 1) * per_round + 2 * (num_ranks - 1 - rank), num_chunks * num_microbatches)

    def among(count: int, which: int) -> int:
        """How many of the first `count` pieces are of the chunk that comes in place `which`."""
        rounds, rest = divmod(count, per_round * num_chunks)
        return rounds * per_round + min(max(rest - which * per_round, 0), per_round)

    forwards = range(1, num_chunks * num_microbatches + 1)
    return max(among(k, chunk) - among(max(k - 1 - first, 0), num_chunks - 1 - chunk) for k in forwards)


def phases_of(stage: Plan, *, simulated: bool) -> tuple[float, float]:
    """Seconds of a microbatch's forward, and of all else that a stage does for it.

    Args:
        simulated: whether to take the figures of the plan's time line, else the sums over entries and collectives.
    """
    claimed = stage.prediction
    if simulated:
        starts = [start_s for _, phase, _, start_s, _ in claimed.timeline if phase == "backward"]
        forward_s = min(starts) if starts else claimed.simulated_s
        return forward_s, claimed.simulated_s - forward_s
    forward_s = _sum_forward(stage)
    return forward_s, claimed.step_s - forward_s


def _sum_forward(stage: Plan) -> float:
    """Seconds of a microbatch's forward: ``max(C + s·P, P) + R``.

    C is what ops and slices take, less what kernels save; P what runs beside them, which costs them s; R the rest: other
    collectives, and what arrives from the stage before.
    """
    ops = [e for e in stage.entries if e.kind == "compute" and e.phase == "forward"]
    compute_s = sum(e.time_s * len(e.instances) for e in ops)
    early_s, other_s = 0.0, sum(e.time_s * len(e.instances) for e in stage.entries if e.kind == "input")
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


def step_by_longest_path(phases: Sequence[tuple[float, float]], num_ranks: int, num_microbatches: int) -> float:
    """Seconds of a step: the longest path through all pieces, each after the one before it on its rank and after what it reads."""
    num_stages = len(phases)
    after: Mapping[Piece, list[Piece]] = defaultdict(list)
    waits_for: dict[Piece, int] = {}
    for rank in range(num_ranks):
        order = order_of(rank, num_ranks, num_stages // num_ranks, num_microbatches)
        for before, piece in zip([None, *order], order, strict=False):
            phase, stage, microbatch = piece
            read = stage - 1 if phase == "F" else stage + 1
            needs = ([before] if before else []) + ([(phase, read, microbatch)] if 0 <= read < num_stages else [])
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
    """What a step takes at least, where a microbatch takes so long through all stages: the rank that does most takes a P-th of each."""
    return least_s * max(1.0, num_microbatches / num_ranks)


def least_of_ranks(bounds_s: Sequence[float], num_ranks: int, num_microbatches: int) -> float:
    """What a step takes at least, where stage s takes b_s for a microbatch: rank r begins when the stages before it have run forward on the
    first one, and ends before they run backward on the last: M · (its stages' b) + the sum of b over stages 0 to r − 1."""
    busy = (num_microbatches * sum(bounds_s[rank::num_ranks]) + sum(bounds_s[:rank]) for rank in range(num_ranks))
    return max(sum(bounds_s), *busy)
