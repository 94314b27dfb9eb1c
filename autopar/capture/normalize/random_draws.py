"""Replace random ops of torch with those of `autopar.ops.random`, whose numbers depend on the
position of an element and on the random state.

A graph with random ops gets an additional buffer, the state, which every step increments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.graphs import aten, calls, cast, dtype_of, emit, shape_of, sweep
from autopar.ops import random

_Replacement = Callable[[fx.Node, fx.Node], fx.Node | None]


def replace_random(graph: fx.Graph) -> fx.Node | None:
    """Replace the random ops that have a counterpart; others remain in the graph.

    Returns:
        The placeholder of the state; None if the graph has no random ops.
    """
    _replace_inactive_dropouts(graph)
    for node in calls(graph, *random.WITHOUT_GENERATOR):
        if node.kwargs.get("generator") is None:  # ``torch.randn(shape, generator=None)``
            node.target = random.WITHOUT_GENERATOR[node.target]
            node.kwargs = {
                name: value for name, value in node.kwargs.items() if name != "generator"
            }
    drawing = calls(
        graph, aten.native_dropout.default, aten.rrelu_with_noise_functional.default, *_REPLACEMENTS
    )
    if not drawing:
        return None
    state = _state(graph)
    for node in drawing:
        with graph.inserting_before(node):
            if node.target is aten.native_dropout.default:
                _replace_dropout(node, state)
                continue
            if node.target is aten.rrelu_with_noise_functional.default:
                _replace_slopes(node, state)
                continue
            replacement = _REPLACEMENTS[node.target](node, state)
            if replacement is not None:
                node.replace_all_uses_with(replacement)
    for node in calls(graph, aten.native_dropout_backward.default):
        with graph.inserting_before(node):
            node.replace_all_uses_with(emit(node, random.masked_scale, node.args, shape_of(node)))
    _count_unread(graph)
    return state


def _count_unread(graph: fx.Graph) -> None:
    """Sweep the graph, and set ``draw`` of each remaining draw to its distance from the previous
    one; unused draws count, since eager torch runs them."""
    every = [node for node in graph.nodes if "draw" in node.kwargs]
    sweep(graph)
    unread, step = set(graph.nodes), 0
    for node in every:
        step += 1
        if node in unread:
            node.kwargs, step = {**node.kwargs, "draw": step}, 0


def next_state(graph: fx.Graph, state: fx.Node) -> fx.Node:
    """Insert the new value of the random state before the output of the graph."""
    output = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(output):
        return emit(state, aten.add.Scalar, (state, 1), ())


def number_draws(graph: fx.Graph) -> None:
    """Number the draws of the graph in order; ``draw`` of each is its distance from the previous
    one before, and its number afterwards."""
    number = -1
    for node in graph.nodes:
        if "draw" in node.kwargs:
            number += node.kwargs["draw"]
            node.kwargs = {**node.kwargs, "draw": number}


def _state(graph: fx.Graph) -> fx.Node:
    """Insert a placeholder for the state before the other placeholders."""
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        state = graph.placeholder(random.STATE)
    sample = first.meta["val"]
    value = sample.new_empty((), dtype=torch.int64)
    state.meta.update(phase="forward", module=random.STATE, source="", val=value)
    return state


def _replace_inactive_dropouts(graph: fx.Graph) -> None:
    for node in calls(graph, aten.native_dropout.default):
        x, p, train = node.args
        if train is False or p == 0.0:
            with graph.inserting_before(node):
                every = emit(
                    node,
                    aten.ones_like.default,
                    (x,),
                    shape_of(x),
                    dtype=torch.bool,
                    kwargs={"dtype": torch.bool},
                )
            _replace_results(node, x, every)
    sweep(graph)


def _replace_dropout(node: fx.Node, state: fx.Node) -> None:
    x, p, _ = node.args
    mask = _draw(node, state, random.keep_mask, (shape_of(x), float(p)), shape_of(x), torch.bool)
    dropped = emit(
        node,
        random.masked_scale,
        (x, mask, 1.0 / (1.0 - p) if p < 1.0 else 0.0),
        shape_of(x),
        dtype=dtype_of(x),
    )
    _replace_results(node, dropped, mask)


def _replace_slopes(node: fx.Node, state: fx.Node) -> None:
    """Replace a randomized leaky relu in training mode: draw a slope for each element that is not
    positive."""
    x, _, lower, upper = node.args[:4]
    shape, dtype = shape_of(x), dtype_of(x)
    drawn = _draw(node, state, random.uniform, (shape, lower, upper, dtype), shape, dtype)
    below = emit(node, aten.le.Scalar, (x, 0), shape, dtype=torch.bool)
    slopes = emit(node, aten.where.ScalarOther, (below, drawn, 1), shape, dtype=dtype)
    _replace_results(node, emit(node, aten.mul.Tensor, (x, slopes), shape, dtype=dtype), slopes)


def _replace_results(node: fx.Node, result: fx.Node, mask: fx.Node) -> None:
    for user in list(node.users):
        user.replace_all_uses_with(result if user.args[1] == 0 else mask)


def _draw(
    node: fx.Node,
    state: fx.Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> fx.Node:
    return emit(
        node, target, (state, list(args[0]), *args[1:]), shape, dtype=dtype, kwargs={"draw": 1}
    )


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _replace_shaped(kind: Callable[..., Any], first: float, second: float) -> _Replacement:
    """Return a replacement for ``rand``, ``randn`` and their ``_like`` forms, which only need the
    shape and dtype of the result."""

    def replace(node: fx.Node, state: fx.Node) -> fx.Node:
        """Replace a draw that only needs the shape and dtype of its result."""
        shape, dtype = shape_of(node), dtype_of(node)
        return _draw(node, state, kind, (shape, first, second, dtype), shape, dtype)

    return replace


def _replace_ranged(
    kind: Callable[..., Any], names: tuple[str, str], defaults: tuple[float, float]
) -> _Replacement:
    """Return a replacement for ``uniform(x, from, to)`` and ``normal_functional(x, mean, std)``."""

    def replace(node: fx.Node, state: fx.Node) -> fx.Node:
        """Replace a draw whose distribution parameters are arguments."""
        shape, dtype = shape_of(node), dtype_of(node)
        first, second = (
            _argument(node, i + 1, name, default)
            for i, (name, default) in enumerate(zip(names, defaults, strict=True))
        )
        return _draw(node, state, kind, (shape, first, second, dtype), shape, dtype)

    return replace


def _integers(low: int | None, high: int) -> _Replacement:
    """Return a replacement for ``randint`` and its variants; `low` and `high` are the positions of
    the arguments."""

    def replace(node: fx.Node, state: fx.Node) -> fx.Node | None:
        """Replace a draw of integers; return None if the range is too large."""
        shape, dtype = shape_of(node), dtype_of(node)
        begin, end = node.args[low] if low is not None else 0, node.args[high]
        if end - begin > random.LARGEST_RANGE:
            return None
        return _draw(node, state, random.randint, (shape, begin, end, dtype), shape, dtype)

    return replace


def _as_result(node: fx.Node, value: fx.Node) -> fx.Node:
    """Copy a value of the shape of `node` to the dtype of `node`."""
    dtype, shape = dtype_of(node), shape_of(node)
    kwargs = {"dtype": dtype}
    return emit(node, aten._to_copy.default, (value,), shape, dtype=dtype, kwargs=kwargs)


def _bernoulli_p(node: fx.Node, state: fx.Node) -> fx.Node:
    p, shape = _argument(node, 1, "p", 0.5), shape_of(node)
    ones = _draw(node, state, random.keep_mask, (shape, 1.0 - p), shape, torch.bool)
    return _as_result(node, ones)


def _bernoulli(node: fx.Node, state: fx.Node) -> fx.Node:
    """Draw booleans with the probabilities in the operand."""
    shape, probabilities = shape_of(node), node.args[0]
    drawn = _draw(
        node, state, random.uniform, (shape, 0.0, 1.0, torch.float32), shape, torch.float32
    )
    ones = emit(node, aten.lt.Tensor, (drawn, probabilities), shape, dtype=torch.bool)
    return _as_result(node, ones)


def _exponential(node: fx.Node, state: fx.Node) -> fx.Node:
    rate, dtype = _argument(node, 1, "lambd", 1.0), dtype_of(node)
    result = _exponentials(
        node, state, shape_of(node), torch.promote_types(dtype, torch.float32), float(rate)
    )
    return _as_result(node, result)


def _exponentials(
    node: fx.Node, state: fx.Node, shape: Sequence[int], dtype: torch.dtype, rate: float = 1.0
) -> fx.Node:
    """Draw exponential numbers by inversion, −log(1 − u) / rate. They are never 0, and use at least
    float32, whose precision covers the tail."""
    drawn = _draw(node, state, random.uniform, (shape, 0.0, 1.0, dtype), shape, dtype)
    negative = emit(node, aten.neg.default, (drawn,), shape, dtype=dtype)
    logarithm = emit(node, aten.log1p.default, (negative,), shape, dtype=dtype)
    below = emit(
        node, aten.clamp_max.default, (logarithm, -random.LEAST_EXPONENTIAL), shape, dtype=dtype
    )
    return emit(node, aten.div.Tensor, (below, -rate), shape, dtype=dtype)


def _multinomial(node: fx.Node, state: fx.Node) -> fx.Node:
    """Draw categories by exponential times: each category gets a time whose rate is its weight, and
    those with the smallest times are drawn. With replacement, each draw has its own times."""
    weights, num = node.args[:2]
    replaced, dtype = (
        _argument(node, 2, "replacement", False) and num > 1,
        torch.promote_types(dtype_of(weights), torch.float32),
    )
    shape, result = shape_of(weights), shape_of(node)
    weights = cast(node, weights, dtype)
    if replaced:
        weights = emit(
            node, aten.unsqueeze.default, (weights, -2), (*shape[:-1], 1, shape[-1]), dtype=dtype
        )
        shape = (*shape[:-1], num, shape[-1])
    times = _exponentials(node, state, shape, dtype)
    rates = emit(node, aten.div.Tensor, (weights, times), shape, dtype=dtype)
    if replaced or num == 1:
        return emit(node, aten.argmax.default, (rates, -1, not replaced), result, dtype=torch.int64)
    how = {"stable": True, "dim": -1, "descending": True}
    order = emit(node, aten.argsort.stable, (rates,), shape, dtype=torch.int64, kwargs=how)
    return emit(node, aten.slice.Tensor, (order, len(shape) - 1, 0, num), result, dtype=torch.int64)


def _gamma(node: fx.Node, state: fx.Node) -> fx.Node:
    """Draw gamma numbers, in at least float32."""
    alpha, shape, dtype = (
        node.args[0],
        shape_of(node),
        torch.promote_types(dtype_of(node), torch.float32),
    )
    alpha = cast(node, alpha, dtype)
    tries = (*shape, random.GAMMA_TRIES)
    normals = _draw(node, state, random.normal, (tries, 0.0, 1.0, dtype), tries, dtype)
    uniforms = _draw(node, state, random.uniform, (tries, 0.0, 1.0, dtype), tries, dtype)
    last = _draw(node, state, random.uniform, (shape, 0.0, 1.0, dtype), shape, dtype)
    numbers = emit(node, random.gamma, (alpha, normals, uniforms, last), shape, dtype=dtype)
    return _as_result(node, numbers)


def _dirichlet(node: fx.Node, state: fx.Node) -> fx.Node:
    """Draw gamma numbers and divide them by their sum."""
    shape = shape_of(node)
    numbers = _gamma(node, state)
    total = emit(node, aten.sum.dim_IntList, (numbers, [-1], True), (*shape[:-1], 1))
    return emit(node, aten.div.Tensor, (numbers, total), shape)


def _permutation(node: fx.Node, state: fx.Node) -> fx.Node:
    """Draw a permutation as the order of random integers."""
    shape = shape_of(node)
    drawn = _draw(
        node,
        state,
        random.randint,
        (shape, 0, random.LARGEST_RANGE, torch.int64),
        shape,
        torch.int64,
    )
    order = emit(
        node, aten.argsort.stable, (drawn,), shape, dtype=torch.int64, kwargs={"stable": True}
    )
    return _as_result(node, order)


_REPLACEMENTS: dict[Callable[..., Any], _Replacement] = {
    **{
        op: _replace_shaped(random.uniform, 0.0, 1.0)
        for op in (aten.rand.default, aten.rand_like.default)
    },
    **{
        op: _replace_shaped(random.normal, 0.0, 1.0)
        for op in (aten.randn.default, aten.randn_like.default)
    },
    aten.uniform.default: _replace_ranged(random.uniform, ("from", "to"), (0.0, 1.0)),
    aten.normal_functional.default: _replace_ranged(random.normal, ("mean", "std"), (0.0, 1.0)),
    aten.randint.default: _integers(None, 0),
    aten.randint.low: _integers(0, 1),
    aten.randint_like.default: _integers(None, 1),
    aten.randint_like.low_dtype: _integers(1, 2),
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_p,
    aten.exponential.default: _exponential,
    aten.randperm.default: _permutation,
    aten.multinomial.default: _multinomial,
    aten._standard_gamma.default: _gamma,
    aten._sample_dirichlet.default: _dirichlet,
}
