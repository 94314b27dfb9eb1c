"""Ranks with different weights train the model of the first rank. Ranks with different batches are
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import run_processes

pytestmark = pytest.mark.multiproc
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def facts() -> list[dict[str, Any]]:
    return run_processes(2, str(HERE / "worker_equal.py"), "run")


@pytest.mark.parametrize("name", ["ddp", "fsdp", "stages"])
def test_different_weights_are_replaced_by_those_of_rank_0_with_one_warning(
    facts: list[dict[str, Any]], name: str
) -> None:
    first, second = (fact[name] for fact in facts)
    assert first["own"] != second["own"]
    assert first["loss"] == second["loss"] == pytest.approx(first["expected"], rel=1e-6)
    for held in (first["held"], second["held"]):
        assert held and all(held[key] == first["own"][key] for key in held)
    said = [line for line in first["told"] + second["told"] if "differ between ranks" in line]
    assert said == [
        "5 parameters or buffers differ between ranks, first 'layers.0.weight': all ranks use"
        " those of rank 0 (set the same seed on every rank to avoid this)"
    ]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "stages"])
def test_a_different_batch_is_refused_on_every_rank_even_after_equal_ones(
    facts: list[dict[str, Any]], name: str
) -> None:
    for fact in facts:
        for said in (fact[name]["refusal"], fact[name]["later"]):
            assert (
                "rank 1 got a different batch from rank 0: '0'" in said and 'batch="local"' in said
            )


@pytest.mark.parametrize("name", ["ddp", "fsdp", "stages"])
def test_different_random_states_are_refused_on_every_rank(
    facts: list[dict[str, Any]], name: str
) -> None:
    for fact in (each[name]["random"] for each in facts):
        for said in (fact["seed"], fact["state"]):
            assert "rank 1 began with a different random state from rank 0" in said
            assert "pm.manual_seed(seed)" in said
        assert fact["losses"] == fact["again"] == facts[0][name]["random"]["losses"]
        assert len(set(fact["losses"])) == 3


def test_a_rank_that_changes_its_parameter_replica_is_named_on_every_rank() -> None:
    first, second = run_processes(2, str(HERE / "worker_equal.py"), "run_weights")
    assert first == second
    third, fourth, unchanged = first["ddp"]
    for said in (third, fourth):  # the fourth call compares values
        assert said.startswith("3: rank 1 holds different values of 'layers.0.weight' from rank 0")
        assert "load_state_dict" in said
    assert unchanged == ""
    assert first["fsdp"] == first["stages"] == ["", "", ""], "each rank has a part of its own"


@pytest.fixture(scope="module")
def parts() -> list[dict[str, dict[str, str]]]:
    return run_processes(4, str(HERE / "worker_equal.py"), "run_parts")


@pytest.mark.parametrize(
    ("name", "splitters", "usual", "ranks"),
    [
        ("tensor", "(0,)", "rank 2", "ranks 2 and 3"),
        ("whole", "()", "ranks 0, 1 and 2", "ranks 0, 1, 2 and 3"),
    ],
)
def test_local_batches_that_differ_but_are_not_sharded_by_the_plan_are_refused(
    parts: list[dict[str, dict[str, str]]], name: str, splitters: str, usual: str, ranks: str
) -> None:
    for fact in (each[name] for each in parts):
        assert fact["splitters"] == splitters and fact["same"] == fact.get("remedy", "") == ""
        assert f"rank 3 got a different batch from {usual}: '0'" in fact["other"]
        assert f"which the plan does not shard between {ranks}" in fact["other"]
        assert "pass the same tensors on these ranks" in fact["other"]


def test_local_batches_that_the_plan_shards_over_all_ranks_may_differ(
    parts: list[dict[str, dict[str, str]]],
) -> None:
    for fact in (each["data"] for each in parts):
        assert fact == {"splitters": "(0, 1)", "same": "", "other": ""}
