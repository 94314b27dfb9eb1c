"""Starting a script in several processes, by torchrun."""

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


def launch(
    script: Path,
    arguments: Sequence[str],
    *,
    num_processes: int | None = None,
    nodes: str = "1",
    meet: str | None = None,
    restarts: int | None = None,
) -> None:
    """Run `script` with its arguments; returns when it has ended on this machine.

    Args:
        num_processes: on this machine; by default one for each of its GPUs, or one.
        nodes: machines that each run this: a number, or the fewest and the most, as ``2:4``.
        meet: ``host:port`` of one of them, where several machines meet.
        restarts: how often all start again after one has failed, as those that are left do where a
            machine is lost; by default not at all, or 10 times where machines may come and go.

    Raises:
        AutoparError: where there is no such script, or several machines have no place to meet.
    """
    if not script.is_file():
        raise AutoparError(f"there is no script {str(script)!r}", remedy="name a Python file")
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", nodes):
        raise AutoparError(
            f"{nodes!r} is no number of machines",
            remedy="pass one, as 4, or the fewest and the most, as 2:4",
        )
    fewest, _, most = nodes.partition(":")
    if most and int(most) < int(fewest):
        raise AutoparError(
            f"from {fewest} to {most} machines", remedy="pass the fewest first, as 2:4"
        )
    if nodes != "1" and meet is None:
        raise AutoparError(
            f"{nodes} machines have no place to meet",
            remedy="pass --meet HOST:PORT, the same on every machine",
        )
    where = ["--standalone"]
    if meet is not None:
        where = [
            f"--nnodes={nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={meet}",
            "--rdzv-id=autopar",
        ]
    restarts = (10 if most else 0) if restarts is None else restarts
    # else, as of torch 2.13, the first machine says once where its store is, and whoever joins
    # later waits for it in vain
    if most:
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    num_gpus = torch.cuda.device_count()
    num_processes = num_processes or num_gpus or 1
    started = ["-m", "autopar.runtime.launch_worker"] if num_gpus > 1 < num_processes else []
    sys.argv = [
        "torchrun",
        *where,
        f"--max-restarts={restarts}",
        f"--nproc-per-node={num_processes}",
        *started,
        str(script),
        *arguments,
    ]
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__")
    except (
        ChildFailedError
    ) as error:  # each process has told its own; what follows here is torchrun's
        first, failure = error.get_first_failure()
        what = f"the script failed, on rank {first} first, which ended with {failure.exitcode}"
        raise AutoparError(
            what, where=str(script), remedy="see that rank's own error above"
        ) from None
