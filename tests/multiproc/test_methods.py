"""Methods of the model class work on the trained parameters, or are refused with a remedy that
works."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_processes

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_methods.py")


def test_methods_read_and_write_the_trained_parameters() -> None:
    for told in run_processes(2, WORKER, "called"):
        assert told.pop("words") == "of the class" and not told.pop("private")
        assert {kind: abs(value) < 1e-5 for kind, value in told.items()} == dict.fromkeys(
            told, True
        ), told


@pytest.mark.parametrize("stages", [False, True])
def test_unsupported_methods_are_refused_and_the_remedy_works(stages: bool) -> None:
    for told in run_processes(2, WORKER, "refused", stages):
        for kind in ("decode", "part", "crop", "update_bn"):
            assert "full_state_dict" in told[kind], kind
        for kind in ("count", "rate", "num"):
            assert ("only those of its own stage" in told[kind]) == stages, kind
        assert told["groups"] == (1 if stages else 2)
        assert told["loss"] < 1e-6 and told["decoded"] == (8, 16) and told["statistics"] < 1e-6
