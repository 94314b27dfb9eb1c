"""Random models under random plans: outputs and every gradient are compared with the plain
model."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import autopar
from benchmarks.faults.judging import InvalidCase, Notes, WrongResult
from benchmarks.faults.programs import Recipe, random_recipe, text_of
from benchmarks.faults.real_ranks import may_run, run_processes

CHECKED_EVERY, RUN_EVERY, OTHER_BATCH = 4, 10, 5
_numbers = itertools.count()


def run(seed: int, notes: Notes) -> None:
    """Run the case of a seed."""
    run_recipe(random_recipe(seed), f"models:{seed}", notes, **extent_of(seed))


def extent_of(seed: int) -> dict[str, bool]:
    """Return the checks of a seed's plan in addition to `verify`. Some plans are checked, and few
    are run."""
    checked = {"certified": seed % CHECKED_EVERY == 0}
    return {**checked, "with_processes": seed % RUN_EVERY == RUN_EVERY - 1}


def run_recipe(
    recipe: Recipe, title: str, notes: Notes, *, certified: bool, with_processes: bool
) -> None:
    """Plan the program of a recipe and compare it with the plain model.

    Args:
        recipe: the recipe.
        title: title of the program.
        notes: the notes of the case.
        certified: whether to run `autopar.check` as well.
        with_processes: whether to train a step on real processes, if there are few.

    Raises:
        InvalidCase: if the plain model does not run.
        WrongResult: if results differ, or if `check` rejects the plan.
        AutoparError: if autopar refuses.
    """
    text = text_of(recipe, title)
    notes.entries |= {"mesh": "x".join(map(str, recipe.mesh)), "plan": recipe.plan, "program": text}
    with tempfile.TemporaryDirectory() as folder:
        module = load(text, Path(folder))
        notes.phase = "plain"
        run_plain(module, recipe)
        notes.phase = "plan"
        plan = module.make_plan()
        notes.phase = "verify"
        found = autopar.verify(plan, module.build(), module.batch())
        if not found.ok:
            raise WrongResult(str(found))
        notes.entries["max_rel_err"] = found.max_error
        if with_processes and may_run(recipe):
            notes.phase = "processes"
            notes.entries["processes"] = plan.mesh.num_devices
            run_processes(text, plan)
        if certified and "random_legal" not in recipe.plan:
            notes.phase = "check"
            profile = module.hardware()
            certificate = autopar.check(plan, module.build(), module.batch(), hardware=profile)
            if not certificate.ok:
                raise WrongResult(f"check rejects a plan that the planner returned:\n{certificate}")


def load(text: str, folder: Path) -> ModuleType:
    """Import a text from a file, so that errors refer to its lines."""
    name = f"random_program_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_plain(module: Any, recipe: Recipe) -> None:
    """Run the plain model on batches of two sizes, forward and backward.

    Raises:
        InvalidCase: if it raises, or if a value is not finite.
    """
    for size in (recipe.batch, OTHER_BATCH):
        model = module.build()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                leaves = [t for t in tree_leaves(model(**module.batch(size))) if torch.is_tensor(t)]
                if not recipe.inference:
                    sum(t.sum() for t in leaves if t.requires_grad).backward()
        except Exception as error:
            raise InvalidCase(f"batch {size}: {type(error).__name__}: {error}") from error
        values = [*leaves, *(p.grad for p in model.parameters() if p.grad is not None)]
        if not all(value.isfinite().all() for value in values):
            raise InvalidCase(f"batch {size}: values that are not finite")
