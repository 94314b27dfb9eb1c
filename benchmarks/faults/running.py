"""Functions that the programs of random models call for plans that need several calls."""

from __future__ import annotations

from typing import Any

import autopar
from benchmarks.random_plans import prepare, random_plan


def tight_plan(arguments: dict[str, Any], share: float, **options: Any) -> autopar.Plan:
    """Return a plan within a share of the memory of an unbounded one."""
    ample = autopar.plan(**arguments, **options)
    memory_bytes = int(share * ample.prediction.peak_bytes)
    return autopar.plan(**arguments, **options, memory_bytes=memory_bytes)


def random_legal_plan(arguments: dict[str, Any], seed: int) -> autopar.Plan:
    """Return a legal plan that the planner would not choose (`benchmarks.random_plans`)."""
    model, batch, profile = (arguments[n] for n in ("model", "example_inputs", "hardware"))
    prepared = prepare(model, batch, arguments["mesh"], profile)
    return random_plan(prepared, seed, recompute_otherwise=seed % 3 == 0)[0]
