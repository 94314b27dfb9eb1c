"""Parameters shared by several stages stay equal, also if a stage has no part of their gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_processes

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize("frozen", [False, True], ids=["all trained", "one frozen"])
def test_shared_parameters_train_as_those_of_the_plain_model(frozen: bool) -> None:
    facts = run_processes(2, str(Path(__file__).parent / "worker_shared.py"), "run", frozen)
    assert set(facts[0]["held"]) & set(facts[1]["held"])
    for fact in facts:
        assert max(fact["loss"]) < 1e-6
        assert fact["away"] < 1e-6
