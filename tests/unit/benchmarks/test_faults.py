"""`benchmarks.faults`: its cases are valid, its judgements are correct, and a part of it runs."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from autopar.errors import AutoparError, VerificationError
from benchmarks.faults import rank_cases
from benchmarks.faults import worker as worker_module
from benchmarks.faults.__main__ import summary_of, write
from benchmarks.faults.damage import FURTHER_WAYS, differences, pattern_of
from benchmarks.faults.judging import (
    InvalidCase,
    Misbehaviour,
    Notes,
    WrongResult,
    judge,
    refusal_of,
)
from benchmarks.faults.loss_cases import combinations
from benchmarks.faults.losses import all_losses
from benchmarks.faults.model_cases import load, run_plain
from benchmarks.faults.programs import (
    STARTS,
    Recipe,
    fits,
    random_recipe,
    result_of,
    smaller,
    text_of,
)
from benchmarks.faults.steps_further import STEPS
from benchmarks.faults.worker import Worker, waited_s

SOURCES = {"tokens": "features", "vector": "vector", "image": "image"}


def test_losses_and_their_gradients_are_finite() -> None:
    for loss in all_losses():
        model = loss.build()
        result = model(**loss.batch())
        value = result[0] if isinstance(result, tuple) else result
        value.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert grads and all(t.isfinite().all() for t in (value, *grads)), loss.name


def test_chunks_of_a_batch_have_different_numbers_of_valid_labels() -> None:
    """Otherwise, a loss that is wrong for chunks could give the correct value."""
    labels = next(loss for loss in all_losses() if "y" in loss.batch()).batch()["y"]
    assert len({int((part != -100).sum()) for part in labels.chunk(3)}) > 1


@pytest.mark.parametrize("kind", SOURCES)
def test_each_step_runs_in_a_plain_model(kind: str, tmp_path: Path) -> None:
    for name in (name for name, step in STEPS.items() if step.kind == kind):
        start = STARTS[SOURCES[kind]][1]
        path = first_steps(name, kind, start)
        recipe = Recipe(SOURCES[kind], path, "mean square", 4, (1,), "None", False)
        run_plain(load(text_of(recipe, name), tmp_path), recipe)


def first_steps(name: str, kind: str, start: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Return the step, preceded by a step that makes its shape fit if necessary."""
    if fits(STEPS[name], kind, start, 0):
        return ((name, 0),)
    for before, step in STEPS.items():
        for choice in range(8):
            if step.to or not fits(step, kind, start, choice):
                continue
            if fits(STEPS[name], kind, result_of(step, start, choice)[1], 0):
                return ((before, choice), (name, 0))
    raise AssertionError(f"no step leads to {name}")


def test_programs_are_determined_by_their_seed_and_shrink() -> None:
    for seed in range(20):
        recipe = random_recipe(seed)
        assert text_of(recipe, "") == text_of(random_recipe(seed), "")
        assert all(
            len(other.steps) < len(recipe.steps) or other.end != recipe.end
            for other in smaller(recipe)
        )


@pytest.mark.parametrize(
    ("raised", "outcome", "why"),
    [
        (None, "correct", ""),
        (AutoparError("no", remedy="do this"), "refused", ""),
        (AutoparError("no"), "failed", "no remedy"),
        (VerificationError("other", remedy="report"), "failed", "wrong"),
        (WrongResult("other"), "failed", "wrong"),
        (Misbehaviour("hang", "waits"), "failed", "hang"),
        (InvalidCase("plain"), "invalid", ""),
        (KeyError("x"), "failed", "raw exception"),
        (RecursionError(), "failed", "raw exception"),
        (BaseException("of a library"), "failed", "raw exception"),
    ],
)
def test_raised_exception_determines_the_outcome(
    raised: BaseException | None, outcome: str, why: str
) -> None:
    def run(notes: Notes) -> None:
        notes.phase = "plan"
        if raised is not None:
            raise raised

    row = judge(run)
    assert (row["outcome"], row["why"], row["phase"]) == (outcome, why, "plan")
    assert row["ok"] == (outcome in ("correct", "refused"))


