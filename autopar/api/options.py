"""Show the options of `plan`, `compile` and `what_if` in `help` and notebooks with type, default
and text, and hold the request that they form.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from autopar.api.arguments import MeshLike
from autopar.capture import Trace
from autopar.core.mesh import HardwareLike
from autopar.request import (
    DEFAULTS,
    Call,
    CompileKeywords,
    PlanKeywords,
    PlanOptions,
    WhatIfKeywords,
    options_of,
)

F = TypeVar("F", bound=Callable[..., object])
_KEYWORDS: Mapping[Call, Any] = {
    "plan": PlanKeywords,
    "compile": CompileKeywords,
    "what_if": WhatIfKeywords,
}
_WIDTH = 140  # columns of a docstring


def takes_options(call: Call) -> Callable[[F], F]:
    """Decorate a function that takes ``**options``: its signature lists each option, and the
    paragraph ``options:`` of its docstring is replaced by their texts.
    """

    def decorate(function: F) -> F:
        here = inspect.signature(function)
        named = [p for p in here.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        kinds = _KEYWORDS[call].__annotations__
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=DEFAULTS[name],
                annotation=kinds[name].__forward_arg__,
            )
            for name in options_of(call)
        ]
        full_signature = here.replace(parameters=[*named, *options])
        function.__signature__ = full_signature  # type: ignore[attr-defined]
        function.__doc__ = _with_texts(function.__doc__, call)
        return function

    return decorate


def _with_texts(docstring: str | None, call: Call) -> str | None:
    """Return a docstring with the texts of the options in place of its paragraph ``options:``; None
    if Python removed docstrings."""
    lines = (docstring or "").splitlines(keepends=True)
    at = next(
        (number for number, line in enumerate(lines) if line.lstrip().startswith("options: ")), None
    )
    if at is None:
        return docstring
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    behind = next(
        n
        for n in range(at + 1, len(lines) + 1)
        if n == len(lines) or not lines[n].startswith(f"{indent} ")
    )
    texts = [
        textwrap.fill(
            f"{name}: {option.help}",
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_on_hyphens=False,
        )
        for name, option in options_of(call).items()
    ]
    return "".join([*lines[:at], *(f"{text}\n" for text in texts), *lines[behind:]])


# --------------------------------------------------------------------------------------------------
# The request of a plan: a model, devices and options. The public functions turn their arguments
# into a `PlanRequest`.


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Arguments of the planner, except the call to capture.

    Attributes:
        mesh: a mesh, or devices from which the planner chooses a mesh.
        hardware: the hardware; None for that of this machine.
        is_further: whether this is a further call of a compiled module. A call without a loss then
            returns its outputs.
        captured: traces of the call for other numbers of samples. Each is captured once, when a
            search or a program needs it.
    """

    model: nn.Module
    mesh: MeshLike
    hardware: HardwareLike | None
    options: PlanOptions
    is_further: bool = False
    captured: dict[int, Trace] = field(default_factory=dict, repr=False, compare=False)
