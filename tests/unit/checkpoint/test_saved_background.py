"""Checkpoints written in the background. Training continues, a crash leaves the previous
checkpoint, and no error is lost."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.checkpoint import files, manager, rank_parts
from autopar.errors import RuntimeStateError

BATCH = {"x": torch.linspace(-1.0, 1.0, 32).reshape(4, 8)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).pow(2).mean()


class RunningMean:
    """An object whose state is a tensor that changes in place."""

    def __init__(self) -> None:
        self.mean = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class Training:
    """A model, its optimizer, its scheduler, and an additional state."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        torch.manual_seed(0)
        self.module: Any = autopar.compile(Net(), example_inputs=BATCH, hardware="cpu-gloo")
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.kept = RunningMean()
        self.checkpoints = autopar.Checkpoints(folder, keep=keep)

    @property
    def all(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "kept": self.kept,
        }

    def step(self) -> None:
        self.module(**BATCH).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.kept.mean += 1.0

    def state(self) -> str:
        moments = [
            (name, x.tolist()) for of in self.optimizer.state.values() for name, x in of.items()
        ]
        values = [(name, p.tolist()) for name, p in self.module.state_dict().items()]
        return repr(
            (
                values,
                moments,
                self.optimizer.param_groups[0]["lr"],
                self.scheduler.state_dict(),
                self.kept.mean,
            )
        )


