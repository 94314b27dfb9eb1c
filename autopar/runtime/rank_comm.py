"""Communication of all ranks outside of programs, and properties of this process. Without a process
group, there is one rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import MeshError, RuntimeStateError
from autopar.runtime.launchers import find_launch
from autopar.runtime.rank_agreement import announced

log = logging.getLogger("autopar")


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    """Return the index of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def take_gpu() -> None:
    """Select the GPU with this process's index on its machine, if a launcher started several
    processes on the machine and the first GPU is still the current one. torch selects it only if
    CUDA was not used before, for example by moving a batch to ``"cuda"``.

    A launcher may also show one GPU to each process (``srun --gpus-per-task=1``); the process then
    uses that one.

    Raises:
        MeshError: if the machine has no GPU for this process.
    """
    place, num_gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if num_gpus == 1 and _is_shown_one_gpu():
        return
    if 0 < num_gpus <= place and not torch.cuda.is_initialized():
        message = f"process {place} of this machine has no GPU: the machine has {num_gpus}"
        raise MeshError(
            message,
            remedy=f"start as many processes as there are GPUs: autopar run -n {num_gpus} SCRIPT",
        )
    if 0 < place < num_gpus and torch.cuda.current_device() == 0:
        torch.cuda.set_device(place)


def _is_shown_one_gpu() -> bool:
    """Return whether the launcher selected one GPU for this process. torchrun never does, so a list
    of one GPU that the user set applies to all of its processes."""
    launch = find_launch(os.environ)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES", "")
    return (
        launch is not None
        and "TORCHELASTIC_RUN_ID" not in os.environ
        and "," not in visible
        and visible != ""
    )


def share_cores() -> None:
    """If this process has one thread, set its number of threads to its share of the machine's
    cores, and log the change. torchrun sets one thread, but the optimizer step of offloaded
    parameters runs on the host."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    num_threads = cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.get_num_threads() == 1 < num_threads:
        torch.set_num_threads(num_threads)
        if rank() == 0:
            log.warning(
                "parameters are stored in host memory: each process now uses %d threads for their"
                " optimizer step instead of one",
                num_threads,
            )


def tell_of_hosts() -> None:
    """Log a warning if process groups support only GPUs, since offloaded parameters then cannot be
    gathered."""
    if num_ranks() > 1 and rank() == 0 and "cpu:" not in (backends := dist.get_backend_config()):
        log.warning(
            "parameters are stored in host memory, which process groups of %s cannot communicate:"
            " they can be trained and saved as shards, but not gathered (full_tensor,"
            " save_pretrained); call init_process_group() without a backend",
            backends,
        )


def of_all(fact: Any, topic: str = "meets the other ranks") -> list[Any]:
    """Gather a value from every rank. Every rank must call this.

    Args:
        fact: this rank's value, which can be pickled.
        topic: what this rank is doing, in words that follow "rank 1".

    Returns:
        The values, by rank.

    Raises:
        RankError: on all ranks, if ranks execute different operations.
    """
    facts = [fact] * num_ranks()
    if num_ranks() > 1:
        with announced(topic, is_aside=True):
            dist.all_gather_object(facts, fact)
    return facts


def of_all_alike(topic: str, fact: Any) -> list[Any]:
    """Gather a value from every rank like `of_all`, and check that all ranks have the same topic.

    Args:
        topic: what this rank is doing, in words that follow "rank 1".
        fact: this rank's value, which can be pickled.

    Returns:
        The values, by rank.

    Raises:
        RuntimeStateError: on all ranks, if the topics differ.
    """
    answers = of_all((topic, fact), topic)
    topics = [each[0] for each in answers]
    if len(set(topics)) > 1:
        other = next(number for number, each in enumerate(topics) if each != topics[0])
        message = f"ranks do different things: rank 0 {topics[0]}, rank {other} {topics[other]}"
        remedy = (
            "call the model in the same way on every rank: in the same mode, with batches of the"
            " same shapes, dtypes and requires_grad"
        )
        raise RuntimeStateError(message, remedy=remedy)
    return [each[1] for each in answers]


def by_first(action: Callable[[], Any], where: str, remedy: str = "see the reason") -> Any:
    """Run an action on the first rank, and return its result on all ranks. Every rank must call
    this.

    Args:
        action: the action; its result can be pickled.
        where: the place of an error, for the message.
        remedy: the remedy for errors that have none.

    Raises:
        RuntimeStateError: on all ranks, if the action raises an error on the first rank.
    """
    return _unpack_outcome(of_all(_outcome(action, remedy) if rank() == 0 else None)[0], where)


def by_all(action: Callable[[], Any], where: str, remedy: str = "see the reason") -> list[Any]:
    """Run an action on every rank, and return the results of all ranks, by rank. Every rank must
    call this.

    Args:
        action: the action; its result can be pickled.
        where: the place of an error, for the message.
        remedy: the remedy for errors that have none.

    Raises:
        RuntimeStateError: on all ranks, if the action raises an error on any rank.
    """
    return [
        _unpack_outcome(outcome, f"{where} (rank {number})")
        for number, outcome in enumerate(of_all(_outcome(action, remedy)))
    ]


def _outcome(action: Callable[[], Any], remedy: str) -> tuple[Any, tuple[str, str] | None]:
    """Run an action. Return its result and the message and remedy of its error; None if there is no
    error."""
    try:
        return action(), None
    except RuntimeStateError as refusal:
        return None, (refusal.what, refusal.remedy)
    except Exception as reason:  # the other ranks wait, so every error must be sent to them
        return None, (f"{type(reason).__name__}: {reason}", remedy)


def _unpack_outcome(outcome: tuple[Any, tuple[str, str] | None], where: str) -> Any:
    result, error = outcome
    if error is not None:
        raise RuntimeStateError(error[0], where=where, remedy=error[1])
    return result
