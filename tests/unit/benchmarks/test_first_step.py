"""The benchmark of the first step: its phases and the check of its results."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_step
from benchmarks.models import ModelSpec


def test_imports_during_a_phase_are_counted_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Any = types.SimpleNamespace(now=0.0, process_time=lambda: clock.now)
    bootstrap: Any = importlib._bootstrap  # type: ignore[attr-defined]
    monkeypatch.setattr(
        bootstrap, "_find_and_load", bootstrap._find_and_load
    )  # restored after the test
    monkeypatch.setattr(first_step, "time", clock)
    monkeypatch.syspath_prepend(tmp_path)
    passes = "import sys\nsys.modules['benchmarks.first_step'].time.now += {}\n"
    (tmp_path / "outer_of_first_step.py").write_text(
        f"{passes.format(2)}import inner_of_first_step"
    )
    (tmp_path / "inner_of_first_step.py").write_text(passes.format(4))
    phase = first_step.Phases()
    with phase("first"):
        clock.now += 1.0
        importlib.import_module("outer_of_first_step")
    with phase("second"):
        clock.now += 8.0
        importlib.import_module("inner_of_first_step")
    assert phase.seconds == {"first_s": 1.0, "second_s": 8.0} and phase.import_s == 6.0
    for name in ("outer_of_first_step", "inner_of_first_step"):
        sys.modules.pop(name)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("way", first_step.WAYS)
def test_each_rank_has_a_row_and_evaluates_like_the_plain_model(way: str) -> None:
    spec = ModelSpec("gpt2", first_step.GPT).to_json()
    rows = first_step.row(spec, "2", way, "cpu-gloo", 8, 16, False)
    assert [row["rank"] for row in rows] == [0, 1] and all(row["ok"] for row in rows)
    assert all(f"{phase}_s" in row for row in rows for phase in first_step.PHASES)
