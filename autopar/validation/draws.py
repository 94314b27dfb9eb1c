"""Check random draws of a trace: no two of them share their numbers, and the state that all of them
read is increased by one at each call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.trace import Trace
from autopar.errors import ValidationError
from autopar.ops import random
from autopar.rules import where_of
from autopar.validation.op_law import DRAWS
from autopar.validation.states import invalid

# --------------------------------------------------------------------------------------------------
# Random numbers by position: draws, steps and seeds must be independent, and a rank's part of a
# draw must equal that part of the whole draw.
#
# The functions run on few elements, from fixed states, so that the verdict is always the same. With
# n numbers the correlation of independent draws exceeds 6 / √n once in 10⁹ times.

_ROWS, _COLUMNS = 48, 64
_FAR = 6.0 / (_ROWS * _COLUMNS) ** 0.5
_KEPT = 0.7
_SETTINGS: dict[Callable[..., Tensor], tuple[tuple[Any, ...], float, float]] = {
    random.keep_mask: ((1.0 - _KEPT,), _KEPT, (_KEPT * (1.0 - _KEPT)) ** 0.5),
    random.uniform: ((0.0, 1.0, torch.float32), 0.5, 12.0**-0.5),
    random.normal: ((0.0, 1.0, torch.float32), 0.0, 1.0),
    random.randint: ((0, 1001, torch.int64), 500.0, (1001.0**2 / 12.0) ** 0.5),
}
"""Function → its settings, and the mean and the standard deviation of its numbers with them."""
_PARTS = ((0, 24, 0, 64), (24, 24, 0, 64), (0, 48, 32, 32), (47, 1, 63, 1))
"""First row, rows, first column, columns."""


def check_generator(kinds: Iterable[Callable[..., Tensor]]) -> None:
    """Test these functions of `autopar.ops.random`.

    Raises:
        ValidationError: if draws are correlated, or a part of a draw is not the draw's part.
    """
    for kind in sorted(kinds, key=lambda k: k.__name__):
        _check_independent(kind)
        _check_parts(kind)


def _check_independent(kind: Callable[..., Tensor]) -> None:
    first, other = random.initial_state(0), random.initial_state(1)
    draws = {
        f"draw {draw} of step {step}": _drawn(kind, first + step, draw)
        for step, draw in itertools.product(range(3), range(3))
    }
    draws["draw 0 of another seed"] = _drawn(kind, other, 0)
    settings, mean, deviation = _SETTINGS[kind]
    for name, numbers in draws.items():
        off = abs(float(numbers.mean()) - mean) / deviation
        spread = float(numbers.std()) / deviation
        if off > _FAR or not 0.9 < spread < 1.1:
            raise _error(kind, f"{name} has mean {float(numbers.mean()):.3g} with {settings}")
        _compare(kind, f"neighbours in {name}", numbers[:-1], numbers[1:])
        _compare(kind, f"rows of {name}", numbers[:-_COLUMNS], numbers[_COLUMNS:])
    for (a, one), (b, two) in itertools.combinations(draws.items(), 2):
        _compare(kind, f"{a} and {b}", one, two)


def _drawn(kind: Callable[..., Tensor], state: Tensor, draw: int) -> Tensor:
    made = kind(state, (_ROWS, _COLUMNS), *_SETTINGS[kind][0], draw=draw)
    return made.double().flatten()


def _compare(kind: Callable[..., Tensor], what: str, one: Tensor, two: Tensor) -> None:
    a, b = one - one.mean(), two - two.mean()
    size = float(a.norm() * b.norm())
    if not size or abs(float(a @ b)) / size > _FAR:
        raise _error(kind, f"{what} are correlated")


def _check_parts(kind: Callable[..., Tensor]) -> None:
    sizes, settings = (_ROWS, _COLUMNS), _SETTINGS[kind][0]
    state = random.initial_state(0)
    whole = kind(state, sizes, *settings, draw=1)
    for row, rows, column, columns in _PARTS:
        starts = (row, column)
        part = kind(state, (rows, columns), *settings, draw=1, starts=starts, sizes=sizes)
        if not torch.equal(part, whole[row : row + rows, column : column + columns]):
            raise _error(
                kind,
                (f"the shard of {rows} × {columns} at {starts} does not match the full tensor"),
            )


def _error(kind: Callable[..., Tensor], why: str) -> ValidationError:
    return invalid(f"random numbers of {kind.__name__}: {why}")


_ADD = torch.ops.aten.add.Scalar
_LARGEST = 2**31


def check_draws(trace: Trace) -> None:
    """Check that draws are independent of each other and differ from step to step.

    Raises:
        ValidationError: for a draw that is correlated with an earlier one, or a state that is not
            increased.
    """
    seen: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in trace.graph.nodes:
        if node.op == "call_function" and node.target in DRAWS:
            number = node.kwargs.get("draw", node.args[-1])
            here = node.args[0], number
            if here in seen:
                what = (
                    f"{node.meta['key']} draws the same numbers as {seen[here].meta['key']}: both"
                    f" are draw {number} of a step"
                )
                raise invalid(what, where_of(node))
            if type(number) is not int or not 0 <= number < _LARGEST:
                raise invalid(f"{node.meta['key']} is draw {number!r}", where_of(node))
            seen[here] = node
    if seen:
        _check_state(trace, {node for node, _ in seen})
        check_generator({node.target for node in seen.values()})


def _check_state(trace: Trace, states: set[fx.Node]) -> None:
    held = {b.node for b in trace.buffers if b.name == random.STATE}
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    after = results[trace.mutated[random.STATE]] if random.STATE in trace.mutated else None
    goes_on = (
        isinstance(after, fx.Node)
        and after.target is _ADD
        and after.args[0] in states
        and after.args[1] == 1
    )
    if {state.name for state in states} != held or not goes_on:
        raise invalid("random draws do not all use one state that advances by one per call")
