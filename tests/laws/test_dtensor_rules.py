"""The rules of autopar compared with those of DTensor. Each disagreement is listed with the
numerically correct side and the reason.

The list is `dtensor_disagreements.json`. ``pytest --update-golden`` rewrites it and leaves the
reasons of new entries empty.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensor_rules import P, R, asked, cases, disagreements, holds, verdict
from rule_cases import aten, real
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.rules import call_on

LIST = Path(__file__).parent / "dtensor_disagreements.json"
Row = dict[str, Any]

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the list is of torch 2.13"
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Return a mesh of two fake ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(mesh: DeviceMesh) -> list[Row]:
    return list(disagreements(mesh))


def listed() -> list[Row]:
    return json.loads(LIST.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def without_reason(row: Row) -> str:
    return json.dumps({name: value for name, value in row.items() if name != "why"}, sort_keys=True)


@pytest.mark.slow
def test_the_disagreements_are_exactly_those_listed(
    found: list[Row], request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--update-golden"):
        reasons = {without_reason(row): row["why"] for row in listed()}
        rows = [json.dumps({**row, "why": reasons.get(without_reason(row), "")}) for row in found]
        LIST.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    now, before = Counter(map(without_reason, found)), Counter(map(without_reason, listed()))
    assert (list(now - before), list(before - now)) == ([], []), (
        "neither new nor gone; pytest --update-golden writes the list"
    )


def test_each_disagreement_has_a_reason() -> None:
    assert [row for row in listed() if not row["why"]] == []


@pytest.mark.slow
def test_autopar_is_never_wrong_in_a_disagreement(found: list[Row]) -> None:
    assert [row for row in found if row["verdict"] == "autopar is wrong"] == []


@pytest.mark.slow
def test_most_options_are_common_to_both_rule_sets(mesh: DeviceMesh, found: list[Row]) -> None:
    """This ensures that the comparison is meaningful: torch accepts most options of autopar."""
    assert len({call.target for call, _ in cases()}) >= 150 and len(found) <= 160
    call, tensors = call_on(aten.mm.default, (x := real(4, 6), w := real(6, 8)), {}, x @ w)
    assert asked(call, tensors, (Shard(1), Shard(0)), mesh) == (P,)
    assert asked(call, tensors, (R, Shard(1)), mesh) == (Shard(1),)
    assert asked(call, tensors, (Shard(0), Shard(0)), mesh) is None


def test_the_verdict_is_decided_numerically() -> None:
    torch.manual_seed(0)
    call, tensors = call_on(aten.mm.default, (x := real(4, 6), w := real(6, 8)), {}, x @ w)
    assert holds(call, tensors, (Shard(1), Shard(0)), (P,))
    assert not holds(call, tensors, (Shard(1), Shard(0)), (R,))
    assert not holds(call, tensors, (Shard(0), Shard(0)), (P,))


@pytest.mark.parametrize(
    ("autopar", "torch_", "says"),
    [
        (True, None, "torch lacks it"),
        (None, True, "autopar lacks it"),
        (True, True, "both are right"),
        (None, False, "torch is wrong"),
        (True, False, "torch is wrong"),
        (False, True, "autopar is wrong"),
        (False, None, "autopar is wrong"),
    ],
)
def test_a_verdict_names_the_wrong_side(
    autopar: bool | None, torch_: bool | None, says: str
) -> None:
    assert verdict(autopar, torch_) == says
