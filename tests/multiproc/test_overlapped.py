"""With gloo, overlapped products run as their decomposition, and the log says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_processes

pytestmark = pytest.mark.multiproc


def test_with_gloo_results_match_the_reference_and_each_process_logs_the_reason_once() -> None:
    for fact in run_processes(3, str(Path(__file__).parent / "worker_overlapped.py"), "run"):
        assert fact["wrong"] == []
        assert len(fact["messages"]) == 1
        assert "cannot access each other's memory" in fact["messages"][0]


def test_with_gloo_dispatch_and_combine_match_the_reference() -> None:
    assert run_processes(3, str(Path(__file__).parent / "worker_routed.py"), "run") == [[], [], []]
