"""Random models on real processes. `autopar.verify` runs virtual ranks, which share one process and
have no collectives."""

from __future__ import annotations

import itertools

from benchmarks.faults.judging import Notes
from benchmarks.faults.model_cases import run_recipe
from benchmarks.faults.programs import random_recipe
from benchmarks.faults.real_ranks import may_run

_APART = 1000  # number of seeds of models that a case may try


def run(seed: int, notes: Notes) -> None:
    """Train the first model, starting from a seed, that real processes can train. Raises the errors
    of `run_recipe`."""
    first = itertools.count(seed * _APART)
    number = next(n for n in first if may_run(random_recipe(n)))
    notes.entries["recipe"] = number
    recipe = random_recipe(number)
    run_recipe(recipe, f"models:{number}", notes, certified=False, with_processes=True)
