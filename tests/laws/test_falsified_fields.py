"""For each falsified field of a plan, `check` refuses the plan or lists the field as not
verified."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.breakdown import breakdown
from autopar.certificate.report import UNORDERED
from autopar.errors import AutoparError
from autopar.plans import Plan
from benchmarks.faults.damage import (
    Path,
    at,
    differences,
    is_unordered,
    names_of,
    pattern_of,
    places,
)

ask = autopar.constraints
PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "free": ({"gpu": 2}, {}),
    "named": ({"node": 2, "gpu": 2}, {"constraints": [ask.fsdp()]}),
    "offload": ({"gpu": 1}, {"constraints": [ask.offload()], "memory_bytes": 9000}),
    "fp16": ({"gpu": 2}, {"precision": "fp16", "num_microbatches": 2, "outputs": "loss"}),
    "rows": ({"gpu": 2}, {"loss_rows": 4}),
    "pipeline": (
        {"gpu": 2},
        {"constraints": [ask.pipeline("gpu", microbatches=2)], "outputs": "loss"},
    ),
}


class Net(nn.Module):
    """Two equal layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.table(ids)
        for layer in self.layers:
            h = h + layer(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    ids = torch.arange(32).reshape(8, 4) % 16
    return {"ids": ids, "labels": ids.roll(1, 1)}


def others(old: Any, words: list[str]) -> Iterator[Any]:
    """Return plausible other values of a field. `words` are the texts in the same field
    elsewhere."""
    if isinstance(old, bool):
        yield not old
    elif isinstance(old, int):
        yield old + max(1, old // 2)
    elif isinstance(old, float):
        yield old * 1.5 if abs(old) > 1e-12 else 1e-3  # larger than rounding errors
    elif isinstance(old, str):
        yield from (word for word in words[:1])
        yield f"{old}x"
    elif isinstance(old, list):
        yield from ([old[::-1]] if old[::-1] != old else [])
        yield from ((old[:-1], [*old, old[-1]]) if old else ())
    elif isinstance(old, dict):
        yield from ({k: v for k, v in old.items() if k != key} for key in list(old)[-1:])
        yield {**old, "another": 1}
    else:
        yield "x"


def accepted(plan: Plan, model: nn.Module, rng: random.Random, most: int) -> tuple[list[str], int]:
    """Return the falsified fields that are certified and not listed as unverified, and the number
    of tried plans."""
    data = json.loads(plan.dumps())
    by_pattern: dict[str, list[Path]] = {}
    for path in places(data):
        by_pattern.setdefault(pattern_of(path), []).append(path)
    tried = []
    for _, found in sorted(by_pattern.items()):
        path = rng.choice(found)
        words = {word for p in found if isinstance(word := at(data, p), str)}
        old = at(data, path)
        tried += [
            (path, new)
            for new in others(old, sorted(words - {old} if isinstance(old, str) else ()))
        ]
    passed, num = [], 0
    for path, new in rng.sample(tried, min(most, len(tried))):
        falsified = copy.deepcopy(data)
        at(falsified, path[:-1])[path[-1]] = new
        try:
            other = Plan.loads(json.dumps(falsified))
            changed = differences(data, json.loads(other.dumps()), UNORDERED)
            num += bool(changed)
            certificate = autopar.check(other, model, batch())
        except AutoparError:
            continue
        if certificate.ok and any(map(certificate.vouches_for, changed)):
            passed.append(f"{'.'.join(map(str, path))}: {at(data, path)!r:.60} → {new!r:.60}")
    return passed, num


def planned(name: str) -> tuple[Plan, Net]:
    mesh, options = PLANS[name]
    torch.manual_seed(0)
    model = Net()
    plan = autopar.plan(
        model, autopar.Mesh(mesh), example_inputs=batch(), hardware="h100-sxm", **options
    )
    return plan, model


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_falsified_field_is_refused_or_listed_as_not_verified(name: str) -> None:
    plan, model = planned(name)
    whole = autopar.check(plan, model, batch())
    assert whole.ok, str(whole)
    passed, num = accepted(plan, model, random.Random(0), 60 if plan.pipeline else 1000)
    assert not passed, "\n".join(passed)
    assert num > 30


def test_a_copy_of_a_parameter_is_listed_as_a_parameter_copy() -> None:
    torch.manual_seed(0)
    model = Net()
    plan = autopar.plan(
        model,
        autopar.Mesh({"gpu": 2}),
        example_inputs=batch(),
        hardware="h100-sxm",
        precision="bf16",
    )
    assert {kept.is_copy for kept in plan.kept} == {True, False}
    told = sum(part.kept_bytes for part in breakdown(plan))
    assert told == plan.prediction.memory_bytes["activations"]
    for number, kept in enumerate(plan.kept):
        other = replace(kept, is_copy=not kept.is_copy)
        falsified = replace(plan, kept=(*plan.kept[:number], other, *plan.kept[number + 1 :]))
        assert not autopar.check(falsified, model, batch()).ok, kept.node


def reordered(data: Any, rng: random.Random, path: Path = ()) -> Any:
    """Return the data with another order of the lists whose order no claim depends on."""
    if isinstance(data, dict):
        return {key: reordered(value, rng, (*path, key)) for key, value in data.items()}
    if not isinstance(data, list):
        return data
    inner = [reordered(value, rng, (*path, i)) for i, value in enumerate(data)]
    if is_unordered(path, UNORDERED) and names_of(path) != "buckets.members":
        rng.shuffle(inner)
    return inner


@pytest.mark.parametrize("name", ["named", "pipeline"])
def test_unordered_lists_may_have_any_order(name: str) -> None:
    plan, model = planned(name)
    data = json.loads(plan.dumps())
    other = Plan.loads(json.dumps(reordered(data, random.Random(0))))
    assert other != plan
    assert not differences(data, json.loads(other.dumps()), UNORDERED)
    certificate = autopar.check(other, model, batch())
    assert certificate.ok, str(certificate)
    assert certificate.to_json()["unordered"] == list(UNORDERED)


def test_stored_values_that_backward_reads_are_listed_as_kept() -> None:
    plan, model = planned("free")
    resting = [k for k in plan.kept if k.node.endswith(("/parameter", "/input"))]
    assert len(resting) > 2
    for kept in resting:
        falsified = replace(plan, kept=tuple(k for k in plan.kept if k != kept))
        found = autopar.check(falsified, model, batch())
        assert [f.claim for f in found.findings] == ["kept values"] * len(kept.instances)
