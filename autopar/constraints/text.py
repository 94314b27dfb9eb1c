"""Constraints as one writes them: ``megatron(tp=8, zero=3)``, ``layout("*.up_proj", weight="R
S(0)")``, as text."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args

from autopar.constraints.layouts import LayoutConstraint, layout, rests_as
from autopar.constraints.megatron import megatron
from autopar.constraints.parallel import (
    Axes,
    Parallelism,
    PlanName,
    context_parallel,
    ddp,
    expert_parallel,
    fsdp,
    tensor_parallel,
)
from autopar.constraints.resources import offload, pipeline
from autopar.constraints.together import Constraint
from autopar.core.keywords import close_to
from autopar.errors import AutoparError, ConstraintError

_NAMED: Mapping[str, Callable[..., Constraint]] = {
    make.__name__: make
    for make in (
        layout,
        ddp,
        fsdp,
        megatron,
        tensor_parallel,
        context_parallel,
        expert_parallel,
        pipeline,
        offload,
    )
}


def parse_constraint(text: str) -> Constraint:
    """Read a constraint that is written as a call in Python. The text may contain names and
    literals only, and nothing in it is evaluated.

    >>> print(parse_constraint("megatron(tp=2, zero=3)"), parse_constraint("fsdp"))
    megatron(tp=2, zero=3) fsdp()

    Raises:
        ConstraintError: if it is no call of a constraint, or its arguments do not fit.
        LayoutError: if a layout cannot be read.
    """
    name, args, kwargs = _parts(text)
    if name not in _NAMED:
        close = close_to(name, _NAMED)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        raise ConstraintError(
            f"{name!r} is not a constraint",
            where=text,
            remedy=f"{meant}constraints are {', '.join(_NAMED)}",
        )
    make = _NAMED[name]
    try:
        inspect.signature(make).bind(*args, **kwargs)
        return make(*args, **kwargs)
    except (TypeError, AttributeError) as error:  # of another name, number or type than it takes
        parameters = ", ".join(inspect.signature(make).parameters)
        raise ConstraintError(
            f"{name}: {error}", where=text, remedy=f"it takes {parameters}"
        ) from error


def _parts(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Name and arguments of a call; a name alone is a call without arguments.

    Raises:
        ConstraintError: if it is something else.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            return call.id, [], {}
        if (
            not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Name)
            or any(k.arg is None for k in call.keywords)
        ):
            raise ValueError(text)
        kwargs = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        return call.func.id, [ast.literal_eval(arg) for arg in call.args], kwargs
    except (SyntaxError, ValueError) as error:
        remedy = 'write a call with literals, as megatron(tp=8) or pipeline("node")'
        raise ConstraintError("this is not a constraint", where=text, remedy=remedy) from error


# --------------------------------------------------------------------------------------------------
# Constraints from the records of plans.


def read_constraint(data: Mapping[str, Any]) -> Constraint:
    """Make a constraint from its record in a plan, the inverse of its ``to_json``.

    Raises:
        ConstraintError: if `data` is no such record.
    """
    try:
        return _layout(data) if "pattern" in data else _plan(data)
    except (KeyError, TypeError, AttributeError, AutoparError) as error:
        raise ConstraintError(
            f"{data!r} is not a valid constraint record",
            remedy="plan again; the file was edited by hand",
        ) from error


def _layout(data: Mapping[str, Any]) -> LayoutConstraint:
    return layout(**{str(name): value for name, value in data.items()})


def _plan(data: Mapping[str, Any]) -> Constraint:
    read = _READERS.get(data["plan"])
    if read is not None:
        return read(data)
    if data["plan"] not in get_args(PlanName) or not {"plan", "axes", "sequence"} >= data.keys():
        raise ConstraintError(f"{data['plan']!r} is not a named plan")
    axes = None if data["axes"] is None else tuple(data["axes"])
    if "sequence" in data:
        kind = data["plan"].removeprefix("tensor_parallel_")
        return tensor_parallel(kind, axes=axes or (), sequence=data["sequence"])
    return Parallelism(data["plan"], axes, 3 if data["plan"] == "fsdp" else 0)


def _megatron(data: Mapping[str, Any]) -> Constraint:
    rest = {name: data[name] for name in _MEGATRON_WORDS if name in data}
    degrees: dict[str, Any] = {name: _degree(data[name]) for name in ("cp", "ep") if name in data}
    dp = None if data["dp"] is None else _degree(data["dp"])
    return megatron(tp=_degree(data["tp"]), dp=dp, zero=data["zero"], **degrees, **rest)


def _words(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constraint whose record has them under their own names."""
    return {str(name): value for name, value in data.items() if name != "plan"}


_MEGATRON_WORDS = ("recompute", "pp", "microbatches", "chunks", "free", "sequence")
_READERS: Mapping[str, Callable[[Mapping[str, Any]], Constraint]] = {
    "megatron": _megatron,
    "pipeline": lambda data: pipeline(**_words(data)),
    "offload": lambda data: offload(**_words(data)),
    "rests_as": lambda data: rests_as(data["storage"]),
}


def _degree(value: int | list[str]) -> int | Axes:
    return tuple(value) if isinstance(value, list) else value
