"""States of kernels that do a product and the collective at its border: those of one after the
other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import fx

from autopar import ops
from autopar.core.layout import Strategy
from autopar.kernels import fused
from autopar.validation.communication_steps import MoveError, move
from autopar.validation.op_calls import expected_call, matches
from autopar.validation.states import Several, State, shown
from autopar.validation.traced import Traced

_FACTORS = 2


class Walking(Protocol):
    """One pass over an emitted graph (`autopar.validation.walk`)."""

    traced: Traced
    mesh_shape: tuple[int, ...]
    chosen: Mapping[str, Strategy]
    again: Mapping[str, Strategy]
    env: dict[fx.Node, Any]

    def made_by(self, origin: fx.Node, strategy: Strategy) -> State | Several:
        """Return the state of a traced node's results, after checking its strategy."""


def product_states(walk: Walking, node: fx.Node) -> State | Several:
    """Return the state of a kernel's node."""
    origin, strategy = _planned_strategy(walk, node, str(node.meta["key"]))
    if node.target is fused.all_gather_matmul:
        return _state_gathered(walk, node, origin, strategy)
    if node.target is fused.matmul_reduce_scatter:
        return _state_scattered(walk, node, origin, strategy)
    return _state_normed(walk, node, origin, strategy)


def _planned_strategy(walk: Walking, node: fx.Node, key: str) -> tuple[fx.Node, Strategy]:
    """Return a traced node and its strategy; for a recomputed node the one with which it runs
    again."""
    again = walk.again.get(key) if node.meta.get("recomputed") else None
    if key not in walk.traced.by_key or key not in walk.chosen:
        raise MoveError(f"the model or the plan has no {key}")
    return walk.traced.by_key[key], again or walk.chosen[key]


def _state_gathered(walk: Walking, node: fx.Node, origin: fx.Node, strategy: Strategy) -> Several:
    a, b, equation, operand, dim, axis, _ = node.args
    whole = move(
        walk.traced, walk.env[(a, b)[operand]], "all_gather", (dim, axis), None, walk.mesh_shape
    )
    made = _product(walk, node, origin, strategy, [a, b], str(equation), {int(operand): whole})
    return Several((whole, made))


def _state_scattered(walk: Walking, node: fx.Node, origin: fx.Node, strategy: Strategy) -> State:
    a, b, addend, equation, dim, axis, _ = node.args
    others = node.meta["kernel"].others
    strategy = (
        walk.chosen[str(node.meta["key"])] if others else strategy
    )  # a sum runs again as its own strategies say
    summed = _product(walk, node, origin, strategy, [a, b], str(equation), {})
    if (addend is None) != (not others):
        raise MoveError("its residual addition does not match the plan")
    if others:
        summed = _state_added(walk, node, others[0], summed, walk.env[addend])
    return move(walk.traced, summed, "reduce_scatter", (dim, "sum", axis), None, walk.mesh_shape)


def _state_normed(walk: Walking, node: fx.Node, origin: fx.Node, strategy: Strategy) -> Several:
    a, b, residual, weight, equation, dim, axis, _, *settings = node.args
    product = _product(walk, node, origin, strategy, [a, b], str(equation), {})
    part = move(walk.traced, product, "reduce_scatter", (dim, "sum", axis), None, walk.mesh_shape)
    total_key, squares_key, norm_key = node.meta["kernel"].others
    total = _state_added(walk, node, total_key, part, walk.env[residual])
    squares_of, squares_at = _planned_strategy(walk, node, squares_key)
    squares = _state_of_result(walk, squares_of, squares_at, [total])
    norm_of, norm_at = _planned_strategy(walk, node, norm_key)
    norm = _state_of_result(walk, norm_of, norm_at, [total, squares, walk.env[weight]])
    if list(norm_of.args[3:]) != settings or squares_of.args[1:] != (settings[2],):
        raise MoveError(f"its norm has settings {settings}, the model's {list(norm_of.args[3:])}")
    return Several((total, squares, norm))


def _state_added(walk: Walking, node: fx.Node, key: str, one: Any, other: Any) -> State:
    """Return the state of a sum of two states, in either order."""
    origin, strategy = _planned_strategy(walk, node, key)
    first = walk.traced.reads(origin)[0]
    states = [one, other] if isinstance(one, State) and one.ref == first else [other, one]
    if len(origin.args) != _FACTORS or origin.kwargs:
        raise MoveError(f"{key} is not a plain sum")
    return _state_of_result(walk, origin, strategy, states)


def _state_of_result(
    walk: Walking, origin: fx.Node, strategy: Strategy, states: Sequence[Any]
) -> State:
    """Return the state of a traced node's result, after checking its operands' states."""
    refs = walk.traced.reads(origin)
    if len(refs) != len(states):
        raise MoveError(f"it reads {len(states)} tensors, expected {len(refs)}")
    for number, (ref, layout) in enumerate(zip(refs, strategy.inputs, strict=True)):
        due = State(ref, layout, walk.traced.value(ref).dtype)
        if states[number] != due:
            raise MoveError(
                f"operand {number} of {origin.meta['key']} is {shown(states[number])},"
                f" expected {shown(due)}"
            )
    found = walk.made_by(origin, strategy)
    assert isinstance(found, State), "sums and norms have one result"
    return found


def _product(
    walk: Walking,
    node: fx.Node,
    origin: fx.Node,
    strategy: Strategy,
    factors: Sequence[Any],
    equation: str,
    instead: Mapping[int, State],
) -> State:
    """Return the state of the product of factors and a bias.

    Some factors have the states `instead` of those that the node reads.
    """
    local = expected_call(walk.traced.call(origin), strategy, walk.mesh_shape)
    bias, starts = node.kwargs.get("bias"), node.kwargs.get("starts", ())
    if local.target is not ops.dot or local.args[0] != equation:
        raise MoveError(f"it computes {equation!r}, expected {local.args[0]!r}")
    if not matches(starts, local.kwargs.get("starts", ()), walk.env, walk.mesh_shape):
        raise MoveError(f"its shards start at {starts}, expected {local.kwargs.get('starts', ())}")
    states = [instead.get(i, walk.env[factor]) for i, factor in enumerate(factors)]
    return _state_of_result(
        walk, origin, strategy, states if bias is None else [*states, walk.env[bias]]
    )
