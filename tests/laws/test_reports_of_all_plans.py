"""`explain`, `report` and `diff` accept all plans, and their figures add up to those of the plan.

By default, the tests cover a few plans of one small model. The slow tests cover each family of the
tests with all kinds of plans, each model of the zoo with a few kinds, and models of other libraries
if they are installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo_small
from told import differences_of, faults_of
from typer.testing import CliRunner
from ways import WAYS

from autopar.cli import app
from autopar.errors import AutoparError, CaptureError, ConstraintError, InfeasibleError
from autopar.explanation import diff, explain
from autopar.plans import Plan
from benchmarks import zoo
from benchmarks.zoo import libraries

SMALL = ("gpt2", "llama", "mixtral", "bert", "vit")
FAST = tuple(("gpt2", name) for name in ("free", "fsdp", "microbatches", "inference", "stages"))
FEW = ("free", "fsdp on cpu", "stages", "microbatches", "inference", "random")
SEED = 0


@lru_cache(maxsize=2)
def built(kind: str) -> Any:
    """Return a model of the tests, of the zoo (``zoo:NAME``) or of a library (``timm/NAME``), and a
    batch."""
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        if kind.startswith("zoo:"):
            return zoo.build(kind.removeprefix("zoo:"))
        if "/" in kind:
            return libraries.build(kind, batch=4, dtype=torch.float32, device="cpu", seed=SEED)
        return getattr(zoo_small, kind)()


@cache
def planned(kind: str, name: str) -> Plan:
    return WAYS[name].plan(*built(kind))


def plan_or_skip(kind: str, name: str) -> Plan:
    """Return a plan, or skip the test if the model does not support it and planning raises an
    error."""
    try:
        return planned(kind, name)
    except (CaptureError, ConstraintError, InfeasibleError) as error:
        pytest.skip(f"refused: {error.what}")


def _cases() -> Iterator[Any]:
    every = [(kind, name) for kind in SMALL for name in WAYS]
    every += [(f"zoo:{kind}", name) for kind in zoo.NAMES for name in FEW]
    there = [n for n in libraries.NAMES if importlib.util.find_spec(n.partition("/")[0])]
    every += [(kind, name) for kind in there for name in ("free", "random")]
    for case in every:
        yield pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "name"), list(_cases()))
def test_the_explanation_of_a_plan_adds_up_to_its_prediction(
    kind: str, name: str, tmp_path: Path
) -> None:
    plan = plan_or_skip(kind, name)
    assert not faults_of(plan, built(kind)[0], tmp_path)
    assert not differences_of(plan, plan)


def _pairs() -> Iterator[Any]:
    """Return pairs of each way and the next one, in both orders. Slow tests also compare each way
    with the free plan."""
    names = list(WAYS)
    pairs = list(zip(names, [*names[1:], names[0]], strict=True))
    pairs += [("free", name) for name in names[2:]]
    yield from (("gpt2", "free", "fsdp"), ("gpt2", "microbatches", "inference"))
    yield from (("gpt2", "stages", "free"),)
    for kind in SMALL:
        for pair in pairs:
            yield pytest.param(kind, *pair, marks=pytest.mark.slow)


@pytest.mark.parametrize(("kind", "first", "second"), list(_pairs()))
def test_the_diff_of_two_plans_is_their_complete_difference(
    kind: str, first: str, second: str
) -> None:
    one, other = plan_or_skip(kind, first), plan_or_skip(kind, second)
    assert not differences_of(one, other) and not differences_of(other, one)
    there, back = diff(one, other), diff(other, one)
    assert {c.module for c in there.changes} == {c.module for c in back.changes}
    assert there.num_equal == back.num_equal


@pytest.mark.parametrize("name", [n for _, n in FAST])
def test_the_command_line_prints_the_results_of_the_functions(name: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{way}.json" for way in (name, "free")]
    for file, way in zip(files, (name, "free"), strict=True):
        planned("gpt2", way).save(file)
    path, other = map(str, files)
    module = next(part.module for part in explain(path).parts if part.weights)
    for arguments in (
        ["explain", path],
        ["explain", path, "--only", module],
        ["diff", path, other],
    ):
        told = CliRunner().invoke(app, arguments)
        assert told.exit_code == 0 and told.output.strip()
        assert module.rpartition(".")[2] in told.output or arguments[0] == "diff"
    page = tmp_path / "plan.html"
    assert CliRunner().invoke(app, ["report", path, "--out", str(page)]).exit_code == 0
    assert module in page.read_text(encoding="utf-8")


def test_an_impossible_plan_is_refused_with_an_autopar_error() -> None:
    with pytest.raises(AutoparError, match="cannot hold"):
        planned("gpt2", "fsdp of three")
