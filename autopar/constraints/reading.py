"""Constraints as a plan records them, read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.constraints.layouts import layout
from autopar.constraints.parallel import Constraint, Megatron, Parallelism
from autopar.constraints.pipelines import Pipelined
from autopar.errors import ConstraintError


def from_json(data: Mapping[str, Any]) -> Constraint:
    """The constraint whose `to_json` is `data`.

    Raises:
        ConstraintError: where it is that of none.
    """
    words: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    plan: Any = words.pop("plan", None)
    try:
        if plan is None:
            return layout(**words)
        if plan == "megatron":
            return Megatron(**words)
        if plan == "pipeline":
            return Pipelined(**words)
        return Parallelism(name=plan, **words)
    except TypeError as error:
        raise ConstraintError(f"{dict(data)} is no constraint: {error}", remedy="pass the constraints themselves, or plan again") from error
