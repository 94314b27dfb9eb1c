"""Compare the call of an emitted node with the call that a rank must make: target, operands and
settings, argument by argument."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from autopar.core.layout import Layout, Strategy
from autopar.kernels import collectives as steps
from autopar.kernels import dispatched
from autopar.ops.in_place import functional_form
from autopar.rules import Call, Length, Local, Operand, Start, Starts, localize
from autopar.validation.op_law import DRAWS, VIEWS, aten
from autopar.validation.states import Place

Splitters = tuple[tuple[int, int], ...]


def place_of(node: fx.Node, env: Mapping[fx.Node, Any]) -> Place | None:
    """Return the state of a node that computes a rank's first index or the length of its part.
    Return None for other nodes."""
    if node.target in steps.PLACES:
        size, splitters = node.args
        kind = "start" if node.target is steps.local_start else "length"
        return Place(kind, int(size), tuple(tuple(pair) for pair in splitters))
    if (
        node.target is operator.sub
        and isinstance(node.args[0], fx.Node)
        and isinstance(env[node.args[0]], Place)
    ):
        start: Place = env[node.args[0]]
        return Place(start.kind, start.size, start.splitters, start.before + int(node.args[1]))
    return None


def written_operand(node: fx.Node) -> fx.Node | None:
    """Return the operand into which a node writes its result, if any."""
    form = functional_form(node.target) if node.op == "call_function" else None
    if form is None:
        return None
    written = node.kwargs[form[1]] if form[1] else node.args[0]
    return written if isinstance(written, fx.Node) else None


def expected_call(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> Local:
    """Return the call that a rank must make.

    Sizes of views and of random draws are derived here, those of other ops by `localize`, which
    `op_law` tests.

    Args:
        call: the call on global tensors.
        strategy: layouts of its operands and results.
        mesh_shape: sizes of the mesh axes.
    """
    if call.target in VIEWS and call.target is not aten.unsqueeze.default:
        return Local(
            aten.reshape.default, (call.args[0], _local_sizes(call, strategy, mesh_shape)), {}
        )
    if call.target in DRAWS and strategy.outputs[0].split:
        layout, shape = strategy.outputs[0], call.outputs[0].shape
        starts = tuple(
            Start(size, layout, dim) if layout.splitters(dim) else 0
            for dim, size in enumerate(shape)
        )
        args = (call.args[0], _local_sizes(call, strategy, mesh_shape), *call.args[2:])
        return Local(call.target, args, {**call.kwargs, "window": (starts, shape)})
    return localize(call, strategy, mesh_shape)


def _local_sizes(
    call: Call, strategy: Strategy, mesh_shape: Sequence[int]
) -> tuple[int | Length, ...]:
    layout, sizes = strategy.outputs[0], list[int | Length]()
    for dim, size in enumerate(call.outputs[0].shape):
        num = 1
        for axis in layout.splitters(dim):
            num *= mesh_shape[axis]
        sizes.append(size // num if size % num == 0 else Length(size, layout, dim))
    return tuple(sizes)


def differences(
    node: fx.Node, local: Local, env: Mapping[fx.Node, Any], mesh_shape: Sequence[int]
) -> Iterator[str]:
    """Iterate over the differences between a node's call and the expected call, as text.
    `operands_in` serves to compare the operands.

    Args:
        node: a node of the emitted graph.
        local: the expected call.
        env: the states so far.
        mesh_shape: sizes of the mesh axes.
    """
    target, without = functional_form(node.target) or (node.target, "")
    expected_target = dispatched.STEPS.get(local.target, local.target)
    if target is not expected_target:
        yield f"it calls {target}, expected {expected_target}"
        return
    kwargs = {name: value for name, value in node.kwargs.items() if name != without}
    args = (
        node.args[:-1] if expected_target in dispatched.TOGETHER else node.args
    )  # the last argument is the exchange of rows
    due = local.args[:-1] if expected_target in dispatched.TOGETHER else local.args
    for place, argument, value in _pairs(args, kwargs, due, local.kwargs):
        if not matches(argument, value, env, mesh_shape):
            yield f"its argument {place} is {argument}, expected {value}"


class _Missing:
    """Marks an argument that does not exist."""

    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def _pairs(
    args: Sequence[Any], kwargs: Mapping[str, Any], due: Sequence[Any], named: Mapping[str, Any]
) -> Iterator[tuple[Any, Any, Any]]:
    for position in range(max(len(args), len(due))):
        yield (
            position,
            (args[position] if position < len(args) else None),
            (due[position] if position < len(due) else None),
        )
    for name in {**kwargs, **named}:
        yield name, kwargs.get(name, _MISSING), named.get(name, _MISSING)


def matches(made: Any, due: Any, env: Mapping[fx.Node, Any], mesh_shape: Sequence[int]) -> bool:
    """Return whether an argument of a node is the expected one.

    Args:
        made: the argument of the node.
        due: the argument of the expected call.
        env: the states so far.
        mesh_shape: sizes of the mesh axes.
    """
    if isinstance(due, Operand):
        return isinstance(made, fx.Node)  # `operands_in` finds which one
    if isinstance(due, Start):
        return _is_place(made, "start", due, env, mesh_shape)
    if isinstance(due, Length):
        return _is_place(made, "length", due, env, mesh_shape)
    if isinstance(due, Starts):
        return _as_tuple(made) == (due.dim_size, splitters_of(due.layout, due.dim, mesh_shape))
    if isinstance(due, tuple | list):
        same_length = isinstance(made, tuple | list) and len(made) == len(due)
        return same_length and all(
            matches(a, b, env, mesh_shape) for a, b in zip(made, due, strict=True)
        )
    return type(made) is type(due) and (
        made == due or (made != made and due != due)
    )  # NaN differs from itself


def _is_place(
    made: Any, kind: str, due: Start | Length, env: Mapping[fx.Node, Any], mesh_shape: Sequence[int]
) -> bool:
    before = due.before if isinstance(due, Start) else 0
    here = Place(kind, due.dim_size, splitters_of(due.layout, due.dim, mesh_shape), before)
    return isinstance(made, fx.Node) and env.get(made) == here


def splitters_of(layout: Layout, dim: int, mesh_shape: Sequence[int]) -> Splitters:
    """Return (axis, axis size) of the axes that split a dim, outermost first.

    Args:
        layout: layout of the tensor.
        dim: the dim.
        mesh_shape: sizes of the mesh axes.
    """
    return tuple((axis, mesh_shape[axis]) for axis in layout.splitters(dim))


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list | tuple) else value


def operands_in(made: Any, due: Any) -> Iterator[tuple[int, fx.Node]]:
    """Iterate over the numbers of the operands that a call must read, each with the node in its
    position. Both arguments must have the same structure (`differences`)."""
    if isinstance(due, Operand):
        yield due.index, made
    elif isinstance(due, tuple | list):
        for a, b in zip(made, due, strict=False):
            yield from operands_in(a, b)


def node_operands(node: fx.Node, local: Local) -> list[tuple[int, fx.Node]]:
    """Return `operands_in` of all arguments of a node."""
    named = ((node.kwargs[name], due) for name, due in local.kwargs.items())
    return [
        *operands_in(node.args, local.args),
        *(pair for made, due in named for pair in operands_in(made, due)),
    ]
