"""A rank that changes gradients or parameters with other numbers than the others is named at the
next call."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_processes
from worker_changes import CHANGES, OPTIMIZERS

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_changes.py")


@pytest.mark.parametrize("plan", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_changes_of_one_rank_with_other_numbers_are_refused_and_equal_ones_are_not(
    plan: str,
) -> None:
    found = run_processes(2, WORKER, "run", plan)
    for told in found:
        assert {name: said for name, said in told.items() if name.endswith("False") and said} == {}
        for name in (*CHANGES, *OPTIMIZERS):
            assert "rank 1" in told[f"{name} True"], name
        for name in CHANGES:
            assert "0.125" in told[f"{name} True"] or "1.125" in told[f"{name} True"], name
