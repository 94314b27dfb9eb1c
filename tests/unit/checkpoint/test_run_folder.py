"""Numbers of steps, and paths of checkpoints: what cannot be loaded again is refused when it is
saved, and a folder that cannot be searched is not taken for a new one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import autopar
from autopar.checkpoint.run_folder import as_step, check_folder, find_checkpoints
from autopar.errors import RuntimeStateError
from tests.support.remedy_programs_saved import Run

NOT_STEPS = [
    True,
    False,
    -1,
    2**63,
    10**30,
    10**5000,
    -(10**5000),
    1.0,
    "1",
    "a" * 1000,
    None,
    b"1",
    np.bool_(True),
    np.float64(1.0),
    np.int64(-1),
    torch.tensor(True),
    torch.tensor(1.0),
    torch.tensor([1, 2]),
]


@pytest.mark.parametrize("step", NOT_STEPS, ids=lambda value: f"{type(value).__name__}")
def test_a_value_that_is_not_a_number_of_steps_is_refused(step: Any) -> None:
    with pytest.raises(RuntimeStateError, match=r"from 0 to 2\*\*63 - 1") as raised:
        as_step(step)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("step", [0, 3, 2**63 - 1, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_integers_of_any_type_are_numbers_of_steps(step: Any) -> None:
    assert type(as_step(step)) is int and as_step(step) == int(step)


def test_a_refused_step_writes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    refused: tuple[Any, ...] = (10**30, True, "1")
    for step in refused:
        for save in (run.checkpoints.save, run.checkpoints.async_save):
            with pytest.raises(RuntimeStateError, match="is not a number of steps"):
                save(step, run.module)
    assert not run.folder.exists()


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), 2**63 - 1])
def test_a_saved_step_is_loaded(tmp_path: Path, step: Any) -> None:
    run = Run(tmp_path / "run")
    place = run.save(step)
    assert place.is_dir() and run.checkpoints.steps() == (int(step),)
    assert type(run.load()) is int and run.load() == int(step)
    assert run.checkpoints.export(tmp_path / "weights", step=step) == int(step)
    with pytest.raises(RuntimeStateError, match="is not a number of steps"):
        run.checkpoints.export(tmp_path / "weights", step=True)


@pytest.mark.parametrize("keep", [0, -1, 1.5, "2", True, None])
def test_a_number_of_kept_checkpoints_is_an_integer(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(RuntimeStateError, match="keep at least one"):
        autopar.Checkpoints(tmp_path, keep=keep)


@pytest.mark.parametrize("name", ["new\n", "a/../b", "b/.", "ä", " "])
def test_a_folder_may_have_an_unusual_name(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path / name)
    assert run.load() == 0
    run.save(1)
    assert Run(tmp_path / name).load() == 1


def test_a_folder_may_be_a_link_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    Run(tmp_path / "link").save(1)
    os.rename(tmp_path / "real" / "step_000000001", tmp_path / "moved")
    (tmp_path / "real" / "step_000000001").symlink_to(tmp_path / "moved")
    assert Run(tmp_path / "link").load() == 1


def _file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file"


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _broken_link(folder: Path) -> Path:
    (folder / "link").symlink_to("absent")
    return folder / "link"


def _loop(folder: Path) -> Path:
    (folder / "loop").symlink_to("loop")
    return folder / "loop"


def _with(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    """Return a function that creates a folder with an entry."""

    def folder_in(folder: Path) -> Path:
        (folder / "run").mkdir()
        make(folder / "run" / "step_000000001")
        return folder / "run"

    return folder_in


FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "file": (_file, "Not a directory"),
    "below a file": (lambda folder: _file(folder) / "run", "Not a directory"),
    "pipe": (_pipe, "Not a directory"),
    "broken link": (_broken_link, "link is a symbolic link to a missing path"),
    "below a broken link": (
        lambda folder: _broken_link(folder) / "run",
        "link is a symbolic link to a missing path",
    ),
    "link to itself": (_loop, "Too many levels"),
    "null byte": (lambda folder: folder / "a\0b", "embedded null byte"),
    "long name": (lambda folder: folder / ("a" * 300), "File name too long"),
    "file as step": (_with(lambda place: place.write_text("")), "step_000000001 in it is not"),
    "pipe as step": (_with(os.mkfifo), "step_000000001 in it is not a folder"),
    "broken link as step": (
        _with(lambda place: place.symlink_to("absent")),
        "step_000000001 in it is not a folder",
    ),
}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a compiled module."""
    return Run(tmp_path_factory.mktemp("run")).module


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_cannot_be_searched_is_not_taken_for_a_new_one(
    tmp_path: Path, module: Any, kind: str
) -> None:
    make, reason = FOLDERS[kind]
    folder = make(tmp_path)
    checkpoints = autopar.Checkpoints(folder)
    for use in (
        lambda: checkpoints.load(module),
        lambda: checkpoints.save(2, module),
        lambda: checkpoints.async_save(2, module),
        lambda: checkpoints.export(tmp_path / "weights"),
        checkpoints.steps,
    ):
        with pytest.raises(RuntimeStateError) as raised:
            use()
        message = str(raised.value)
        assert reason in message and folder.name.replace("\0", "\\x00") in message
        assert "what to do" in message


def test_other_files_in_the_folder_are_ignored(tmp_path: Path) -> None:
    for name in ("notes.txt", "step_1", "step_000000001.part.txt"):
        (tmp_path / name).write_text("")
    check_folder(tmp_path)
    assert find_checkpoints(tmp_path) == {}


def test_an_unreadable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)  # the tests may run as root
    assert find_checkpoints(tmp_path) == {}
    with pytest.raises(RuntimeStateError, match="Permission denied"):
        check_folder(tmp_path)


def test_a_pipe_in_the_place_of_a_file_does_not_block_loading(tmp_path: Path, module: Any) -> None:
    place = autopar.Checkpoints(tmp_path).save(1, module)
    (place / "autopar.json").unlink()
    os.mkfifo(place / "autopar.json")
    with pytest.raises(RuntimeStateError, match="it is not a regular file"):
        autopar.Checkpoints(tmp_path).load(module)
