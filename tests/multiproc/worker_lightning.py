"""Run by any number of processes: the Trainer of Lightning with a compiled model."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lit import train_and_test

import autopar


def launched(rank: int) -> None:
    """Set the environment variables of torchrun."""
    world = str(dist.get_world_size())
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    )


def run(rank: int, folder: str) -> list[dict[str, Any]]:
    """Run with sharded parameters and different random states on ranks, and resume from the first
    checkpoint."""
    launched(rank)
    warnings.simplefilter("ignore")
    options = {"hardware": "cpu-gloo", "constraints": [autopar.constraints.fsdp()]}
    strategy = partial(autopar.LightningStrategy, compile_options=options)
    first = train_and_test(Path(folder), strategy(), seed=1 + rank)
    again = train_and_test(
        Path(folder) / "again", strategy(), Path(folder) / "epoch=0.ckpt", seed=1 + rank
    )
    return [first, again]
