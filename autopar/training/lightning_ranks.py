"""What Lightning is told of the processes: each rank runs the loop of one process over the same whole batches, and the compiled module
alone knows of the others. So there is one process for all that is computed, and this process' rank for what one rank alone does: logging,
progress, files."""

from __future__ import annotations

import os
import random
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as rank_zero_only_of_utilities
from torch import Tensor

from autopar.errors import RuntimeStateError
from autopar.run.device_mesh import join_launched
from autopar.run.ranks import local_rank, num_ranks, of_all, rank


class WholeBatches(Strategy):
    """A strategy in which every rank goes through whole batches.

    Attributes:
        world_size: of what Lightning counts. parallel_devices, num_nodes: what the Trainer was asked for, as it sets them.
    """

    world_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.parallel_devices: list[torch.device] | None = None
        self.num_nodes = 1

    @property
    def global_rank(self) -> int:
        """This process' among all, which a launcher says before processes know of each other."""
        return int(os.environ.get("RANK", rank()))

    local_rank = property(lambda _: local_rank())
    node_rank = property(lambda _: int(os.environ.get("GROUP_RANK", 0)))
    is_global_zero = property(lambda self: self.global_rank == 0)

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank] if len(devices) > 1 else devices[0]

    def set_world_ranks(self) -> None:
        """Tell Lightning which process logs."""
        rank_zero_only.rank = rank_zero_only_of_utilities.rank = self.global_rank

    def setup_environment(self) -> None:
        """Let the processes know of each other, and draw the same random numbers.

        Raises:
            RuntimeStateError: where there are several devices, and no launcher.
        """
        super().setup_environment()
        join_launched(self.root_device.type)
        asked = len(self.parallel_devices or ()) * self.num_nodes
        if num_ranks() == 1 and asked > 1:
            remedy = f"start the script by `autopar run -n {asked}`, or pass Trainer(devices=1)"
            raise RuntimeStateError(f"{asked} devices are asked for, and there is one process", remedy=remedy)
        self._draw_alike()

    def _draw_alike(self) -> None:
        """Shuffled loaders draw from these numbers: all ranks go on as the first does, whether the script set seeds or not."""
        device = self.root_device
        on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        drawn, on_gpu, python, numpy = self.broadcast((torch.get_rng_state(), on_gpu, random.getstate(), np.random.get_state()))
        torch.set_rng_state(drawn)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)
        random.setstate(python)
        np.random.set_state(numpy)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let workers draw the same random numbers on every rank: Lightning seeds them by rank."""
        if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(dataloader, "worker_init_fn", True) is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)
        return dataloader

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """What was passed: every rank computed it of the whole batch."""
        return tensor

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What was passed, as on one process."""
        return tensor

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Until all ranks are here."""
        of_all(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What the rank `src` says."""
        return of_all(obj)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks say so, or one."""
        said = of_all(decision)
        return min(said) if all else max(said)
