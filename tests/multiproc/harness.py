"""Starts gloo processes for a test, and brings back what they return or the first exception.

`run_processes(4, __file__, "function", *args)` loads the file in each of 4 spawned processes, joins them in one gloo
group and calls ``function(rank, *args)``. The first rank to fail takes the others down; so does the time limit.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import queue
import tempfile
import time
import traceback
from multiprocessing.process import BaseProcess
from typing import Any


def run_processes(num_processes: int, path: str, function: str, *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """The results of ``function(rank, *args)`` by rank; both must be picklable.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or on the time limit.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        work = (num_processes, f"{folder}/store", path, function, args, answers)
        processes = [context.Process(target=_main, args=(rank, *work), daemon=True) for rank in range(num_processes)]
        for process in processes:
            process.start()
        try:
            return _collect(processes, answers, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(processes: list[BaseProcess], answers: Any, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        if time.monotonic() > deadline:
            _stop(processes)
            raise AssertionError(f"ranks {sorted(set(range(len(processes))) - set(results))} did not end in time")
        try:
            rank, failure, result = answers.get(timeout=0.5)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if r not in results and p.exitcode not in (None, 0)]
            if dead:
                _stop(processes)
                raise AssertionError(f"ranks {dead} died without a word") from None
            continue
        if failure:
            _stop(processes)
            raise AssertionError(f"rank {rank} failed:\n{failure}")
        results[rank] = result
    return [results[rank] for rank in range(len(processes))]


def _stop(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()


def _main(rank: int, num_processes: int, store: str, path: str, function: str, args: tuple[Any, ...], answers: Any) -> None:
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(store, num_processes), rank=rank, world_size=num_processes)
        spec = importlib.util.spec_from_file_location("multiproc_worker", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        result = getattr(module, function)(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        answers.put((rank, "", result))
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
