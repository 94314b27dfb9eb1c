"""Ranks with different entries in their plan caches run the same plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_processes

pytestmark = pytest.mark.multiproc
HERE = Path(__file__).parent


def test_ranks_use_the_same_plan_whichever_of_them_has_cached_it(tmp_path: Path) -> None:
    ranks = run_processes(2, str(HERE / "worker_cached.py"), "run", str(tmp_path))
    facts = [fact for rank in ranks for fact in rank]
    assert len(facts) == 8
    assert len({fact["plan"] for fact in facts}) == 1
    assert {fact["loss"] for fact in facts} == {facts[0]["loss"]}
    assert facts[0]["loss"] == pytest.approx(facts[0]["expected"], rel=1e-6)
    kinds = [
        '"kind": "plan"' in file.read_text() for file in (tmp_path / "0" / "entries").iterdir()
    ]
    assert sum(kinds) == 1, "rank 0 caches the plan"
    assert not any(
        '"kind": "plan"' in file.read_text() for file in (tmp_path / "1" / "entries").iterdir()
    ), "the others take it from rank 0"
