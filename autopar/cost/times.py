"""Seconds of one op on its local tensors, and of one collective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from autopar.analysis.work import computes_in, works
from autopar.collective import Collective, Kind, collective_time, least_per_byte, share_of_bucket
from autopar.cost.compute import compute_time
from autopar.hardware import HardwareProfile
from autopar.layout import Layout, Strategy, local_shape
from autopar.mesh import Mesh
from autopar.rules import Call, TensorInfo, num_senders, own_moves
from autopar.strategies import Member


class CollectivePrices:
    """What collectives take on a mesh and profile, each by itself, remembered per collective."""

    def __init__(self, mesh: Mesh, profile: HardwareProfile) -> None:
        self.mesh, self.profile = mesh, profile
        self._known: dict[Collective, float] = {}
        self._per_byte: dict[tuple[Kind, int], float] = {}

    def __call__(self, collective: Collective) -> float:
        if collective not in self._known:
            link = self.mesh.link(collective.axis) if collective.axis >= 0 else ""
            self._known[collective] = collective_time(collective, collective.size_in(self.mesh.shape), link, self.profile)
        return self._known[collective]

    def share(self, collective: Collective) -> float:
        """Of one that may share a bucket, what it takes as its share of it, or by itself where that is less."""
        kind, axis = collective.kind, collective.axis
        size, link = self.mesh.shape[axis], self.mesh.link(axis)
        if (kind, axis) not in self._per_byte:
            self._per_byte[kind, axis] = least_per_byte(kind, size, link, self.profile)
        return min(self(collective), share_of_bucket(collective, size, link, self.profile, self._per_byte[kind, axis]))


@lru_cache(maxsize=2**16)  # equal layers, and strategies of one op, ask for the same
def local_info(info: TensorInfo, layout: Layout, mesh_shape: Sequence[int]) -> TensorInfo:
    """What one rank holds of a tensor."""
    return TensorInfo(local_shape(info.shape, layout, mesh_shape), info.dtype)


def call_time(call: Call, strategy: Strategy, mesh_shape: Sequence[int], profile: HardwareProfile) -> float:
    """Time of one op on its local tensors."""
    inputs = [local_info(i, layout, mesh_shape) for i, layout in zip(call.inputs, strategy.inputs, strict=True)]
    outputs = [local_info(o, layout, mesh_shape) for o, layout in zip(call.outputs, strategy.outputs, strict=True)]
    dtype = computes_in(inputs)
    senders = num_senders(call, strategy, mesh_shape)
    mirrored = any(layout.special for layout in strategy.outputs)  # results have no halos
    done = works(call.target, call.args, call.kwargs, inputs, outputs, senders, mirrored=mirrored, by_kernels=profile.has_row_kernels)
    return sum(n * compute_time(w, dtype, profile) for w, n in done)


def own_collectives(members: Iterable[tuple[Member, Strategy]], mesh_shape: Sequence[int]) -> tuple[Collective, ...]:
    """What the members of a cluster move by themselves, one after another."""
    return tuple(c for member, strategy in members for c in own_moves(member.call, strategy, mesh_shape))
