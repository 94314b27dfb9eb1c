"""Seconds and bytes of holding a parameter through a step of several microbatches, for each ZeRO
stage (`autopar.cost.zero_stages`)."""

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
from autopar.cost.gradient_dtypes import Uncast, is_all_partial
from autopar.cost.op_times import compute_time
from autopar.cost.priced import OPTIMIZERS, Source
from autopar.cost.zero_stages import (
    HeldLayouts,
    StepMoves,
    ZeroStages,
    held_ways,
    parameter_layouts,
    stage_on,
)
from autopar.kernels.collectives import sum_dtype


@dataclass(frozen=True, slots=True)
class HeldPrices:
    """Prices of the strategies of parameters whose gradients are accumulated.

    The time of gathers, reductions and the optimizer's traffic is divided among the microbatches of
    a step. Each microbatch adds a gradient to its sum.

    Attributes:
        profile: the hardware.
        optimizer: name of the optimizer.
        moves: the collectives at the beginning and the end of a step.
        all_ways: whether strategies that another one dominates are included.
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
        """Return the priced ways to hold a parameter.

        Args:
            p: the parameter.
            storages: the layouts in which it may be stored.
            stages: the forced ZeRO stages.
            uncast: the ways to add its gradient without a cast; None if there are none.

        Returns:
            The strategies. Of those with equal layouts for microbatches, dominated ones are
            omitted, unless `all_ways` is set.
        """
        mesh_shape, trained = self.moves.mesh_shape, p.gradient is not None
        by_layouts: dict[Strategy, list[OpStrategy]] = {}
        for storage in storages:
            for ways in held_ways(storage, mesh_shape, trained=trained, stages=stages):
                for dtype in _added_in(p, ways, uncast, mesh_shape):
                    strategy = self._strategy(p, ways, dtype)
                    if strategy is not None:
                        by_layouts.setdefault(strategy.layouts, []).append(strategy)
        return tuple(
            s
            for alike in by_layouts.values()
            for s in (alike if self.all_ways else _drop_dominated(alike))
        )

    def _strategy(self, p: Parameter, held: HeldLayouts, dtype: torch.dtype) -> OpStrategy | None:
        """Return the strategy that adds gradients of this dtype. They are uncast if it is not the
        dtype of the parameter. Return None if no collectives lead between the layouts."""
        moved_s = self.moves.seconds(p, held)
        if moved_s is None:
            return None
        mesh_shape, trained = self.moves.mesh_shape, p.gradient is not None
        sums = local_bytes(p.view, sum_dtype(p.dtype), held.sums, mesh_shape) if trained else 0
        time_s = held_time(
            self.profile,
            self.optimizer,
            self.moves.num_microbatches,
            local_bytes(p.view, p.dtype, held.storage, mesh_shape) if trained else 0,
            sums,
            local_bytes(p.view, dtype, held.sums, mesh_shape) if trained else 0,
            held.storage,
        )
        time_s += (
            narrowing_s(p, held.storage, mesh_shape, self.profile) / self.moves.num_microbatches
        )
        gradient = held.sums if dtype == p.dtype else held.sums.left_uncast()
        is_moved = held.working != held.storage or (trained and held.sums != held.storage)
        return OpStrategy(
            Strategy((gradient,) if trained else (), (held.working,)),
            time_s + moved_s,
            static_bytes=self._device_bytes(p, held),
            gradient_bytes=sums,
            communication_s=moved_s,
            storage=held.storage if is_moved else None,
            host_bytes=self._host_bytes(p, held) if held.storage.host else 0,
        )

    def _device_bytes(self, p: Parameter, held: HeldLayouts) -> int:
        """Return the bytes of a device that the stored parameter with its optimizer state, and a
        copy in its working layout, occupy during the whole step."""
        size = 0
        if not held.storage.host:
            size += self._stored_bytes(p, held)
        is_copied = held.working != held.storage or p.is_narrowed
        if is_copied and not held.working.host:
            size += local_bytes(p.view, p.compute_dtype, held.working, self.moves.mesh_shape)
        return size

    def _host_bytes(self, p: Parameter, held: HeldLayouts) -> int:
        """Return the bytes of the host's memory for a parameter that is stored there, with its
        optimizer state, gradient and narrowed copy."""
        size, mesh_shape = self._stored_bytes(p, held), self.moves.mesh_shape
        if p.gradient is not None:
            size += local_bytes(p.view, sum_dtype(p.dtype), held.storage, mesh_shape)
        if p.is_narrowed:
            size += local_bytes(p.view, p.compute_dtype, held.storage, mesh_shape)
        return size

    def _stored_bytes(self, p: Parameter, held: HeldLayouts) -> int:
        state, _ = OPTIMIZERS[self.optimizer] if p.gradient is not None else (0, 0)
        return (1 + state) * local_bytes(p.view, p.dtype, held.storage, self.moves.mesh_shape)


def _added_in(
    p: Parameter, held: HeldLayouts, uncast: Uncast | None, mesh_shape: Sequence[int]
) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a gradient may have when it is added."""
    if p.gradient is None or uncast is None or held.sums not in uncast.layouts:
        return (p.dtype,)
    return (uncast.dtype,) if is_all_partial(held.sums, mesh_shape) else (p.dtype, uncast.dtype)


