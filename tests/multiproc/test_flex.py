"""Models with flex attention train on two processes as the dense reference of torch on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import run_processes

pytestmark = pytest.mark.multiproc
KINDS = {"soft cap": "ddp", "alibi": "fsdp", "documents": "heads", "relative bias": "stages"}


@pytest.fixture(scope="module")
def facts() -> list[dict[str, Any]]:
    return run_processes(2, str(Path(__file__).parent / "worker_flex.py"), "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "llama"])
def test_loss_and_gradients_with_flex_attention_match_the_plain_model(
    facts: list[dict[str, Any]], kind: str
) -> None:
    tolerance = 1e-6 if kind == "llama" else 1e-12  # transformers computes norms in float32
    for fact in (each[kind] for each in facts):
        assert fact["loss"] < tolerance and fact["gradients"] < tolerance
        assert fact["largest"] > 1e3 * tolerance
    everywhere = [each[kind]["missing"] for each in facts]
    assert 0 in everywhere or KINDS.get(kind) == "stages"
