"""Constraints as plans record them, read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from autopar.constraints.layouts import LayoutConstraint, layout
from autopar.constraints.megatron import megatron
from autopar.constraints.offloading import offload
from autopar.constraints.parallel import Axes, Parallelism, PlanName, tensor_parallel
from autopar.constraints.pipelines import pipeline
from autopar.constraints.resting import rests_as
from autopar.constraints.together import Constraint
from autopar.errors import AutoparError, ConstraintError


def read_constraint(data: Mapping[str, Any]) -> Constraint:
    """The inverse of a constraint's ``to_json``.

    Raises:
        ConstraintError: where it is no such record.
    """
    try:
        return _layout(data) if "pattern" in data else _named(data)
    except (KeyError, TypeError, AttributeError, AutoparError) as error:
        raise ConstraintError(f"{data!r} is no record of a constraint", remedy="plan again; the file was changed by hand") from error


def _layout(data: Mapping[str, Any]) -> LayoutConstraint:
    return layout(**{str(name): value for name, value in data.items()})


def _named(data: Mapping[str, Any]) -> Constraint:
    if data["plan"] == "megatron":
        dp = None if data["dp"] is None else _degree(data["dp"])
        rest = {name: data[name] for name in ("recompute", "pp", "microbatches", "chunks", "free", "sequence") if name in data}
        more: dict[str, Any] = {name: _degree(data[name]) for name in ("cp", "ep") if name in data}
        return megatron(tp=_degree(data["tp"]), dp=dp, zero=data["zero"], **more, **rest)
    if data["plan"] in ("pipeline", "offload"):
        make = pipeline if data["plan"] == "pipeline" else offload
        return make(**{str(name): value for name, value in data.items() if name != "plan"})
    if data["plan"] == "rests_as":
        return rests_as(data["storage"])
    if data["plan"] not in get_args(PlanName) or not {"plan", "axes", "sequence"} >= data.keys():
        raise ConstraintError(f"no plan is named {data['plan']!r}")
    axes = None if data["axes"] is None else tuple(data["axes"])
    if "sequence" in data:
        return tensor_parallel(data["plan"].removeprefix("tensor_parallel_"), axes=axes or (), sequence=data["sequence"])
    return Parallelism(data["plan"], axes, 3 if data["plan"] == "fsdp" else 0)


def _degree(value: int | list[str]) -> int | Axes:
    return tuple(value) if isinstance(value, list) else value
