"""The order of each rank's work in a pipeline, under each schedule.

A rank holds one stage or, interleaved, several, its *chunks*. Of S stages on P ranks, rank r holds
stages r, r + P, … (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", 2021, section 2.2). The interleaved order is computed by torch's
`ScheduleInterleaved1F1B`.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from autopar.core.lazy import imported_apart
from autopar.core.schedules import INTERLEAVED

_KINDS = {
    "F": "forward",
    "B": "backward",
    "SEND_F": "send forward",
    "SEND_B": "send backward",
    "RECV_F": "receive forward",
    "RECV_B": "receive backward",
}


class Action(NamedTuple):
    """An action of a stage on a microbatch.

    Attributes:
        kind: ``forward`` or ``backward``, or the transfer before or after it: ``send forward``,
            ``send backward``, ``receive forward`` or ``receive backward``.
    """

    kind: str
    stage: int
    microbatch: int


def orders(
    schedule: str, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Return, per rank, what its stages compute, in order.

    Args:
        schedule: its name. num_stages, num_microbatches: of the pipeline. num_chunks: stages per
            rank.
    """
    if schedule == INTERLEAVED:
        lists = interleaved_schedule(num_stages // num_chunks, num_chunks, num_microbatches)
        return tuple(
            tuple(a for a in actions if a.kind in ("forward", "backward")) for actions in lists
        )
    return tuple(
        _one_stage(schedule, stage, num_stages, num_microbatches) for stage in range(num_stages)
    )


def _one_stage(
    schedule: str, stage: int, num_stages: int, num_microbatches: int
) -> tuple[Action, ...]:
    """Return the order of one stage. GPipe runs all forwards first; 1F1B at stage s runs as many as
    there are stages from s to the last."""
    ahead = _ahead(schedule, stage, num_stages, num_microbatches)
    work = [Action("forward", stage, m) for m in range(ahead)]
    for m in range(num_microbatches):
        work.append(Action("backward", stage, m))
        if ahead + m < num_microbatches:
            work.append(Action("forward", stage, ahead + m))
    return tuple(work)


def _ahead(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Return the number of forwards before the first backward; then both alternate."""
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, num_stages - stage)


@lru_cache(maxsize=64)
def interleaved_schedule(
    num_ranks: int, num_chunks: int, num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return, per rank, what it computes, sends and receives, in order.

    Args:
        num_ranks: of the pipeline. num_chunks: stages per rank. num_microbatches: of a step.
    """
    # Imported here: it loads about 300 modules, and only plans with interleaved stages need it.
    pipelining = imported_apart("torch.distributed.pipelining")
    stages: Any = [
        SimpleNamespace(
            stage_index=n * num_ranks,
            num_stages=num_ranks * num_chunks,
            group_size=num_ranks,
            group_rank=0,
        )
        for n in range(num_chunks)
    ]
    made: Any = pipelining.ScheduleInterleaved1F1B(stages, num_microbatches)
    return tuple(
        tuple(
            Action(_KINDS[a.computation_type.value], a.stage_index, a.microbatch_index)
            for a in made.pipeline_order_with_comms[rank]
            if a.computation_type.value in _KINDS  # torch's own sharding, which is not used
        )
        for rank in range(num_ranks)
    )


@lru_cache(maxsize=64)
def num_in_flight(
    schedule: str, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> tuple[int, ...]:
    """Return, per stage, of how many microbatches it holds kept values at most.

    Args:
        schedule, num_stages, num_microbatches, num_chunks: see `orders`.
    """
    if schedule != INTERLEAVED:
        return tuple(
            _ahead(schedule, stage, num_stages, num_microbatches) for stage in range(num_stages)
        )
    most = [0] * num_stages
    for actions in orders(schedule, num_stages, num_microbatches, num_chunks):
        held: Counter[int] = Counter()
        for kind, stage, _ in actions:
            held[stage] += 1 if kind == "forward" else -1
            most[stage] = max(most[stage], held[stage])
    return tuple(most)


def num_rounds(num_ranks: int, num_microbatches: int) -> int:
    """Return the number of rounds of equally many microbatches in the interleaved order.

    A round has at least one microbatch per rank. The result is 0 if they cannot be divided so.
    """
    rounds = max(1, num_microbatches // num_ranks)
    return 0 if num_microbatches % rounds or num_microbatches < num_ranks else rounds
