"""Whatever field of a plan is falsified, `check` refuses the plan, or lists the field as one that it does not vouch for."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.plans import Plan

ask = autopar.constraints
UNORDERED = ("entries", "kept", "communications", "buckets", "potentials", "versions")
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
Path = tuple[str | int, ...]


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


def places(data: Any, path: Path = ()) -> Iterator[Path]:
    """The path of every value."""
    inner = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(data: Any, path: Path) -> Any:
    for key in path:
        data = data[key]
    return data


def pattern(path: Path) -> Path:
    return tuple("*" if isinstance(key, int) else key for key in path)


def others(old: Any, words: list[str]) -> Iterator[Any]:
    """Plausible other values of a field, of which `words` are the texts in the same field elsewhere."""
    if isinstance(old, bool):
        yield not old
    elif isinstance(old, int):
        yield old + max(1, old // 2)
    elif isinstance(old, float):
        yield old * 1.5 if abs(old) > 1e-12 else 1e-3  # beyond rounding
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


def plain(data: Any) -> Any:
    """The same with lists whose order has no meaning in one order."""
    if isinstance(data, dict):
        return {
            k: sorted(map(plain, v), key=json.dumps) if k in UNORDERED else plain(v)
            for k, v in sorted(data.items())
        }
    return [plain(value) for value in data] if isinstance(data, list) else data


def accepted(plan: Plan, model: nn.Module, rng: random.Random, most: int) -> tuple[list[str], int]:
    """What of the falsified is certified and vouched for, and how many falsified plans were tried."""
    data = json.loads(plan.dumps())
    by_pattern: dict[Path, list[Path]] = {}
    for path in places(data):
        by_pattern.setdefault(pattern(path), []).append(path)
    tried = []
    for _, found in sorted(by_pattern.items(), key=str):
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
            if plain(json.loads(other.dumps())) == plain(data):
                continue
            num += 1
            certificate = autopar.check(other, model, batch())
        except AutoparError:
            continue
        if certificate.ok and certificate.vouches_for(path):
            passed.append(f"{'.'.join(map(str, path))}: {at(data, path)!r:.60} → {new!r:.60}")
    return passed, num


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_falsified_field_is_refused_or_listed_as_not_verified(name: str) -> None:
    mesh, options = PLANS[name]
    torch.manual_seed(0)
    model = Net()
    plan = autopar.plan(
        model, autopar.Mesh(mesh), example_inputs=batch(), hardware="h100-sxm", **options
    )
    whole = autopar.check(plan, model, batch())
    assert whole.ok, str(whole)
    passed, num = accepted(plan, model, random.Random(0), 60 if plan.pipeline else 1000)
    assert not passed, "\n".join(passed)
    assert num > 30
