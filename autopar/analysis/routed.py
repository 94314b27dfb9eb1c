"""What ranks share for the rows of dispatched experts, where these go between peers (`autopar.kernels.routes`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar import ops
from autopar.kernels.routes import Routes, shared_regions
from autopar.layout import Strategy, local_shape
from autopar.rules import Call, own_moves

_OPERANDS = 5  # tokens, picks, gates, up's and down's weights: the last of experts and of their gradient


@dataclass(frozen=True, slots=True)
class SharedRows:
    """A region along a mesh axis, of so many bytes on a rank: all nodes that use an equal one have it together."""

    axis: int
    name: str
    routes: Routes
    num_bytes: int


def shared_rows(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> tuple[SharedRows, ...]:
    """The regions of a call of experts, or of their gradient; none where it dispatches nothing."""
    moves = own_moves(call, strategy, mesh_shape)
    if not moves:
        return ()
    axis, infos = moves[0].axis, call.inputs[-_OPERANDS:]
    x, ids, _, up, down = (local_shape(i.shape, at, mesh_shape) for i, at in zip(infos, strategy.inputs[-_OPERANDS:], strict=True))
    sizes = x[1], down[1], up[0], mesh_shape[axis], math.prod(ids), infos[0].dtype.itemsize, infos[2].dtype.itemsize
    found = shared_regions(*sizes, backward=call.target is ops.experts_backward)
    return tuple(SharedRows(axis, name, routes, num_bytes) for (name, routes), num_bytes in found.items())
