"""What all ranks say to each other outside of programs; without a process group there is one
rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import MeshError, RuntimeStateError
from autopar.runtime.rank_agreement import announced

log = logging.getLogger("autopar")


def rank() -> int:
    """This process's."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """How many there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    """This process' place on its machine."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def take_gpu() -> None:
    """Make the GPU of this process' place on its machine the current one, where a launcher started
    several processes here and the first GPU still is: torch does so by itself only where CUDA was
    not touched before, and a batch that was moved to ``"cuda"`` has.

    Raises:
        MeshError: where the machine has no GPU for this process.
    """
    place, num_gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if 0 < num_gpus <= place and not torch.cuda.is_initialized():
        what = f"process {place} of this machine has no GPU: there are {num_gpus}"
        raise MeshError(
            what,
            remedy=f"start as many processes as there are GPUs: autopar run -n {num_gpus} SCRIPT",
        )
    if 0 < place < num_gpus and torch.cuda.current_device() == 0:
        torch.cuda.set_device(place)


def share_cores() -> None:
    """Give this process its share of the machine's cores, where it has one thread, and say so:
    torchrun leaves it one, and what rests on the host takes its optimizer step there."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    num_threads = cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.get_num_threads() == 1 < num_threads:
        torch.set_num_threads(num_threads)
        if rank() == 0:
            log.warning(
                "parameters rest on the host: each process has %d threads for their optimizer step"
                " now, not one",
                num_threads,
            )


def tell_of_hosts() -> None:
    """Say so where process groups reach GPUs alone, and what rests on the host cannot be joined."""
    if num_ranks() > 1 and rank() == 0 and "cpu:" not in (backends := dist.get_backend_config()):
        log.warning(
            "parameters rest on the host, which process groups of %s do not reach: they train, and"
            " save in parts, but cannot be joined (full_tensor, save_pretrained); call"
            " init_process_group() without a backend",
            backends,
        )


def of_all(fact: Any, topic: str = "meets the other ranks") -> list[Any]:
    """What each rank says, by rank; what they say can be pickled.

    Args:
        topic: what this rank is doing, in words.

    Raises:
        RankError: on all ranks, if others do something else.
    """
    facts = [fact] * num_ranks()
    if num_ranks() > 1:
        with announced(topic, is_aside=True):
            dist.all_gather_object(facts, fact)
    return facts


def of_all_alike(topic: str, fact: Any) -> list[Any]:
    """As `of_all`, where ranks may be about to say different things.

    Args:
        topic: what this rank is doing, in words.

    Raises:
        RuntimeStateError: on all ranks, where others do something else.
    """
    said = of_all((topic, fact), topic)
    topics = [each[0] for each in said]
    if len(set(topics)) > 1:
        other = next(number for number, each in enumerate(topics) if each != topics[0])
        what = f"ranks do different things: rank 0 {topics[0]}, rank {other} {topics[other]}"
        remedy = (
            "call the model alike on every rank: in one mode, with batches of the same shapes,"
            " dtypes and requires_grad"
        )
        raise RuntimeStateError(what, remedy=remedy)
    return [each[1] for each in said]


def by_first(action: Callable[[], Any], where: str, remedy: str = "see the reason") -> Any:
    """What `action` returns, which the first rank alone does; the others wait for it.

    Raises:
        RuntimeStateError: on all ranks, where it raises on the first.
    """
    return _unpack_outcome(of_all(_outcome(action, remedy) if rank() == 0 else None)[0], where)


def by_all(action: Callable[[], Any], where: str, remedy: str = "see the reason") -> list[Any]:
    """What `action` returns on each rank, by rank.

    Raises:
        RuntimeStateError: on all ranks, where it raises on one.
    """
    return [
        _unpack_outcome(outcome, f"{where} (rank {number})")
        for number, outcome in enumerate(of_all(_outcome(action, remedy)))
    ]


def _outcome(action: Callable[[], Any], remedy: str) -> tuple[Any, tuple[str, str] | None]:
    """What it returns, and what it refuses, with what to do."""
    try:
        return action(), None
    except RuntimeStateError as refusal:
        return None, (refusal.what, refusal.remedy)
    except Exception as reason:  # the others wait: they must learn of whatever it is
        return None, (f"{type(reason).__name__}: {reason}", remedy)


def _unpack_outcome(outcome: tuple[Any, tuple[str, str] | None], where: str) -> Any:
    result, error = outcome
    if error is not None:
        raise RuntimeStateError(error[0], where=where, remedy=error[1])
    return result
