"""Plans do not change: the hash of each plan of the small families and of the zoo is locked.

A change that must not change plans leaves these files unchanged. A change that improves plans
rewrites them (``pytest --update-golden -m slow tests/laws/test_plan_lock.py``), and its diff shows
which plans changed and how their simulated step changed. The files are valid for the pinned
versions of ``constraints.txt``: another solver or version of torch may resolve ties differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import zoo_small
from ways import WAYS

from autopar.errors import AutoparError
from benchmarks import zoo

pytestmark = pytest.mark.slow

FAMILIES = ("gpt2", "llama", "mixtral", "bert", "vit")
FEW = ("free", "fsdp on cpu", "stages", "microbatches", "inference")
Golden = Callable[[str, str], None]


def locked(model: Any, batch: Any, ways: Iterable[str]) -> str:
    """Return one line per kind of plan: the hash and the simulated step, or the class of the
    error."""
    lines = []
    for name in ways:
        try:
            plan = WAYS[name].plan(model, batch)
            said = f"{plan.hash} {plan.prediction.simulated_s:.6e} s"
        except AutoparError as error:
            said = f"{type(error).__name__}: {error.what}"
        lines.append(f"{name}: {said}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_of_small_families_are_unchanged(family: str, golden: Golden) -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, batch = getattr(zoo_small, family)()
    golden(f"plans/{family}.txt", locked(model, batch, WAYS))


@pytest.mark.parametrize("name", sorted(zoo.NAMES))
def test_plans_of_the_zoo_are_unchanged(name: str, golden: Golden) -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, batch = zoo.build(name)
    golden(f"plans/zoo_{name}.txt", locked(model, batch, FEW))
