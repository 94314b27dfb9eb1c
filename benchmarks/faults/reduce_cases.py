"""Reduction of a failing random model to as few steps as still fail in the same way."""

from __future__ import annotations

import time

from benchmarks.faults.judging import FAILED, Notes, judge
from benchmarks.faults.model_cases import extent_of, run_recipe
from benchmarks.faults.programs import Recipe, random_recipe, smaller

BUDGET_S = 120.0


def run(seed: int, notes: Notes) -> None:
    """Reduce the model of a seed, then run the result. Its row is that of the reduced failure."""
    title, extent = f"models:{seed}, reduced", extent_of(seed)
    recipe = random_recipe(seed)
    failure = failure_of(recipe, title, extent)
    deadline = time.monotonic() + BUDGET_S
    found: Recipe | None = recipe if failure else None
    while found is not None:
        recipe, found = found, None
        for candidate in smaller(recipe):
            if time.monotonic() > deadline:
                break
            if failure_of(candidate, title, extent) == failure:
                found = candidate
                break
    run_recipe(recipe, title, notes, **extent)


def failure_of(recipe: Recipe, title: str, extent: dict[str, bool]) -> tuple[str, str] | None:
    """Return how a recipe fails: the reason and the phase; None if it does not."""
    row = judge(lambda notes: run_recipe(recipe, title, notes, **extent))
    return (row["why"], row["phase"]) if row["outcome"] == FAILED else None
