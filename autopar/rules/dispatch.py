"""Tokens and experts split over one axis (`autopar.ops.experts`): the option, what it asks for,
what it moves, what a rank calls.

On an axis of n ranks that splits tokens, picks and gates by tokens and both weights by experts,
each of the T tokens' k picks goes to the rank of its expert, and what that makes comes back
(GShard's, Switch's and DeepSpeed-MoE's expert parallelism). A rank has T/n tokens of h features, of
which experts make d. It puts in, and sends (n−1)/n of it to others where all experts are picked
alike,

    forward     counts; rows of tokens T/n·k·h; what experts made of them T/n·k·d
    backward    counts; rows of results' gradients and of tokens T/n·k·(d + h), gates T/n·k;
                gradients of tokens T/n·k·h, of gates T/n·k

each by an all-to-all. How many rows go where hangs on the numbers: these are the ones expected of
balanced picks, for which the collectives are priced. With picks that are not, all wait for the rank
whose experts are picked most, here as where tokens are gathered.

At most one axis of a strategy dispatches. Experts are then split evenly; tokens may be uneven. On
the other axes all that the rule offers goes beside it. Where one of these splits experts too, a
rank sends to those of its own column, and parts add up.
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
"""By op, the operand that is the tokens; picks, gates, up's and down's weights follow."""
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
"""By op, of each of its collectives in their order: the kernel that can move the same between
peers, and whether an all-to-all takes one more pass over what it moves, which brings it together or
puts it in order."""
_ROWS = Shard(0)


def dispatch_options(call: Call) -> tuple[AxisOption, ...]:
    """The option of the op on one axis, where tokens and experts can both be split: every
    operand and result by its dim 0."""
    at = TOKENS[call.target]
    x, up = call.inputs[at], call.inputs[at + 3]
    if x.shape[0] < 2 or up.shape[0] < 2:
        return ()
    return (AxisOption((_ROWS,) * len(call.inputs), (_ROWS,) * len(call.outputs)),)


def dispatch_axes(call: Call, inputs: Sequence[Layout]) -> tuple[int, ...]:
    """The axes over which a call with operands in these layouts dispatches."""
    at = TOKENS.get(call.target)
    if at is None:
        return ()
    pairs = zip(inputs[at].placements, inputs[at + 3].placements, strict=True)
    return tuple(axis for axis, both in enumerate(pairs) if both == (_ROWS, _ROWS))


def num_senders(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> int:
    """Of how many ranks the rows come with which one computes; 1 where nothing is dispatched."""
    return math.prod(mesh_shape[axis] for axis in dispatch_axes(call, strategy.inputs))


def is_even(call: Call, strategy: Strategy, axes: Sequence[int], mesh_shape: Sequence[int]) -> bool:
    """Whether a call can dispatch over these axes."""
    experts = TOKENS[call.target] + 3
    return len(axes) <= 1 and strategy.inputs[experts].divides(
        call.inputs[experts].shape, mesh_shape
    )


def of_tokens(call: Call, strategy: Strategy) -> list[tuple[Layout, TensorInfo]]:
    """Layouts and shapes of what has tokens as its dim 0: all but the weights and their
    gradients."""
    at = TOKENS[call.target]
    inputs = list(zip(strategy.inputs, call.inputs, strict=True))[: at + 3]
    return inputs + list(zip(strategy.outputs, call.outputs, strict=True))[: 1 + at]


def moves(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> tuple[Collective, ...]:
    """Its own collectives."""
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
    """What a rank calls: experts from its own first one, or with all ranks of the axis together."""
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
# What an op moves between ranks by itself, beside what brings its operands to the layouts that it
# reads.
#
# Most ops move nothing: a rank computes with what it has. An op that does (`OWN`) has *own
# collectives*, which follow from its strategy alone and run inside of it, one after another, so
# that nothing runs beside them. The tuple of them is the one source of their price and of what an
# emitted node says that it moves.

OWN: Mapping[
    Callable[..., Any], Callable[[Call, Strategy, Sequence[int]], tuple[Collective, ...]]
] = {op: moves for op in TOKENS}


def own_moves(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> tuple[Collective, ...]:
    """The own collectives of a call at a strategy, in their order."""
    found = OWN.get(call.target)
    return found(call, strategy, mesh_shape) if found else ()
