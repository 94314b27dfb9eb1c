"""Checks of the values of options. Each raises an error that states what may be passed.

This module does not import torch, like `autopar.request`, which declares the options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from autopar.core.terminal import parse_size
from autopar.errors import AutoparError, ConstraintError

if TYPE_CHECKING:
    from autopar.constraints import Constraint

Precision = Literal["bf16", "fp16"]
Check: TypeAlias = Callable[[str, Any], None]
"""Raises AutoparError if the option of this name cannot have this value."""


def check_choice(
    name: str,
    value: object,
    choices: Sequence[str],
    *,
    form: str = "{name}={value!r}",
    otherwise: str = "",
) -> None:
    """Raise AutoparError if a value is not one of the choices.

    Args:
        name: name of the option.
        value: the value.
        choices: the values that are allowed.
        form: format of the option and its value in the message.
        otherwise: further values that may be passed, in words.
    """
    if value not in choices:
        remedy = f"pass one of {', '.join(choices)}{otherwise}"
        raise AutoparError(f"{form.format(name=name, value=value)} is not known", remedy=remedy)


def among(choices: Sequence[str], **how: str) -> Check:
    return lambda name, value: check_choice(name, value, choices, **how)


def read_budget(value: Any) -> Any:
    """Return a memory budget in whole bytes, if it is a number or a text such as ``"80GiB"``."""
    if isinstance(value, str):
        return parse_size(value)
    return int(value) if is_number(value) and math.isfinite(value) else value


def check_budget(name: str, value: Any) -> None:
    if value is not None and not (is_number(value) and 0 < value < math.inf):
        raise AutoparError(
            f"{name}={value!r} is not a memory budget",
            remedy='pass bytes per device, for example 80 * 2**30 or "80GiB"',
        )


def check_precision(name: str, value: Any) -> None:
    if value is not None:
        check_choice(name, value, get_args(Precision), otherwise=", or None")


def at_least(least: int, what: str) -> Check:
    """Return the check of an option that is ``"auto"`` or a number of `what`, at least `least`."""

    def check(name: str, value: Any) -> None:
        """Raise AutoparError if the value is neither."""
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if value != "auto" and not (is_integer and value >= least):
            raise AutoparError(
                f"{name}={value!r} is not a number of {what}",
                remedy=f'pass an integer that is at least {least}, or "auto"',
            )

    return check


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_gap(name: str, value: Any) -> None:
    if not (is_number(value) and 0 <= value < 1):
        raise AutoparError(
            f"{name}={value} is not a relative gap",
            remedy="pass a number that is at least 0 and below 1, for example 0.01",
        )


def check_limit(name: str, value: Any) -> None:
    if not (is_number(value) and value > 0.0):
        raise AutoparError(
            f"{name}={value} is not a time limit",
            remedy="pass a positive number of seconds, for example 60, or leave it out",
        )


def check_name(name: str, value: Any) -> None:
    """Check the type only. `autopar.solve.check_solver` checks whether the solver is installed."""
    if not isinstance(value, str):
        raise AutoparError(
            f"{name}={value!r} is not the name of a solver",
            remedy='pass a name, for example "highs" or "cbc"',
        )


def check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise AutoparError(
            f"{name}={value!r} is neither True nor False", remedy="pass True or False"
        )


def as_constraints(constraints: Any) -> tuple[Constraint, ...]:
    """Return constraints as a tuple; raise ConstraintError if they are not a sequence."""
    if not isinstance(constraints, Iterable) or isinstance(constraints, str):
        raise ConstraintError(
            f"constraints={constraints} is not a sequence",
            remedy="pass a list of constraints: constraints=[...]",
        )
    return tuple(constraints)


def _is_own(function: FunctionType) -> bool:
    return function.__module__.startswith("autopar.constraints.")


def check_constraints(_: str, value: Any) -> None:
    if not value:
        return
    from autopar.constraints import Constraint  # which needs torch

    for constraint in value:
        if isinstance(constraint, Constraint):
            continue
        if isinstance(constraint, FunctionType) and _is_own(constraint):
            raise ConstraintError(
                f"{constraint.__name__} is a function that returns a constraint",
                remedy=f"call it: {constraint.__name__}(...)",
            )
        raise ConstraintError(
            f"{constraint!r} is not a constraint",
            remedy="use the functions of autopar.constraints, for example fsdp()",
        )
