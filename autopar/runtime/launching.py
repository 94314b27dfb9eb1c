"""Launch a script in several processes with torchrun, or as one process of another launcher."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from autopar.errors import AutoparError
from autopar.runtime.launchers import Launch, adopt_launch, find_launch


def launch(
    script: Path,
    arguments: Sequence[str],
    *,
    num_processes: int | None = None,
    nodes: str = "1",
    meet: str | None = None,
    restarts: int | None = None,
) -> None:
    """Run a script in several processes, and return when all processes on this machine have ended.

    Under ``srun``, ``mpirun`` and their like, which have started this command several times, the
    script runs in this process, as one of theirs.

    Args:
        script: the Python file.
        arguments: the arguments of the script.
        num_processes: the number of processes on this machine; by default one per GPU, or one
            without GPUs.
        nodes: the number of machines that run this command, or a range ``fewest:most``, such as
            ``2:4``.
        meet: the rendezvous address ``host:port`` on one machine, for several machines.
        restarts: the number of times that all processes restart after a process fails or a machine
            is lost. The default is 0, or 10 if the number of machines is a range.

    Raises:
        AutoparError: if the script does not exist, `nodes` is invalid, `meet` is missing for
            several machines, another launcher started this command several times and its options
            would start worlds that do not know of each other, or a process failed.
    """
    if not os.path.isfile(script):
        raise AutoparError(f"script {str(script)!r} does not exist", remedy="pass a Python file")
    _check_machines(nodes, meet)
    outer = find_launch(os.environ)
    if outer is not None and nodes == "1":
        _check_one_task(outer, num_processes, restarts)
        adopt_launch()
        worker = [sys.executable, "-m", "autopar.runtime.launch_worker", str(script), *arguments]
        os.execv(sys.executable, worker)
    rendezvous = ["--standalone"]
    if meet is not None:
        rendezvous = [
            f"--nnodes={nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={meet}",
            "--rdzv-id=autopar",
        ]
    most = nodes.partition(":")[2]
    restarts = (10 if most else 0) if restarts is None else restarts
    # Without this (torch 2.13), the first machine announces its store only once, and a machine that
    # joins later waits forever.
    if most:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    num_gpus = torch.cuda.device_count()
    num_processes = num_processes or num_gpus or 1
    started = ["-m", "autopar.runtime.launch_worker"] if num_gpus > 1 < num_processes else []
    sys.argv = [
        "torchrun",
        *rendezvous,
        f"--max-restarts={restarts}",
        f"--nproc-per-node={num_processes}",
        *started,
        str(script),
        *arguments,
    ]
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__")
    except ChildFailedError as error:  # each process has printed its own error
        first, failure = error.get_first_failure()
        message = (
            f"the script failed, first on rank {first}, which exited with code {failure.exitcode}"
        )
        raise AutoparError(
            message, where=str(script), remedy="see the error of that rank above"
        ) from None


def _check_one_task(outer: Launch, num_processes: int | None, restarts: int | None) -> None:
    """Check the options of `launch` in a process that another launcher started.

    Raises:
        AutoparError: if this process is asked to start several, or to restart.
    """
    name, count = outer.launcher.name, outer.world_size
    if num_processes not in (None, 1):
        raise AutoparError(
            f"{name} started this command {count} times, and each would start a world of its"
            f" own with {num_processes} processes",
            remedy=(
                f"omit -n, so that each process of {name} runs the script as one of {count}; or"
                f" start the command once per machine and pass --nodes NUMBER --meet HOST:PORT"
            ),
        )
    if restarts:
        raise AutoparError(
            f"{name} started this process, so autopar cannot restart it",
            remedy=f"omit --restarts, and use what {name} offers; or start one process per machine"
            " and pass --nodes NUMBER --meet HOST:PORT",
        )


def _check_machines(nodes: str, meet: str | None) -> None:
    """Check the arguments `nodes` and `meet` of `launch`.

    Raises:
        AutoparError: if `nodes` is neither a number nor a range, or several machines have no
            `meet`.
    """
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes):
        raise AutoparError(
            f"{nodes!r} is not a number of machines",
            remedy="pass one number, such as 4, or a range, such as 2:4",
        )
    fewest, _, most = nodes.partition(":")
    if most and int(most) < int(fewest):
        raise AutoparError(
            f"from {fewest} to {most} machines", remedy="pass the smaller number first, such as 2:4"
        )
    if nodes != "1" and meet is None:
        raise AutoparError(
            f"{nodes} machines need a rendezvous address",
            remedy="pass --meet HOST:PORT, with the same address on every machine",
        )
