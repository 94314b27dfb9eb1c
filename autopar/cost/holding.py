"""What it costs to hold a parameter through a step of several microbatches, in each of the ways of `autopar.cost.held`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial

from autopar.analysis.work import Work
from autopar.capture.trace import Parameter
from autopar.cost.compute import compute_time
from autopar.cost.held import Held, StepMoves, ZeroStages, held_of, held_ways, stage_on
from autopar.cost.priced import OPTIMIZERS
from autopar.hardware import HardwareProfile
from autopar.kernels.sums import sum_dtype
from autopar.layout import Layout, Strategy
from autopar.problem import OpStrategy
from autopar.redistribute import local_bytes


@dataclass(frozen=True, slots=True)
class HeldPrices:
    """The strategies of parameters whose gradients add up.

    What is per step is shared among microbatches: gathers, reductions, and the optimizer's traffic. Per microbatch a gradient is added
    to its sum.
    """

    profile: HardwareProfile
    optimizer: str
    moves: StepMoves

    def strategies(self, p: Parameter, storages: Sequence[Layout], stages: ZeroStages) -> tuple[OpStrategy, ...]:
        """All ways to hold it that have these stages; of those that are the same for microbatches, such as take less time or rest with
        less."""
        mesh_shape, trained = self.moves.mesh_shape, p.gradient is not None
        found: dict[Strategy, list[OpStrategy]] = {}
        for storage in storages:
            for held in held_ways(storage, mesh_shape, trained=trained, stages=stages):
                strategy = self._strategy(p, held)
                if strategy is not None:
                    found.setdefault(strategy.layouts, []).append(strategy)
        return tuple(s for alike in found.values() for s in _undominated(alike))

    def _strategy(self, p: Parameter, held: Held) -> OpStrategy | None:
        moved_s = self.moves.seconds(p, held)
        if moved_s is None:
            return None
        mesh_shape, trained = self.moves.mesh_shape, p.gradient is not None
        rests = local_bytes(p.view, p.dtype, held.storage, mesh_shape)
        working = 0 if held.working == held.storage else local_bytes(p.view, p.dtype, held.working, mesh_shape)
        state, _ = OPTIMIZERS[self.optimizer] if trained else (0, 0)
        sums = local_bytes(p.view, sum_dtype(p.dtype), held.sums, mesh_shape) if trained else 0
        added = local_bytes(p.view, p.dtype, held.sums, mesh_shape) if trained else 0
        time_s = held_time(self.profile, self.optimizer, self.moves.num_microbatches, rests if trained else 0, sums, added)
        elsewhere = held.storage if working or (trained and held.sums != held.storage) else None
        layouts = Strategy((held.sums,) if trained else (), (held.working,))
        return OpStrategy(layouts, time_s + moved_s, rests * (1 + state) + working, sums, moved_s, elsewhere)


def held_time(profile: HardwareProfile, optimizer: str, num_microbatches: int, rests: int, sums: int, added: int) -> float:
    """Seconds of compute per microbatch: its share of the optimizer's traffic over `rests` bytes, and a gradient of `added` bytes added
    to `sums` bytes, which are read and written."""
    if not sums:
        return 0.0
    _, traffic = OPTIMIZERS[optimizer]
    step_s = traffic * rests / profile.memory_bandwidth_bytes_per_s / num_microbatches
    return step_s + compute_time(Work(0, 2 * sums + added, "elementwise"), torch.float32, profile)


def adding_partial(strategies: Sequence[OpStrategy], made: Sequence[Layout], axes: Sequence[int]) -> tuple[OpStrategy, ...]:
    """Those with ZeRO's stage 1 on each of these axes on which the parameter rests sharded and some of the layouts, in which its
    gradient is made, have partial sums."""
    partial = [axis for axis in axes if any(isinstance(layout.placements[axis], Partial) for layout in made)]
    return tuple(s for s in strategies if all(stage_on(held_of(s), axis) in (0, 1) for axis in partial))


def _undominated(alike: Sequence[OpStrategy]) -> Iterator[OpStrategy]:
    """Those of which no other, or none before it, takes as little time and rests with as few bytes."""
    for i, s in enumerate(alike):
        cost = s.time_s, s.static_bytes
        others = [((t.time_s, t.static_bytes), j) for j, t in enumerate(alike) if t.time_s <= s.time_s and t.static_bytes <= s.static_bytes]
        if not any(other != cost or j < i for other, j in others):
            yield s
