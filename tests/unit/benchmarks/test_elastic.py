"""Elastic training with real agents: a machine is lost and returns."""

from __future__ import annotations

import pytest

from benchmarks import elastic


@pytest.mark.slow
@pytest.mark.multiproc
def test_training_continues_when_a_machine_is_lost_and_when_it_returns() -> None:
    rows = elastic.row({"name": "gpt2"}, "2x2", 150)
    assert [row["processes"] for row in rows] == [4, 2, 4] and all(row["ok"] for row in rows)
    assert len({row["largest_weight"] for row in rows}) == 2, (
        "with two processes, the weight has other shards"
    )
