"""The order of each rank's work in a pipeline, under each schedule.

A rank holds one stage or, under the interleaved schedule, several stages, its *chunks*. With S
stages on P ranks, rank r holds stages r, r + P, … (Narayanan et al., "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2). torch's
`ScheduleInterleaved1F1B` computes the interleaved order.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from autopar.core.lazy import import_in_thread
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
        kind: ``forward`` or ``backward``, or a transfer before or after it: ``send forward``,
            ``send backward``, ``receive forward`` or ``receive backward``.
        stage: the index of the stage.
        microbatch: the index of the microbatch.
    """

    kind: str
    stage: int
    microbatch: int


def orders(
    schedule: str, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Return the forward and backward actions of each rank, in order.

    Args:
        schedule: the name of the schedule.
        num_stages: the number of stages.
        num_microbatches: the number of microbatches per step.
        num_chunks: the number of stages per rank.
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
    """Return the order of one stage. Under GPipe, forward of all microbatches runs first. Under
    1F1B, stage s first runs one forward for each stage from s to the last."""
    ahead = _ahead(schedule, stage, num_stages, num_microbatches)
    work = [Action("forward", stage, m) for m in range(ahead)]
    for m in range(num_microbatches):
        work.append(Action("backward", stage, m))
        if ahead + m < num_microbatches:
            work.append(Action("forward", stage, ahead + m))
    return tuple(work)


def _ahead(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Return the number of forwards before the first backward. After that, they alternate."""
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, num_stages - stage)


@lru_cache(maxsize=64)
def interleaved_schedule(
    num_ranks: int, num_chunks: int, num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Return the computations and transfers of each rank, in order.

    Args:
        num_ranks: the number of ranks of the pipeline.
        num_chunks: the number of stages per rank.
        num_microbatches: the number of microbatches per step.
    """
    # Imported here, since it loads about 300 modules that only interleaved stages need.
    pipelining = import_in_thread("torch.distributed.pipelining")
    stages: Any = [
        SimpleNamespace(
            stage_index=n * num_ranks,
            num_stages=num_ranks * num_chunks,
            group_size=num_ranks,
            group_rank=0,
        )
        for n in range(num_chunks)
    ]
    torch_schedule: Any = pipelining.ScheduleInterleaved1F1B(stages, num_microbatches)
    return tuple(
        tuple(
            Action(_KINDS[a.computation_type.value], a.stage_index, a.microbatch_index)
            for a in torch_schedule.pipeline_order_with_comms[rank]
            if a.computation_type.value in _KINDS  # actions of torch's sharding are not used
        )
        for rank in range(num_ranks)
    )


@lru_cache(maxsize=64)
def num_in_flight(
    schedule: str, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> tuple[int, ...]:
    """Return, for each stage, the largest number of microbatches whose saved values it holds.

    Args:
        schedule, num_stages, num_microbatches, num_chunks: see `orders`.
    """
    if schedule != INTERLEAVED:
        return tuple(
            _ahead(schedule, stage, num_stages, num_microbatches) for stage in range(num_stages)
        )
    most = [0] * num_stages
    for actions in orders(schedule, num_stages, num_microbatches, num_chunks):
        live: Counter[int] = Counter()
        for kind, stage, _ in actions:
            live[stage] += 1 if kind == "forward" else -1
            most[stage] = max(most[stage], live[stage])
    return tuple(most)


def num_rounds(num_ranks: int, num_microbatches: int) -> int:
    """Return the number of rounds in the interleaved order. All rounds have the same number of
    microbatches, at least one per rank. Return 0 if the microbatches cannot be divided in this way.
    """
    rounds = max(1, num_microbatches // num_ranks)
    return 0 if num_microbatches % rounds or num_microbatches < num_ranks else rounds
