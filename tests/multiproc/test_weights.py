"""Weights are loaded from model files and saved to model files under any sharding. Each rank
reads only its shards."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from harness import run_processes  # this also imports modules shared by tests
from safetensors.torch import load_file, save_file
from worker_weights import PLANS

from benchmarks.zoo import build

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_weights.py")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, _ = build("gpt2")
    folder = tmp_path_factory.mktemp("theirs")
    save_file(
        {name: x.detach() for name, x in model.named_parameters()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("plan", PLANS)
def test_every_rank_reads_its_shards_and_the_full_model_is_written(
    plan: str, theirs: Path, tmp_path: Path
) -> None:
    mesh = PLANS[plan][1]
    told = run_processes(
        math.prod(mesh.values()),
        WORKER,
        "there_and_back",
        plan,
        str(theirs),
        str(tmp_path / "ours"),
    )
    model, batch = build("gpt2")
    wanted, found = load_file(theirs / "model.safetensors"), dict[str, torch.Tensor]()
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    for each in files:
        found |= load_file(each)
    assert len(files) > 1 and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], x) for name, x in wanted.items())
    assert all(each["read"] == each["held"] < each["all"] for each in told), (
        "no rank reads more than it holds"
    )
    assert [each["loss"] for each in told] == pytest.approx(
        [model(**batch).loss.item()] * len(told), rel=1e-5
    )
    assert {each["hosts"] for each in told} == {plan == "on hosts"}
    assert not list((tmp_path / "ours").glob(".*"))


def test_weights_missing_for_one_stage_are_refused_on_all_ranks(
    theirs: Path, tmp_path: Path
) -> None:
    here = load_file(theirs / "model.safetensors")
    last = max(name for name in here if ".h." in name)
    del here[last]
    save_file(here, tmp_path / "model.safetensors")
    first, second = run_processes(2, WORKER, "refused", str(tmp_path))
    assert first == second and len(first) == 2
    assert f"{last} is missing" in first[0] and "rank 1" in first[0]
    assert "choose a writable folder" in first[1]
