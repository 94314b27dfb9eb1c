"""What it costs to hold a parameter through a step of several microbatches, in each of the ways
of `autopar.cost.zero_stages`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import Partial

from autopar.analysis.work import Work
from autopar.capture.trace import Parameter
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import local_bytes
from autopar.core.problem import Op, OpStrategy
from autopar.cost.gradient_dtypes import Uncast, is_made_there
from autopar.cost.op_times import compute_time
from autopar.cost.priced import OPTIMIZERS, Source
from autopar.cost.zero_stages import Held, StepMoves, ZeroStages, held_of, held_ways, stage_on
from autopar.kernels.collectives import sum_dtype


@dataclass(frozen=True, slots=True)
class HeldPrices:
    """The strategies of parameters whose gradients add up.

    What is per step is shared among microbatches: gathers, reductions, and the optimizer's traffic.
    Per microbatch a gradient is added to its sum.
    """

    profile: HardwareProfile
    optimizer: str
    moves: StepMoves
    all_ways: bool = False

    def strategies(
        self,
        p: Parameter,
        storages: Sequence[Layout],
        stages: ZeroStages,
        uncast: Uncast | None = None,
    ) -> tuple[OpStrategy, ...]:
        """All ways to hold it that have these stages; of those that are the same for microbatches,
        such as take less time or rest with less.

        Args:
            uncast: how its gradient may be added without a cast, if at all.
        """
        mesh_shape, trained = self.moves.mesh_shape, p.gradient is not None
        found: dict[Strategy, list[OpStrategy]] = {}
        for storage in storages:
            for held in held_ways(storage, mesh_shape, trained=trained, stages=stages):
                for dtype in _added_in(p, held, uncast, mesh_shape):
                    strategy = self._strategy(p, held, dtype)
                    if strategy is not None:
                        found.setdefault(strategy.layouts, []).append(strategy)
        return tuple(
            s
            for alike in found.values()
            for s in (alike if self.all_ways else _drop_dominated(alike))
        )

    def _strategy(self, p: Parameter, held: Held, dtype: torch.dtype) -> OpStrategy | None:
        """The strategy where its gradient is added in a dtype, left uncast if that is not its
        own."""
        moved_s = self.moves.seconds(p, held)
        if moved_s is None:
            return None
        mesh_shape, trained = self.moves.mesh_shape, p.gradient is not None
        rests = local_bytes(p.view, p.dtype, held.storage, mesh_shape)
        moves = held.working != held.storage
        working = (
            local_bytes(p.view, p.compute_dtype, held.working, mesh_shape)
            if moves or p.is_narrowed
            else 0
        )
        state, _ = OPTIMIZERS[self.optimizer] if trained else (0, 0)
        sums = local_bytes(p.view, sum_dtype(p.dtype), held.sums, mesh_shape) if trained else 0
        there = rests * (1 + state) + (
            local_bytes(p.view, sum_dtype(p.dtype), held.storage, mesh_shape) if trained else 0
        )
        there += (
            local_bytes(p.view, p.compute_dtype, held.storage, mesh_shape) if p.is_narrowed else 0
        )
        added = local_bytes(p.view, dtype, held.sums, mesh_shape) if trained else 0
        time_s = held_time(
            self.profile,
            self.optimizer,
            self.moves.num_microbatches,
            rests if trained else 0,
            sums,
            added,
            held.storage,
        )
        time_s += (
            narrowing_s(p, held.storage, mesh_shape, self.profile) / self.moves.num_microbatches
        )
        elsewhere = held.storage if moves or (trained and held.sums != held.storage) else None
        reads = held.sums if dtype == p.dtype else held.sums.left_uncast()
        layouts = Strategy((reads,) if trained else (), (held.working,))
        here = (0 if held.storage.host else rests * (1 + state)) + (
            0 if held.working.host else working
        )
        return OpStrategy(
            layouts,
            time_s + moved_s,
            here,
            sums,
            moved_s,
            elsewhere,
            there if held.storage.host else 0,
        )


def _added_in(
    p: Parameter, held: Held, uncast: Uncast | None, mesh_shape: Sequence[int]
) -> tuple[torch.dtype, ...]:
    """The dtypes in which gradients may come to be added."""
    if p.gradient is None or uncast is None or held.sums not in uncast.layouts:
        return (p.dtype,)
    return (uncast.dtype,) if is_made_there(held.sums, mesh_shape) else (p.dtype, uncast.dtype)


def held_time(
    profile: HardwareProfile,
    optimizer: str,
    num_microbatches: int,
    rests: int,
    sums: int,
    added: int,
    storage: Layout,
) -> float:
    """Seconds of compute per microbatch: its share of the optimizer's traffic over `rests` bytes,
    and a gradient of `added` bytes added to `sums` bytes, which are read and written, but on the
    first microbatch written only."""
    if not sums:
        return 0.0
    _, traffic = OPTIMIZERS[optimizer]
    step_s = traffic * rests / bandwidth_at(storage, profile) / num_microbatches
    first_s, later_s = (
        compute_time(Work(0, passes * sums + added, "elementwise"), torch.float32, profile)
        for passes in (1, 2)
    )
    return step_s + (first_s + (num_microbatches - 1) * later_s) / num_microbatches


def narrowing_s(
    p: Parameter, storage: Layout, mesh_shape: Sequence[int], profile: HardwareProfile
) -> float:
    """Seconds to copy a parameter where it rests into the dtype in which it is read, where that
    is not its own."""
    if not p.is_narrowed:
        return 0.0
    moved = sum(
        local_bytes(p.view, dtype, storage, mesh_shape) for dtype in (p.dtype, p.compute_dtype)
    )
    if storage.host:
        return moved / bandwidth_at(storage, profile)
    return compute_time(Work(0, moved, "elementwise"), p.compute_dtype, profile)


def resting_strategy(
    p: Parameter,
    layout: Layout,
    mesh_shape: Sequence[int],
    optimizer: str,
    profile: HardwareProfile,
) -> OpStrategy:
    """The strategy of a parameter that is read, and whose gradient is returned, as it rests; a copy
    that is read is a value, which forward makes."""
    trained = p.gradient is not None
    size, cast_s = (
        local_bytes(p.view, p.dtype, layout, mesh_shape),
        narrowing_s(p, layout, mesh_shape, profile),
    )
    state, traffic = OPTIMIZERS[optimizer] if trained else (0, 0)
    step_s = traffic * size / bandwidth_at(layout, profile)
    layouts = Strategy((layout,) if trained else (), (layout,))
    gradient, copy = (
        size if trained else 0,
        local_bytes(p.view, p.compute_dtype, layout, mesh_shape) if p.is_narrowed else 0,
    )
    if layout.host:
        return OpStrategy(layouts, step_s + cast_s, host_bytes=size * (1 + state) + gradient + copy)
    return OpStrategy(layouts, step_s + cast_s, size * (1 + state), gradient)


def bandwidth_at(storage: Layout, profile: HardwareProfile) -> float:
    """Bytes per second of the memory in which a parameter rests, as those reach it that take the
    optimizer's step."""
    if not storage.host:
        return profile.memory_bandwidth_bytes_per_s
    assert profile.host is not None, "nothing is offered on a host of which nothing is known"
    return profile.host.memory_bandwidth_bytes_per_s


