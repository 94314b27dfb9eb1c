"""Gloo processes on this machine: run a function on every rank, and return its results or the first
error."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from autopar.errors import AutoparError

# Ranks are forked from a process that has imported only these modules, since that takes seconds.
_PRELOADED = [
    # the modules themselves, since autopar imports lazily
    "autopar.api.compiling",
    "autopar.api.planning",
    "autopar.constraints",
    "autopar.checkpoint.manager",
    "autopar.checkpoint.weights",
    "torch.distributed.tensor.experimental",  # Dynamo imports it for a model's first attention
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    limit_s: float = 1500.0,
    told: Callable[[Any], None] = lambda _: None,
) -> list[Any]:
    """Run ``function(rank, tell, *args)`` in `num_ranks` new processes with one thread each, joined
    in a gloo group.

    Args:
        num_ranks: number of processes.
        function: an importable function with picklable arguments and results. Values that it passes
            to `tell` arrive at `told` in this process.
        limit_s: time limit in seconds.
        told: receives the values of `tell`.

    Returns:
        The results of all ranks, in order.

    Raises:
        AutoparError: with the traceback of the first rank that failed, or at the time limit. No
            process is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        work = (num_ranks, f"{folder}/store", answers, dict(os.environ), function, args)
        processes = [
            context.Process(target=_main, args=(rank, *work), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, answers, time.monotonic() + limit_s, told)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(
    processes: list[Any], answers: Any, deadline: float, told: Callable[[Any], None]
) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        if time.monotonic() > deadline:
            raise AutoparError(
                f"ranks {sorted(set(range(len(processes))) - set(results))} did not finish in time"
            )
        try:
            kind, rank, value = answers.get(timeout=0.5)
        except queue.Empty:
            dead = [
                rank
                for rank, process in enumerate(processes)
                if rank not in results and process.exitcode not in (None, 0)
            ]
            if dead:
                raise AutoparError(f"ranks {dead} terminated without an error message") from None
            continue
        if kind == "error":
            for process in processes:  # the other ranks wait in a collective
                process.kill()
            raise AutoparError(f"rank {rank} failed:\n{value}")
        if kind == "told":
            told(value)
        else:
            results[rank] = value
    return [results[rank] for rank in range(len(processes))]


def _main(
    rank: int,
    num_ranks: int,
    store: str,
    answers: Any,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # otherwise each collection visits all objects of the forked process, and copies their pages
    gc.freeze()
    try:
        os.environ.update(
            environment
        )  # the current environment, as the process that is forked may be older
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        joined = dist.FileStore(store, num_ranks)
        dist.init_process_group(
            "gloo", store=joined, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=300)
        )
        result = function(rank, lambda value: answers.put(("told", rank, value)), *args)
        dist.barrier()
        dist.destroy_process_group()
        answers.put(("result", rank, result))
    except BaseException:
        answers.put(("error", rank, traceback.format_exc()))
