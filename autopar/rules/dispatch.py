"""Expert parallelism: dispatch of tokens to experts that are sharded over the same axis
(`autopar.ops.experts`). This module has the axis option, its requirements, its collectives and the
local call.

On an axis of n ranks, tokens, expert indices and gates are sharded by tokens, and both weights by
experts. Each of the T tokens is routed to k experts. Its row is sent to the ranks of these experts,
and their results are sent back (as in GShard, Switch and DeepSpeed-MoE). A rank has T/n tokens with
h features, and experts return d features. The all-to-alls have the following local inputs, of which
a rank sends (n−1)/n to other ranks if all experts get the same number of tokens:

    forward     counts; rows of tokens T/n·k·h; results of experts T/n·k·d
    backward    counts; gradients of results and rows of tokens T/n·k·(d + h), gates T/n·k;
                gradients of tokens T/n·k·h, of gates T/n·k

The number of rows per rank depends on values. The collectives are priced for the expected numbers
with balanced routing. With unbalanced routing, all ranks wait for the rank whose experts get the
most tokens, as they also do if tokens are gathered.

A strategy dispatches over at most one axis. Experts are then sharded evenly; tokens may be sharded
unevenly. The other axes may use all other options of the rule. If another axis also shards experts,
a rank exchanges rows with the ranks of its own group along the dispatching axis, and the partial
results are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.tensor import Shard

from autopar import ops
from autopar.core.collective import Collective
from autopar.core.layout import Layout, Strategy, local_shape
from autopar.ops.expert_layers import dispatched_experts, dispatched_experts_backward
from autopar.rules.call import Call, TensorInfo, argument
from autopar.rules.notation import AxisOption
from autopar.rules.site import Local, Site, Starts

TOKENS: Mapping[Callable[..., Any], int] = {ops.experts: 0, ops.experts_backward: 1}
"""Op → number of the operand with the tokens; it is followed by expert indices, gates, and the up
and down weights."""
EXCHANGES: Mapping[Callable[..., Any], tuple[tuple[str, bool], ...]] = {
    ops.experts: (("moe_dispatch", False), ("moe_dispatch", True), ("moe_combine", True)),
    ops.experts_backward: (
        ("moe_dispatch", False),
        ("moe_dispatch", True),
        ("moe_dispatch", False),
        ("moe_combine", True),
        ("moe_combine", False),
    ),
}
"""Op → for each of its collectives, in order: the equivalent kernel between peers, and whether an
all-to-all needs an additional pass over its data that gathers or sorts rows."""
_ROWS = Shard(0)


def dispatch_options(call: Call) -> tuple[AxisOption, ...]:
    """Return the option that shards dim 0 of every operand and result on one axis; empty if there
    is only one token or one expert."""
    at = TOKENS[call.target]
    x, up = call.inputs[at], call.inputs[at + 3]
    if x.shape[0] < 2 or up.shape[0] < 2:
        return ()
    return (AxisOption((_ROWS,) * len(call.inputs), (_ROWS,) * len(call.outputs)),)


def dispatch_axes(call: Call, inputs: Sequence[Layout]) -> tuple[int, ...]:
    """Return the axes over which a call with these layouts of its operands dispatches."""
    at = TOKENS.get(call.target)
    if at is None:
        return ()
    pairs = zip(inputs[at].placements, inputs[at + 3].placements, strict=True)
    return tuple(axis for axis, both in enumerate(pairs) if both == (_ROWS, _ROWS))


def num_senders(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> int:
    """Return the number of ranks from which a rank receives rows; 1 if the call does not dispatch.

    Args:
        call: the call.
        strategy: its strategy.
        mesh_shape: number of devices on each axis of the mesh.
    """
    return math.prod(mesh_shape[axis] for axis in dispatch_axes(call, strategy.inputs))


def is_even(call: Call, strategy: Strategy, axes: Sequence[int], mesh_shape: Sequence[int]) -> bool:
    """Return whether a call can dispatch: over at most one axis, with evenly sharded experts.

    Args:
        call: the call.
        strategy: its strategy.
        axes: the axes over which it dispatches.
        mesh_shape: number of devices on each axis of the mesh.
    """
    experts = TOKENS[call.target] + 3
    return len(axes) <= 1 and strategy.inputs[experts].divides(
        call.inputs[experts].shape, mesh_shape
    )


def of_tokens(call: Call, strategy: Strategy) -> list[tuple[Layout, TensorInfo]]:
    """Return the layouts and shapes of the operands and results whose dim 0 is the tokens: all
    except the weights and their gradients."""
    at = TOKENS[call.target]
    inputs = list(zip(strategy.inputs, call.inputs, strict=True))[: at + 3]
    return inputs + list(zip(strategy.outputs, call.outputs, strict=True))[: 1 + at]


def moves(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> tuple[Collective, ...]:
    """Return the collectives that a dispatching call runs, in order; empty if it does not dispatch.

    Args:
        call: the call.
        strategy: its strategy.
        mesh_shape: number of devices on each axis of the mesh.
    """
    axes = dispatch_axes(call, strategy.inputs)
    if not axes:
        return ()
    at, (axis,) = TOKENS[call.target], axes
    shapes = [
        local_shape(i.shape, layout, mesh_shape)
        for i, layout in zip(call.inputs, strategy.inputs, strict=True)
    ]
    x, ids, _, up, down = shapes[at:]
    pairs, tokens, gates = math.prod(ids), call.inputs[at].dtype, call.inputs[at + 2].dtype

    def exchange(width: int, info_dtype: Any, rows: int = pairs) -> Collective:
        """Return the all-to-all of `rows` local rows with `width` elements each."""
        return Collective(
            "all_to_all",
            axis,
            0,
            0,
            "",
            str(info_dtype).removeprefix("torch."),
            rows * width * info_dtype.itemsize,
        )

    counts = exchange(up[0], call.inputs[at + 1].dtype, mesh_shape[axis])
    if at == 0:
        return counts, exchange(x[1], tokens), exchange(down[1], tokens)
    return (
        counts,
        exchange(down[1] + x[1], tokens),
        exchange(1, gates),
        exchange(x[1], tokens),
        exchange(1, gates),
    )


def local(site: Site) -> Local:
    """Return the call of a rank: with its own experts, or, if the call dispatches, together with
    all ranks along the axis."""
    call, strategy = site.call, site.strategy
    up = TOKENS[call.target] + 3
    num, layout = call.inputs[up].shape[0], strategy.inputs[up]
    axes = dispatch_axes(call, strategy.inputs)
    if not axes:
        return (
            site.change(start=site.start(layout, num, 0))
            if layout.splitters(0)
            else Local(call.target, call.args, call.kwargs)
        )
    target = dispatched_experts if call.target is ops.experts else dispatched_experts_backward
    settings = argument(call, "act"), argument(call, "size"), Starts(num, layout, 0, axes[0])
    most = math.prod(
        local_shape(call.inputs[up - 2].shape, strategy.inputs[up - 2], site.mesh_shape)
    )
    return Local(target, (*call.args[: up + 2], *settings, most, axes[0], False), {})


# --------------------------------------------------------------------------------------------------
# Collectives within an op, in addition to those that convert its operands to the layouts of the
# strategy.
#
# Most ops have none. Those of an op in `OWN` depend only on its strategy. They run within the op,
# one after another, and do not overlap with other work. The same tuple determines their price and
# the metadata of emitted nodes.

OWN: Mapping[
    Callable[..., Any], Callable[[Call, Strategy, Sequence[int]], tuple[Collective, ...]]
] = {op: moves for op in TOKENS}


def own_moves(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> tuple[Collective, ...]:
    """Return the collectives that a call runs within its op, in order.

    Args:
        call: the call.
        strategy: its strategy.
        mesh_shape: number of devices on each axis of the mesh.
    """
    collectives_of = OWN.get(call.target)
    return collectives_of(call, strategy, mesh_shape) if collectives_of else ()
