"""The law detects every deliberately wrong rule on shapes for which the correct rule passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from further_cases import FURTHER_CASES
from rule_cases import CASES as COMMON_CASES
from wrong_rules import CASES_OF, MISPLACED, UNEVEN, WRONG

from autopar.errors import RuleError
from autopar.rules import call_on, knowledge, localization
from autopar.rules.law import check_strategies
from autopar.rules.table import TABLE

CASES = {**COMMON_CASES, **FURTHER_CASES}
EVEN = (
    SimpleNamespace(a=4, b=4, c=4, d=4, before=[4, 6], after=[24]),
    SimpleNamespace(a=4, b=6, c=2, d=8, before=[2, 12], after=[4, 6]),
)
ODD = (SimpleNamespace(a=5, b=3, c=5, d=3, before=[5, 4], after=[5, 2, 2]),)
CAUGHT = "is wrong on shapes"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    knowledge.forget()


def lawful(name: str, target: Any, shapes: tuple[SimpleNamespace, ...]) -> None:
    """Assert that all strategies of the op on two ranks obey the law."""
    torch.manual_seed(0)
    knowledge.forget()
    cases = CASES_OF.get(name, CASES[target])
    for case in cases if isinstance(cases, list) else [cases]:
        for s in shapes:
            args, kwargs = case(s)
            call, tensors = call_on(target, args, kwargs, target(*args, **kwargs))
            check_strategies(call, tensors, (2,))


def caught(
    name: str, target: Any, mutate: Callable[[], None], shapes: tuple[SimpleNamespace, ...]
) -> None:
    lawful(name, target, shapes)  # the law refuses only the mutation below
    mutate()
    with pytest.raises(RuleError, match=CAUGHT):
        lawful(name, target, shapes)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, row = WRONG[name]
    caught(name, target, lambda: monkeypatch.setitem(TABLE, target, row), EVEN)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MISPLACED)
def test_wrong_local_arguments_are_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, local = MISPLACED[name]
    caught(name, target, lambda: monkeypatch.setitem(localization.LOCALIZERS, target, local), EVEN)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", UNEVEN)
def test_rules_that_are_wrong_only_on_uneven_shards_are_detected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, local = UNEVEN[name]
    monkeypatch.setitem(localization.LOCALIZERS, target, local)  # type: ignore[arg-type]
    lawful(name, target, EVEN)
    monkeypatch.undo()
    caught(name, target, lambda: monkeypatch.setitem(localization.LOCALIZERS, target, local), ODD)  # type: ignore[arg-type]


def test_there_are_at_least_thirty_wrong_rules() -> None:
    assert len(WRONG) + len(MISPLACED) + len(UNEVEN) >= 100
