"""On several processes, a script can read, write and combine parameters and gradients as those of
the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import run_processes
from worker_held import READS, WRITES

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_held.py")
CASES = ["steps", *WRITES, *(f"read {name}" for name in READS)]
NUM = {"fsdp": 2, "heads": 2, "grid": 4}
_known: dict[str, list[dict[str, float]]] = {}


def told(kind: str) -> list[dict[str, float]]:
    if kind not in _known:
        _known[kind] = run_processes(NUM[kind], WORKER, "run", kind)
    return _known[kind]


@pytest.mark.parametrize("kind", NUM)
def test_script_operations_on_a_weight_and_its_gradient_match_the_plain_model(
    kind: str,
) -> None:
    tolerance = 1e-12 if kind == "fsdp" else 1e-6  # GPT-2 computes its loss in fp32
    apart = {case: max(each[case] for each in told(kind)) for case in CASES}
    assert {case: far for case, far in apart.items() if not far < tolerance} == {}


def test_heads_penalties_and_saved_optimizer_state_train_as_with_the_plain_model() -> None:
    for each in run_processes(2, WORKER, "train"):
        assert {case: far for case, far in each.items() if not far < 1e-10} == {}


@pytest.mark.slow
def test_optimizers_that_read_full_parameters_step_as_with_the_plain_model() -> None:
    for each in run_processes(2, WORKER, "optimize"):
        assert {case: far for case, far in each.items() if not far < 1e-10} == {}


@pytest.mark.slow
def test_parameters_unfrozen_after_compile_train_as_those_of_the_plain_model() -> None:
    for each in run_processes(2, WORKER, "thaw"):
        assert each["apart"] < 1e-12
        assert each["programs"] == 3, (
            "for two more sets of trained parameters, the last of which does for a third, and for a"
            " shape"
        )


def test_impossible_operations_on_parameters_are_refused_with_the_reason() -> None:
    first, second = run_processes(2, WORKER, "refusals")
    assert first == second
    said = "rank 1 passed a different tensor to mul_ from rank 0, together with a sharded parameter"
    assert said in first["different tensors"]
    assert "torch.stack" in first["torch.tensor"]
    assert "must match" in first["wrong shape"] and "leaf Variable" in first["leaf"]


@pytest.mark.slow
def test_the_norm_of_one_stage_is_refused_and_that_of_the_module_covers_all_stages() -> None:
    found: list[dict[str, Any]] = run_processes(2, WORKER, "stages")
    for each in found:
        assert each["apart"] < 1e-6
        assert all("pm.clip_grad_norm_" in each[foreach] for foreach in ("None", "False"))
        for name in ("penalty", "with a loss"):
            assert "would only include those of this rank's stage" in each[name]
        assert "of one" not in each