def test_refusals_are_counted_ignoring_names_and_numbers() -> None:
    texts = [f"CoupledError: {n} microbatches, at layers.{n}.norm\n  what to do: x" for n in (2, 3)]
    assert refusal_of(texts[0]) == refusal_of(texts[1])
    row = {"kind": "models", "outcome": "refused", "why": "", "error": texts[0], "ok": True}
    failure = {"kind": "models", "outcome": "failed", "why": "hang", "error": "", "ok": False}
    summary = summary_of([row, {**row, "error": texts[1]}, failure])
    assert summary["outcomes"] == {"models": {"tried": 3, "refused": 2, "failed": 1}}
    assert list(summary["refusals"].values()) == [2] and summary["failures"] == {"hang": 1}


def test_report_contains_only_the_programs_of_failures(tmp_path: Path) -> None:
    base = {"kind": "models", "why": "", "error": None, "program": "x"}
    rows = [{**base, "outcome": "correct", "ok": True}, {**base, "outcome": "failed", "ok": False}]
    write(str(tmp_path / "report.json"), rows)
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert ["program" in row for row in data["rows"]] == [False, True]
    assert data["env"]["torch"] == torch.__version__


@pytest.mark.parametrize("way", FURTHER_WAYS)
def test_damage_changes_the_text_and_is_determined_by_its_seed(way: str) -> None:
    text = json.dumps({"a": [{"s": 1.5, "n": 3, "name": "x"}, {"s": 2.5, "n": 4, "name": "y"}]})
    results = [FURTHER_WAYS[way](text, random.Random(seed)) for seed in range(50)]
    assert results == [FURTHER_WAYS[way](text, random.Random(seed)) for seed in range(50)]
    assert sum(damaged.text != text for damaged in results) > 40
    if way == "falsified":
        assert {pattern_of(damaged.path) for damaged in results} >= {"a.*.s", "a.*.n", "a.*.name"}
        assert all(json.loads(damaged.text) != json.loads(text) for damaged in results)


def test_differences_ignore_the_order_of_unordered_lists() -> None:
    one = {"a": [{"b": [1, 2]}, {"b": [3]}], "c": [1, 2], "d": 1}
    other = {"a": [{"b": [3]}, {"b": [2, 1]}], "c": [2, 1], "d": 1}
    assert not differences(one, other, ("a", "a.b", "c"))
    assert differences({"a": [[1, 2], [3]]}, {"a": [[3], [2, 1]]}, ("a",)) == [
        ("a", 0, 0),
        ("a", 0, 1),
    ]
    assert differences(one, other, ("a", "a.b")) == [("c", 0), ("c", 1)]
    assert differences(one, {**other, "d": 1.0}, ("a", "a.b", "c")) == [("d",)]
    less = {"a": [{"b": [4]}, {"b": [1, 2]}], "c": [1, 2, 2]}
    assert sorted(differences(one, less, ("a", "a.b", "c")), key=str) == [
        ("a", 1, "b", 0),
        ("c",),
        ("d",),
    ]


def ended(status: int | None, *losses: str, error: str = "") -> rank_cases.Ended:
    out = "".join(f"loss {i} {loss}\n" for i, loss in enumerate(losses))
    finished = "end\n" if status == 0 else ""
    return rank_cases.Ended(status, out + finished, error)


NAMED = "Traceback\nautopar.errors.RuntimeStateError: rank 1 made another call"
PREFIXED = "\n".join(f"[rank0]: {line}" for line in NAMED.splitlines())  # the format of torch


