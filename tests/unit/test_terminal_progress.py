"""Long operations show progress on a terminal or in the log. Short ones are silent."""

from __future__ import annotations

import io
import logging
import re
import time

import pytest
from rich.console import Console

from autopar.api import planning
from autopar.core import terminal


def shown(
    monkeypatch: pytest.MonkeyPatch, *, after_s: float, takes_s: float, is_terminal: bool = True
) -> str:
    told = io.StringIO()
    monkeypatch.setattr(terminal, "err", Console(file=told, force_terminal=is_terminal, width=80))
    with terminal.progress_of_long("capturing", after_s) as tell:
        tell("solving")
        time.sleep(takes_s)
    return told.getvalue()


def test_only_long_operations_show_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "solving …" in shown(monkeypatch, after_s=0.01, takes_s=0.5)
    assert shown(monkeypatch, after_s=30.0, takes_s=0.0) == ""
    assert shown(monkeypatch, after_s=0.01, takes_s=0.2, is_terminal=False) == ""


def test_without_a_terminal_long_operations_are_logged_at_a_limited_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(terminal, "_EVERY_S", 30.0)
    with caplog.at_level(logging.INFO, "autopar"):
        assert shown(monkeypatch, after_s=0.01, takes_s=0.5, is_terminal=False) == ""
        assert [record.getMessage() for record in caplog.records] == ["solving … (0 s elapsed)"]
        shown(monkeypatch, after_s=30.0, takes_s=0.0, is_terminal=False)
        assert len(caplog.records) == 1
        monkeypatch.setattr(terminal, "_EVERY_S", 0.01)
        shown(monkeypatch, after_s=0.01, takes_s=0.5, is_terminal=False)
        assert len(caplog.records) > 2
    with caplog.at_level(logging.WARNING, "autopar"):
        caplog.clear()
        shown(monkeypatch, after_s=0.01, takes_s=0.2, is_terminal=False)
        assert not caplog.records


def test_only_the_first_line_in_the_log_may_be_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(terminal, "_EVERY_S", 0.01)
    monkeypatch.setattr(terminal, "err", Console(file=io.StringIO(), force_terminal=False))
    with (
        caplog.at_level(logging.INFO, "autopar"),
        terminal.progress_of_long("specializing", 0.01, level=logging.WARNING),
    ):
        time.sleep(0.5)
    levels = [record.levelno for record in caplog.records]
    assert levels[0] == logging.WARNING and set(levels[1:]) == {logging.INFO}


def lines_of_a_command(
    monkeypatch: pytest.MonkeyPatch, *, every_s: float, takes_s: float
) -> list[str]:
    told = io.StringIO()
    monkeypatch.setattr(terminal, "err", Console(file=told, force_terminal=False, width=80))
    monkeypatch.setattr(terminal, "_EVERY_LINE_S", every_s)
    with terminal.progress("building the model") as tell:
        tell("solving")
        time.sleep(takes_s)
    return told.getvalue().splitlines()


def test_a_command_with_stderr_in_a_file_writes_its_progress_periodically(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = lines_of_a_command(monkeypatch, every_s=0.01, takes_s=0.5)
    assert len(said) > 2 and "solving" in said[-1]
    assert all(
        re.fullmatch(r"(building the model|solving) … \(\d+ s elapsed\)", line) for line in said
    )
    assert lines_of_a_command(monkeypatch, every_s=30.0, takes_s=0.0) == []


def test_planning_reports_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def planned(*_: object, progress: object) -> tuple[None, None]:
        assert callable(progress)
        progress("solve")
        return None, None

    monkeypatch.setattr(planning, "plan_call", planned)
    monkeypatch.setattr(terminal, "err", Console(force_terminal=True))
    monkeypatch.setattr(
        terminal.err,
        "status",
        lambda _: type("S", (), {"update": staticmethod(told.append), "stop": lambda _: None})(),
    )
    planning.plan_model(None, 1, example_inputs={})  # type: ignore[arg-type]
    assert told == ["solving …"]
