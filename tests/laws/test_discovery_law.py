"""Options that are discovered on small operands, with all rows of the table hidden, are valid for
the full call and include most options of the table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from further_cases import FURTHER_CASES
from rule_cases import CASES as COMMON_CASES
from rule_cases import aten

from autopar import ops
from autopar.rules import axis_options, call_on
from autopar.rules.discovery import discover
from autopar.rules.expansion import expand
from autopar.rules.trial import check_strategy

CASES = {
    op: cases
    for op, cases in {**COMMON_CASES, **FURTHER_CASES}.items()
    if cases and isinstance(op, torch._ops.OpOverload)
}
SIZES = SimpleNamespace(a=16, b=12, c=20, d=24, before=[4, 6], after=[24])
SOME = (
    aten.mm.default,
    aten.amin.default,
    aten.native_layer_norm_backward.default,
    aten.index_add.default,
    aten.cat.default,
)


def counted(op: Any) -> Counter[str]:
    """Return the numbers of options in the table, of discovered options, and of common options,
    after checking all discovered strategies."""
    count: Counter[str] = Counter()
    cases = CASES[op] if isinstance(CASES[op], list) else [CASES[op]]
    for case in cases:
        torch.manual_seed(0)
        args, kwargs = case(SIZES)
        call, tensors = call_on(op, args, kwargs, op(*args, **kwargs))
        found, own = discover(call).options, set(axis_options(call)[1:])
        count += Counter(table=len(own), found=len(found) - 1, both=len(own & set(found)))
        for mesh_shape in ((2,), (3,), (4,), (2, 2)):
            for strategy in expand(call, found, mesh_shape):
                check_strategy(call, tensors, strategy, mesh_shape)
    return count


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("op", SOME, ids=str)
def test_options_discovered_on_small_operands_are_valid_for_the_full_call(op: Any) -> None:
    count = counted(op)
    assert count["found"] >= count["both"] == count["table"] > 0


@pytest.mark.slow
def test_all_discovered_options_are_valid_and_most_of_the_table_is_discovered() -> None:
    apart = {
        ops.flex_attention,
        ops.flex_attention_backward,
    }  # most of their options need the offsets of shards
    count = sum((counted(op) for op in CASES if op not in apart), Counter())
    assert count["both"] >= 0.8 * count["table"], count
