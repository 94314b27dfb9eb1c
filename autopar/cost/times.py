"""Seconds of one op on its local tensors, and of one collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from autopar.analysis.work import computes_in, works
from autopar.collective import Collective, collective_time
from autopar.cost.compute import compute_time
from autopar.hardware import HardwareProfile
from autopar.layout import Layout, Strategy, local_shape
from autopar.mesh import Mesh
from autopar.rules import Call, TensorInfo, num_senders, own_moves
from autopar.strategies import Member


def price_collectives(mesh: Mesh, profile: HardwareProfile) -> Callable[[Collective], float]:
    """The price of one collective on this mesh and profile, remembered per collective."""
    links = [mesh.link(axis) for axis in range(len(mesh.axes))]
    known: dict[Collective, float] = {}

    def price(collective: Collective) -> float:
        if collective not in known:
            link = links[collective.axis] if collective.axis >= 0 else ""
            known[collective] = collective_time(collective, collective.size_in(mesh.shape), link, profile)
        return known[collective]

    return price


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
    return sum(n * compute_time(w, dtype, profile) for w, n in works(call.target, call.args, call.kwargs, inputs, outputs, senders))


def own_collectives(members: Iterable[tuple[Member, Strategy]], mesh_shape: Sequence[int]) -> tuple[Collective, ...]:
    """What the members of a cluster move by themselves, one after another."""
    return tuple(c for member, strategy in members for c in own_moves(member.call, strategy, mesh_shape))
