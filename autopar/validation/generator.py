"""Random numbers by position: that draws, steps and seeds are independent, and that a part of a
draw is the part of it.

The functions are run on few elements, from states that are the same each time, so that the verdict
is the same each time. With n numbers a correlation of independent draws is beyond 6 / √n once in
10⁹ times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from autopar import random_ops
from autopar.errors import ValidationError
from autopar.validation.states import invalid

_ROWS, _COLUMNS = 48, 64
_FAR = 6.0 / (_ROWS * _COLUMNS) ** 0.5
_KEPT = 0.7
_SETTINGS: dict[Callable[..., Tensor], tuple[tuple[Any, ...], float, float]] = {
    random_ops.keep_mask: ((1.0 - _KEPT,), _KEPT, (_KEPT * (1.0 - _KEPT)) ** 0.5),
    random_ops.uniform: ((0.0, 1.0, torch.float32), 0.5, 12.0**-0.5),
    random_ops.normal: ((0.0, 1.0, torch.float32), 0.0, 1.0),
    random_ops.randint: ((0, 1001, torch.int64), 500.0, (1001.0**2 / 12.0) ** 0.5),
}
"""Per function: settings, and the mean and the standard deviation of its numbers then."""
_PARTS = ((0, 24, 0, 64), (24, 24, 0, 64), (0, 48, 32, 32), (47, 1, 63, 1))
"""First row, rows, first column, columns."""


def check_generator(kinds: Iterable[Callable[..., Tensor]]) -> None:
    """Try these functions of `autopar.random_ops`.

    Raises:
        ValidationError: saying which draws are correlated, or which part is none.
    """
    for kind in sorted(kinds, key=lambda k: k.__name__):
        _check_independent(kind)
        _check_parts(kind)


def _check_independent(kind: Callable[..., Tensor]) -> None:
    first, other = random_ops.initial_state(0), random_ops.initial_state(1)
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
    state = random_ops.initial_state(0)
    whole = kind(state, sizes, *settings, draw=1)
    for row, rows, column, columns in _PARTS:
        starts = (row, column)
        part = kind(state, (rows, columns), *settings, draw=1, starts=starts, sizes=sizes)
        if not torch.equal(part, whole[row : row + rows, column : column + columns]):
            raise _error(kind, f"the part of {rows} × {columns} from {starts} on is none of it")


def _error(kind: Callable[..., Tensor], why: str) -> ValidationError:
    return invalid(f"random numbers of {kind.__name__}: {why}")
