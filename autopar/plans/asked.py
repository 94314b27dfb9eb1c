"""The options that a plan records: their names, and the words and numbers that each may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from autopar.typed import mismatch

OPTIONS: Mapping[str, Any] = {
    "memory_bytes": int,
    "optimizer": str,
    "constraints": list,
    "strict": bool,
    "gap": float,
    "num_microbatches": int | Literal["auto"],
    "loss_rows": int | Literal["auto"],
    "precision": Literal["bf16", "fp16"] | None,
    "inference": bool,
    "batch": Literal["global", "local"],
    "outputs": Literal["full", "local", "dtensor", "loss", "auto"],
}
"""Name → annotation, of what `autopar.planning.PlanOptions` writes into a plan."""


def misfit_of_options(options: Mapping[str, Any]) -> str:
    """What is wrong with the options of a plan.

    Args:
        options: as the file has them.

    Returns:
        The first option that is unknown or holds something else than it may; ``""`` where none does.
    """
    for name, value in options.items():
        if name not in OPTIONS:
            return f"its option {name!r} is not known"
        wrong = mismatch(value, OPTIONS[name], path=f"options.{name}")
        if wrong:
            return wrong
    return ""