@pytest.mark.parametrize(
    ("ranks", "fault", "expected"),
    [
        ([ended(1, "1.0", error=NAMED)] * 2, "additional call", None),
        ([ended(1, "1.0", error=NAMED), ended(-9, "1.0")], "SIGKILL", None),
        ([ended(1, "1.0", error=PREFIXED)] * 2, "additional call", None),
        ([ended(0, "1.0", "0.5")] * 2, "additional call", None),  # the fault had no effect
        ([ended(0, "1.0", "0.5")] * 2, "sleeps", None),
        ([ended(0, "1.0", "0.7")] * 2, "additional call", WrongResult),
        ([ended(0, "1.0", "0.7")] * 2, "sleeps", WrongResult),
        ([ended(None, "1.0"), ended(1, error=NAMED)], "additional call", Misbehaviour),
        ([ended(-6, "1.0", error="abort"), ended(1, error=NAMED)], "smaller batch", Misbehaviour),
        ([ended(1, error=NAMED.replace("1", "0"))] * 2, "additional call", WrongResult),
    ],
)
def test_judgement_of_ranks(
    ranks: list[rank_cases.Ended], fault: str, expected: type[Exception] | None
) -> None:
    if expected is None:
        rank_cases.judge_ranks(ranks, ("1.0", "0.5"), 1, fault)
    else:
        with pytest.raises(expected):
            rank_cases.judge_ranks(ranks, ("1.0", "0.5"), 1, fault)


# A part of the cases that the command runs. Full runs take hours:
# `python -m benchmarks.faults --seconds N`.
NIGHTLY = {
    "models": range(14),
    "losses": range(20),
    "files": (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14),
    "commands": range(16, 46),
    "checkpoints": (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15),
    "ranks": (23,),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NIGHTLY)
def test_cases_are_correct_or_refused(kind: str) -> None:
    worker = Worker(limit_s=300.0)
    try:
        rows = [{"seed": seed, **worker.run(kind, seed)} for seed in NIGHTLY[kind]]
    finally:
        worker.close()
    assert not [row for row in rows if not row["ok"]]
    assert any(row["outcome"] == "correct" for row in rows)


@pytest.mark.slow
def test_worker_reports_crashes_and_hangs_and_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LOST, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}")
    worker = Worker(limit_s=60.0)
    try:
        assert worker.run("files", 1)["ok"]
        worker.limit_s = 3.0
        assert worker.run("files", -2)["why"] == "hang"
        worker.limit_s = 60.0
        assert worker.run("files", -1)["why"] == "crash"
        assert worker.run("files", 1)["ok"]
    finally:
        worker.close()


@pytest.mark.parametrize("is_starved", [False, True])
def test_waiting_for_a_cpu_does_not_count_as_hanging(
    monkeypatch: pytest.MonkeyPatch, is_starved: bool
) -> None:
    monkeypatch.setattr(worker_module, "waited_s", lambda pid: time.monotonic() * is_starved)
    monkeypatch.setattr(worker_module, "POLL_S", 0.02)
    answers, write = os.pipe()
    worker = Worker(limit_s=0.1, process=cast(Any, SimpleNamespace(pid=0)), answers=answers)
    timer = threading.Timer(0.3, os.write, (write, b"{}\n"))
    timer.start()
    assert worker._answer(time.monotonic()) == ("{}\n" if is_starved else None)
    timer.join()
    worker.log.close()
    for end in (answers, write):
        os.close(end)


def test_the_time_that_a_process_waits_for_a_cpu_is_read() -> None:
    _, before_ns, _ = Path("/proc/self/schedstat").read_text().split()
    seconds = waited_s(os.getpid())
    _, after_ns, _ = Path("/proc/self/schedstat").read_text().split()
    assert int(before_ns) / 1e9 <= seconds <= int(after_ns) / 1e9
    assert waited_s(2**30) == 0.0, "there is no such process"


LOST = """
import os, random, time
seeded = random.Random.seed
def seed(self, number=None, version=2):
    if number == -1:
        os._exit(4)
    if number == -2:
        time.sleep(100)
    seeded(self, number, version)
random.Random.seed = seed
"""


def test_all_losses_have_several_variants() -> None:
    assert len(all_losses()) >= 70
    assert len(combinations()) == len(set(combinations())) >= 4 * len(all_losses())
