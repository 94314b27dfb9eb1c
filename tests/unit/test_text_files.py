"""Paths of files that cannot be read or written: the error is one of autopar's, and names the path
and the reason."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar import HardwareProfile, Plan
from autopar.api import planning
from autopar.api.arguments import default_hardware
from autopar.cli.commands import app
from autopar.core.text_files import open_text, reason_of, why_unreadable, why_unwritable, write_file
from autopar.errors import AutoparError, HardwareError, PlanError, printable
from autopar.hf import load_function
from autopar.profiler import measure as measuring
from autopar.report.page import report
from autopar.runtime.launching import launch
from tests.support.made_plan import made_plan
from tests.support.remedy_programs import planned

Action = Callable[[Path], object]
LONG = "a" * 300 + ".json"


def pipe_in(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.json")
    return folder / "pipe.json"


def link_in(folder: Path, target: str) -> Path:
    (folder / "link.json").symlink_to(target)
    return folder / "link.json"


def folder_in(folder: Path) -> Path:
    (folder / "folder.json").mkdir()
    return folder / "folder.json"


def file_as_folder_in(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "plan.json"


Place = Callable[[Path], Path]
UNREADABLE: dict[str, tuple[Place, str]] = {
    "null byte": (lambda folder: folder / "a\0b.json", "embedded null byte"),
    "long name": (lambda folder: folder / LONG, "File name too long"),
    "missing": (lambda folder: folder / "absent.json", "No such file"),
    "missing folder": (lambda folder: folder / "absent" / "plan.json", "No such file"),
    "file as folder": (file_as_folder_in, "Not a directory"),
    "folder": (folder_in, "Is a directory"),
    "pipe": (pipe_in, "it is not a regular file"),
    "device": (lambda folder: Path("/dev/zero"), "it is not a regular file"),
    "broken link": (lambda folder: link_in(folder, "absent"), "No such file"),
    "link to itself": (lambda folder: link_in(folder, "link.json"), "Too many levels"),
}
UNWRITABLE: dict[str, tuple[Place, str]] = {
    "null byte": (lambda folder: folder / "a\0b.html", "embedded null byte"),
    "long name": (lambda folder: folder / ("a" * 300 + ".html"), "File name too long"),
    "missing folder": (lambda folder: folder / "absent" / "plan.html", "No such file"),
    "file as folder": (lambda folder: file_as_folder_in(folder) / "p.html", "Not a directory"),
    "folder": (folder_in, "Is a directory"),
    "pipe": (pipe_in, "a pipe that no process reads"),
}


def refusal(error: type[AutoparError], action: Action, path: Path) -> str:
    """Return the message of an error, which contains the path."""
    with pytest.raises(error) as raised:
        action(path)
    message = str(raised.value)
    assert type(raised.value) is error
    assert printable(str(path)) in message.replace("\\\\", "\\") and "what to do" in message
    return message


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize(
    ("load", "error"), [(Plan.load, PlanError), (HardwareProfile.load, HardwareError)]
)
def test_a_file_that_cannot_be_read_is_refused_with_its_path_and_the_reason(
    tmp_path: Path, kind: str, load: Action, error: type[AutoparError]
) -> None:
    place, reason = UNREADABLE[kind]
    assert reason in refusal(error, load, place(tmp_path))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    for load, error in ((Plan.load, PlanError), (HardwareProfile.load, HardwareError)):
        assert "it is not a text file" in refusal(error, load, tmp_path / "plan.json")


def test_every_function_that_takes_a_plan_refuses_a_null_byte() -> None:
    model, x = nn.Linear(4, 4), torch.ones(8, 4)
    uses: list[Callable[[str], object]] = [
        autopar.explain,
        lambda path: autopar.diff(path, path),
        lambda path: autopar.check(path, model, (x,)),
        lambda path: autopar.verify(path, model, (x,)),
        lambda path: autopar.compile(model, example_inputs=(x,), plan=path),
    ]
    for use in uses:
        with pytest.raises(PlanError, match="embedded null byte"):
            use("a\0b")


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_a_file_that_cannot_be_written_is_refused_with_its_path_and_the_reason(
    tmp_path: Path, kind: str
) -> None:
    place, reason = UNWRITABLE[kind]
    path = place(tmp_path)
    assert reason in refusal(PlanError, made_plan().save, path)
    assert reason in refusal(AutoparError, lambda path: write_file(path, b"", "a file"), path)


@pytest.mark.parametrize("name", ["a\0b.html", "absent/a.svg"])
def test_a_report_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    message = refusal(AutoparError, lambda path: report(made_plan(), path), tmp_path / name)
    assert "cannot write the report" in message


def test_a_profile_that_cannot_be_written_is_refused_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(measuring, "_run_workers", lambda *_: started.append("workers"))
    for path in (tmp_path / "a\0b", folder_in(tmp_path), file_as_folder_in(tmp_path)):
        refusal(HardwareError, lambda path: measuring.measure(out=path), path)
    assert not started


def test_an_integer_program_that_cannot_be_written_is_refused_before_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(planning, "plan_call", lambda *_, **__: started.append("planning"))
    for path in (tmp_path / "a\0b", folder_in(tmp_path), tmp_path / "absent" / "p.lp"):
        refusal(AutoparError, lambda path: planned(write_lp=path)(), path)
    assert not started


def test_a_pipe_that_another_process_reads_is_written(tmp_path: Path) -> None:
    path, found = pipe_in(tmp_path), list[str]()

    def read() -> None:
        """Read late, so that the pipe is full for some time."""
        with path.open() as file:
            time.sleep(0.3)
            found.append(file.read())

    reader = threading.Thread(target=read)
    reader.start()
    content = "text\n" * 100_000  # more than a pipe holds
    while True:
        try:
            write_file(path, content, "a file")
            break
        except AutoparError as error:  # the reader has not opened the pipe yet
            assert "no process reads" in str(error)
    reader.join()
    assert found == [content]


def test_a_check_before_the_work_finds_the_reasons_without_creating_anything(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    before = sorted(os.listdir(tmp_path))
    assert why_unreadable(tmp_path / "file") == why_unwritable(tmp_path / "file") == ""
    assert why_unwritable(tmp_path / "new") == ""
    assert why_unreadable(tmp_path / "new") == "the file does not exist"
    assert why_unreadable(tmp_path) == why_unwritable(tmp_path) == "it is a folder"
    assert why_unreadable("/dev/null") == "it is not a regular file"
    assert why_unwritable("/dev/null") == ""
    assert why_unwritable(tmp_path / "absent" / "new").startswith("the folder does not exist")
    for find in (why_unreadable, why_unwritable):
        assert find("a\0b") == "no file can have this name (embedded null byte)"
        assert find(tmp_path / LONG) == "File name too long"
        assert find(tmp_path / "file" / "new") == "Not a directory"
    assert sorted(os.listdir(tmp_path)) == before


def test_missing_permission_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_text("")
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root
    assert why_unreadable(tmp_path / "plan.json") == "Permission denied"
    assert why_unwritable(tmp_path / "plan.json") == "Permission denied"
    assert why_unwritable(tmp_path / "new").startswith("it is not writable")


def test_an_error_without_a_message_of_the_system_has_a_reason() -> None:
    assert reason_of(TimeoutError("no answer")) == "no answer"
    assert reason_of(TimeoutError()) == "TimeoutError"
    assert reason_of(OSError(13, "Permission denied")) == "Permission denied"


def test_a_file_descriptor_is_closed_if_the_file_is_refused(tmp_path: Path) -> None:
    path, before = pipe_in(tmp_path), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="regular"):
            open_text(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_script_or_module_with_a_bad_name_does_not_exist() -> None:
    for name in ("a" * 5000 + ".py", "a\0b.py"):
        with pytest.raises(AutoparError, match="does not exist"):
            load_function(f"{name}:made")
        with pytest.raises(AutoparError, match="does not exist"):
            launch(Path(name), [])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("explain", LONG), "File name too long"),
        (("diff", "pipe.json", "pipe.json"), "it is not a regular file"),
        (("check", "pipe.json", "--json", LONG), "File name too long"),
        (("check", "pipe.json", "--json", "pipe.json/a"), "Not a directory"),
        (("report", "pipe.json", "--out", LONG), "File name too long"),
        (("plan", "--mesh", "2", "--model", "gpt2", "--out", LONG), "File name too long"),
        (("plan", "--mesh", "2", "--model", "gpt2", "--write-lp", LONG), "File name too long"),
        (("profile", "--out", LONG), "File name too long"),
        (("run", LONG), "does not exist"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_commands_refuse_bad_paths_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], complaint: str
) -> None:
    pipe_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, arguments)
    assert isinstance(found.exception, AutoparError), found.output
    assert complaint in str(found.exception)


def test_a_pipe_in_the_cache_is_listed_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    (tmp_path / "entries").mkdir()
    os.mkfifo(tmp_path / "entries" / "0123.json")
    assert "damaged" in CliRunner().invoke(app, ["cache", "list"]).output


def test_a_cache_folder_with_a_bad_name_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", "/tmp/" + "a" * 5000)
    monkeypatch.setenv("AUTOPAR_CACHE", "plans")
    found = CliRunner().invoke(app, ["cache", "info"])
    assert (found.exit_code, "entries: 0" in found.output) == (0, True)


def test_a_home_folder_with_a_bad_name_has_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_HOME", "/tmp/" + "a" * 5000)
    assert default_hardware("cpu") == "cpu-gloo"
    with pytest.raises(HardwareError, match="has not been measured"):
        HardwareProfile.load("local")