def adding_partial(strategies: Sequence[OpStrategy], axes: Sequence[int]) -> tuple[OpStrategy, ...]:
    """Those with ZeRO's stage 1 on each of these axes on which the parameter rests sharded."""
    return tuple(
        s for s in strategies if all(stage_on(held_of(s), axis) in (0, 1) for axis in axes)
    )


@dataclass
class Making:
    """What is made as partial sums: what only passes them on does so where it is given them.

    Args:
        made: tensor → the op that makes it, and as which result.
    """

    ops: Sequence[Op]
    sources: Sequence[Source]
    made: Mapping[tuple[str, int], tuple[int, int]]
    _known: dict[tuple[tuple[str, int], int], bool] = field(default_factory=dict)

    def partial(self, ref: tuple[str, int], axis: int) -> bool:
        """Whether a tensor may be made so over an axis."""
        if (ref, axis) not in self._known:
            self._known[ref, axis] = any(
                all(self.partial(other, axis) for other in given)
                for given in self._given(ref, axis)
            )
        return self._known[ref, axis]

    def _given(self, ref: tuple[str, int], axis: int) -> Iterator[list[tuple[str, int]]]:
        """Of each strategy that makes it so, the operands that have to be partial sums over the
        axis themselves."""
        op, result = self.made[ref]
        cluster = self.sources[op].cluster
        operands = () if cluster is None else cluster.first.operands
        for strategy in self.ops[op].strategies:
            if isinstance(strategy.layouts.outputs[result].placements[axis], Partial):
                yield [
                    r
                    for r, at in zip(operands, strategy.layouts.inputs, strict=True)
                    if isinstance(at.placements[axis], Partial)
                ]


def _drop_dominated(alike: Sequence[OpStrategy]) -> Iterator[OpStrategy]:
    """Those of which no other, or none before it, takes as little time and rests with as few
    bytes, here and there."""
    for i, s in enumerate(alike):
        cost = _costs(s)
        others = [
            (_costs(t), j)
            for j, t in enumerate(alike)
            if all(a <= b for a, b in zip(_costs(t), cost, strict=True))
        ]
        if not any(other != cost or j < i for other, j in others):
            yield s


def _costs(strategy: OpStrategy) -> tuple[float, int, int]:
    return strategy.time_s, strategy.static_bytes, strategy.host_bytes