def held_time(
    profile: HardwareProfile,
    optimizer: str,
    num_microbatches: int,
    rests: int,
    sums: int,
    added: int,
    storage: Layout,
) -> float:
    """Return the seconds per microbatch of the optimizer and of adding a gradient to its sum.

    Args:
        profile: the hardware.
        optimizer: name of the optimizer.
        num_microbatches: microbatches of a step.
        rests: local bytes of the stored parameter; 0 if it is not trained.
        sums: local bytes of the sum. It is read and written, but only written on the first
            microbatch.
        added: local bytes of the gradient.
        storage: storage layout; on the hosts, their memory bandwidth counts.
    """
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
    """Return the seconds to cast a parameter to the dtype in which ops read it; 0 without a cast.

    Args:
        p: the parameter.
        storage: layout in which the copy is computed.
        mesh_shape: devices per mesh axis.
        profile: the hardware.
    """
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
    """Return the priced strategy of a parameter that ops read in its storage layout, in which its
    gradient also arrives.

    A copy in a narrower dtype is a forward value, and is not counted here.

    Args:
        p: the parameter.
        layout: its storage layout.
        mesh_shape: devices per mesh axis.
        optimizer: name of the optimizer.
        profile: the hardware.
    """
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
    """Return the bytes per second that an optimizer step reaches in the memory in which a parameter
    is stored."""
    if not storage.host:
        return profile.memory_bandwidth_bytes_per_s
    assert profile.host is not None, "without figures for the host, nothing is offloaded"
    return profile.host.memory_bandwidth_bytes_per_s


def adding_partial(strategies: Sequence[OpStrategy], axes: Sequence[int]) -> tuple[OpStrategy, ...]:
    """Return the strategies with ZeRO stage 1 on those of these axes over which the stored
    parameter is sharded."""
    return tuple(
        s
        for s in strategies
        if all(stage_on(parameter_layouts(s), axis) in (0, 1) for axis in axes)
    )


@dataclass
class PartialSumSearch:
    """Finds tensors that may be computed as partial sums.

    Ops that only pass on partial sums compute them if their operands are partial sums.

    Args:
        ops: the ops of the problem.
        sources: source of each op.
        producers: tensor → the op that computes it, and the index of the result.
    """

    ops: Sequence[Op]
    sources: Sequence[Source]
    producers: Mapping[tuple[str, int], tuple[int, int]]
    _known: dict[tuple[tuple[str, int], int], bool] = field(default_factory=dict)

    def partial(self, ref: tuple[str, int], axis: int) -> bool:
        """Return whether a tensor may be computed as partial sums over a mesh axis."""
        if (ref, axis) not in self._known:
            self._known[ref, axis] = any(
                all(self.partial(other, axis) for other in operands)
                for operands in self._partial_operands(ref, axis)
            )
        return self._known[ref, axis]

    def _partial_operands(self, ref: tuple[str, int], axis: int) -> Iterator[list[tuple[str, int]]]:
        """Yield, for each strategy that computes a tensor as partial sums over the axis, the
        operands that must be partial sums over it."""
        op, result = self.producers[ref]
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
    """Yield the strategies that no other strategy dominates in seconds and bytes on devices and
    hosts.

    Of equal strategies only the first is yielded.
    """
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
