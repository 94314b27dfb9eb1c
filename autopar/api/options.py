"""The options of `compile` that are `plan`'s, as editors and `help` see them: each with its type and default.

`compile` takes them as they are given, since a plan that is passed has been made with options of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Literal, TypedDict, TypeVar

from autopar.constraints import Constraint
from autopar.planning import PlanOptions

F = TypeVar("F", bound=Callable[..., object])


class Options(TypedDict, total=False):
    """As `autopar.plan` takes them; what is left out has the default of `PlanOptions`."""

    memory_bytes: int | None
    optimizer: str
    constraints: Sequence[Constraint]
    strict: bool
    gap: float
    time_limit_s: float
    solver: str
    num_microbatches: int | Literal["auto"]
    loss_rows: int | Literal["auto"]
    precision: Literal["bf16", "fp16"] | None
    inference: bool


def spelled_out(function: F) -> F:
    """The function, whose signature shows every option where it takes ``**options``."""
    defaults = {f.name: f.default for f in fields(PlanOptions)}
    here = inspect.signature(function)
    named = [p for p in here.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind.__forward_arg__)
        for name, kind in Options.__annotations__.items()
    ]
    function.__signature__ = here.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function
