"""Gradient scalers over stages and microbatches: gradients, scales and skipped steps of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_processes
from worker_scaling import LAYOUTS

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_scaling.py")
HALF = 1e-2  # float16 has 11 bits; sums are taken in another order


def test_tiny_gradients_do_not_underflow_in_any_layout() -> None:
    for errors in run_processes(2, WORKER, "first_gradients", list(LAYOUTS)):
        assert errors.keys() == LAYOUTS.keys()
        assert max(errors.values()) < HALF, errors


@pytest.mark.parametrize("layout", ["sharded in two", "stages in two"])
def test_scales_and_skipped_steps_are_those_of_one_process(layout: str) -> None:
    names = ["momentum", "one stage overflows", "one stage overflows, fused"]
    for results in run_processes(2, WORKER, "train_beside_plain", layout, names):
        for name, (wanted, found, error) in results.items():
            assert found == wanted, name
            assert len(set(found)) > 1, "no step was skipped"
            assert error < HALF, name
