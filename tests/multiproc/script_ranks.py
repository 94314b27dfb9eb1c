"""A script for `autopar run`: three steps on every rank, but rank 1 departs at the third.

autopar run -n 3 script_ranks.py WHAT
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner

import autopar
from autopar.program.executor import Executor


def depart(what: str) -> None:
    """End this process in one of several ways, or delay it."""
    if what == "raise":
        raise ValueError("sample 17 is broken")
    if what == "exit":
        sys.exit(0)
    if what == "exit 3":
        sys.exit(3)
    if what == "left":
        os._exit(0)
    if what == "inside":  # in an operation that all ranks have begun
        Executor.backward = lambda *args, **kwargs: os._exit(4)
    if what.startswith("saving"):  # while torch gathers what each rank writes
        DefaultSavePlanner.create_local_plan = lambda *args: os._exit(4)  # type: ignore[method-assign]
    if what.startswith("late"):
        time.sleep(float(what.split()[1]))
    numbers = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM, "interrupted": signal.SIGINT}
    if what in numbers:
        os.kill(os.getpid(), numbers[what])


def main(what: str) -> None:
    """Train with a tensor of samples from a data loader with one worker process."""
    torch.manual_seed(0)
    x = torch.randn(12, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    module = autopar.compile(
        model, example_inputs=(x,), hardware="cpu-gloo", constraints=[autopar.constraints.ddp()]
    )
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x), batch_size=12, num_workers=1
    )
    for step in range(3):
        ((batch,),) = loader
        if step == 2 and dist.get_rank() == 1:
            depart(what)
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if what.startswith("saving"):
        autopar.Checkpoints(what.split()[1]).save(3, module, optimizer)
    print(f"rank {dist.get_rank()} is done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