class Gate:
    """Block all writes of tensors until `opened` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        plain = rank_parts.write_tensors

        def write(path: Path, tensors: Any) -> int:
            self.reached.set()
            assert self.opened.wait(60)
            return plain(path, tensors)

        monkeypatch.setattr(rank_parts, "write_tensors", write)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.mark.slow
def test_training_during_a_background_save_does_not_change_the_checkpoint(
    tmp_path: Path, gate: Gate
) -> None:
    run = Training(tmp_path)
    for step in (1, 2, 3):  # later steps reuse the memory of the copies
        run.step()
        expected = run.state()
        place = run.checkpoints.async_save(step, **run.all)
        assert gate.reached.wait(60) and not place.exists()
        run.step()
        run.step()
        assert run.state() != expected
        gate.opened.set()
        run.checkpoints.wait()
        assert place == tmp_path / f"step_{step:09d}" and place.is_dir()
        other = Training(tmp_path)
        assert other.checkpoints.load(**other.all) == step and other.state() == expected
        gate.opened.clear(), gate.reached.clear()
        run.checkpoints.load(**run.all)
    assert run.checkpoints.steps() == (2, 3) and not list(tmp_path.glob("*.part"))


def test_async_save_writes_the_same_files_as_save(tmp_path: Path) -> None:
    for name in ("save", "async_save"):
        run = Training(tmp_path / name)
        run.step()
        getattr(run.checkpoints, name)(1, **run.all)
        run.checkpoints.wait()
    places = [tmp_path / name / "step_000000001" for name in ("save", "async_save")]
    names = [sorted(path.name for path in place.iterdir()) for place in places]
    assert names[0] == names[1]
    for name in set(names[0]) - {"autopar.json"}:
        assert (places[0] / name).read_bytes() == (places[1] / name).read_bytes()
    abouts = [json.loads((place / "autopar.json").read_text()) for place in places]
    assert abouts[0]["files"] == abouts[1]["files"]


NEXT: dict[str, Callable[[Training], object]] = {
    "wait": lambda run: run.checkpoints.wait(),
    "save": lambda run: run.checkpoints.save(2, **run.all),
    "async_save": lambda run: run.checkpoints.async_save(2, **run.all),
    "load": lambda run: run.checkpoints.load(**run.all),
    "steps": lambda run: run.checkpoints.steps(),
    "export": lambda run: run.checkpoints.export(run.checkpoints.folder / "weights"),
}


def test_background_error_is_logged_and_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Training(tmp_path)
    run.step()
    run.checkpoints.save(0, **run.all)
    expected = run.state()

    def raise_disk_full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    for name, call in NEXT.items():
        run.step()
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr(rank_parts, "write_tensors", raise_disk_full)
            run.checkpoints.async_save(1, **run.all)
            assert run.checkpoints._background is not None
            run.checkpoints._background._thread.join()
        assert (
            "step 1 was not saved in the background" in caplog.text
            and "No space left" in caplog.text
        ), name
        before = run.state()
        with pytest.raises(
            RuntimeStateError,
            match=r"step 1 was not saved in the background: OSError: (.|\n)*No space left",
        ) as refusal:
            call(run)
        assert "free disk space" in refusal.value.remedy and run.state() == before, name
        assert run.checkpoints.steps() == (0,), (
            "the error is raised once, and the call has no effect"
        )
    other = Training(tmp_path)
    assert other.checkpoints.load(**other.all) == 0 and other.state() == expected
    assert run.checkpoints.save(3, **run.all).is_dir() and not list(tmp_path.glob("*.part"))


def test_next_call_waits_for_the_previous_save(tmp_path: Path, gate: Gate) -> None:
    run = Training(tmp_path, keep=5)
    run.checkpoints.async_save(1, **run.all)
    gate.opened.set()
    run.checkpoints.async_save(2, **run.all)
    run.checkpoints.save(3, **run.all)
    run.checkpoints.async_save(4, **run.all)
    assert run.checkpoints.steps() == (1, 2, 3, 4)
    with pytest.raises(RuntimeStateError, match="step 2 cannot be saved because later steps exist"):
        run.checkpoints.async_save(2, **run.all)
    with pytest.raises(RuntimeStateError, match="is not a number of steps"):
        run.checkpoints.async_save(-1, **run.all)
    run.checkpoints.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    "again", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["new", "again"]
)
def test_kill_at_any_time_leaves_the_previous_or_the_new_checkpoint(
    tmp_path: Path, again: bool
) -> None:
    """A child process is killed at its n-th file system call, for increasing n, until it
    completes."""
    run = Training(tmp_path, keep=1)
    run.step()
    run.checkpoints.save(1, **run.all)
    states, step, outcomes = {1: run.state()}, 1, set()
    for number in range(100):
        run.step()
        step += not again
        status = save_and_kill_at(number, run, step)
        other = Training(tmp_path, keep=1)
        loaded_step = other.checkpoints.load(**other.all)
        is_new = other.state() == run.state()
        assert loaded_step == (step if is_new else step - (not again)) and (
            is_new or other.state() == states[1]
        ), number
        outcomes.add(is_new)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        run.checkpoints.load(**run.all)
        run.checkpoints.save(loaded_step, **run.all)  # removes partial checkpoints
        assert not [
            each for each in tmp_path.glob("*.part") if each.name < f"step_{loaded_step + 1:09d}"
        ]
        states[1], step = run.state(), loaded_step
    assert outcomes == {True, False} and number > 10


def save_and_kill_at(number: int, run: Training, step: int) -> int:
    """Save a checkpoint in the background in a child process that is killed before its n-th system
    call. Return the exit status of the child."""
    parent = manager.this_run()
    others = {"scheduler": run.scheduler, "kept": run.kept}
    saving = run.checkpoints._collect(step, run.module, run.optimizer, others, None)
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        manager._run_of_process = lambda _: parent  # the child belongs to the same run
        calls_left = [number]

        def with_kill(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if calls_left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls_left[0] -= 1
                return plain(*args, **kwargs)

            return call

        for name in ("fsync", "rename", "mkdir", "rmdir"):
            setattr(os, name, with_kill(getattr(os, name)))
        plain = rank_parts.write_tensors

        def write_half_first(path: Path, tensors: dict[str, Tensor]) -> int:
            with_kill(lambda: path.write_bytes(b"half"))()
            with_kill(lambda: None)()
            return plain(path, tensors)

        rank_parts.write_tensors = write_half_first
        files.Background(saving, run.checkpoints._finish).result()
        os._exit(0)
    except BaseException:  # reported by the exit status
        import traceback

        traceback.print_exc()
        os._exit(1)


def test_partially_written_checkpoint_is_logged_and_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Training(tmp_path)
    run.checkpoints.save(1, **run.all)
    assert os.WIFSIGNALED(save_and_kill_at(2, run, 2))
    (partial,) = tmp_path.glob("*.part")
    assert partial.name.startswith("step_000000002.")
    other = Training(tmp_path)
    assert (
        other.checkpoints.load(**other.all) == 1
        and f"incomplete checkpoints are not loaded: {partial.name}" in caplog.text
    )


def test_first_rank_waits_for_the_markers_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Training(tmp_path)
    saving = run.checkpoints._collect(1, run.module, None, {}, None)
    saving = files.Saving(
        **{name: getattr(saving, name) for name in saving.__slots__} | {"num_ranks": 3}
    )
    place = saving.place

    def finish() -> str:
        background = files.Background(saving, lambda *_: None)
        try:
            background.result()
        except RuntimeStateError as error:
            return str(error)
        return ""

    for rank in (1, 2):
        (place / f"rank_{rank:05d}.done").write_text(f'{{"rank_{rank:05d}.safetensors": {rank}}}')
    monkeypatch.setattr(files, "gone_ranks", lambda: frozenset({1, 2}))
    assert finish() == "", "processes may end after they have written their markers"
    (place / "rank_00001.done").write_text("{}")
    assert "ranks [2] ended without their shards" in finish(), "the first rank does not wait"
    monkeypatch.undo()
    monkeypatch.setattr(files, "WITHIN_S", 0.1)
    (place / "rank_00001.done").write_text("{}")
    assert "ranks [2] did not write their shards in time" in finish()
    (place / "rank_00002.failed").write_text('"no space"')
    assert "rank 2 could not write its part: no space" in finish()
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    assert "step 1 was not saved in the background: FileNotFoundError" in finish()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, MemoryError])
def test_no_exception_of_a_background_save_is_lost(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> int:
        raise kind("stopped")

    run = Training(tmp_path)
    monkeypatch.setattr(rank_parts, "write_tensors", stop)
    run.checkpoints.async_save(1, run.module)
    with pytest.raises(
        RuntimeStateError, match=f"step 1 was not saved in the background: {kind.__name__}: stopped"
    ):
        run.checkpoints.wait()


def test_a_rank_reports_its_failure_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_disk(path: Path, *_: Any) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    run = Training(tmp_path)
    saving = run.checkpoints._collect(1, run.module, None, {}, None)
    first, second = (
        files.Saving(
            **{name: getattr(saving, name) for name in saving.__slots__}
            | {"rank": rank, "num_ranks": 2}
        )
        for rank in (0, 1)
    )
    with monkeypatch.context() as patch:
        patch.setattr(rank_parts, "write_tensors", fill_disk)
        patch.setattr(files, "write_bytes", fill_disk)
        with pytest.raises(RuntimeStateError, match="No space left"):
            files.Background(second, lambda *_: None).result()
    assert not (saving.place / saving.parts.file).exists(), "the partial file is removed"
    monkeypatch.setattr(files, "WITHIN_S", 5.0)
    with pytest.raises(RuntimeStateError, match="rank 1 could not write its part: see its log"):
        files.Background(first, lambda *_: None).result()
