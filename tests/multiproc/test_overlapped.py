"""Over plain gloo the overlapped products are their decomposition, and the log says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_processes

pytestmark = pytest.mark.multiproc


def test_over_gloo_the_numbers_are_the_references_and_each_process_says_once_why_nothing_overlaps() -> (  # noqa: E501
    None
):
    for fact in run_processes(3, str(Path(__file__).parent / "worker_overlapped.py"), "run"):
        assert fact["wrong"] == []
        assert len(fact["messages"]) == 1
        assert "cannot access each other's memory" in fact["messages"][0]


def test_over_gloo_rows_of_tokens_go_and_come_back_as_in_the_reference() -> None:
    assert run_processes(3, str(Path(__file__).parent / "worker_routed.py"), "run") == [[], [], []]
