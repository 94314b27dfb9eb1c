"""What takes long is said on a terminal; what does not, and what is no terminal, is silent."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from autopar import terminal
from autopar.api import planning


def shown(monkeypatch: pytest.MonkeyPatch, *, after_s: float, takes_s: float, is_terminal: bool = True) -> str:
    told = io.StringIO()
    monkeypatch.setattr(terminal, "err", Console(file=told, force_terminal=is_terminal, width=80))
    with terminal.progress_of_long("capturing", after_s) as tell:
        tell("solving")
        time.sleep(takes_s)
    return told.getvalue()


def test_only_what_takes_long_on_a_terminal_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "solving …" in shown(monkeypatch, after_s=0.01, takes_s=0.5)
    assert shown(monkeypatch, after_s=30.0, takes_s=0.0) == ""
    assert shown(monkeypatch, after_s=0.01, takes_s=0.2, is_terminal=False) == ""


def test_planning_tells_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def planned(*_: object, progress: object, another: bool) -> None:
        assert callable(progress)
        progress("solve")

    monkeypatch.setattr(planning, "plan_call", planned)
    monkeypatch.setattr(terminal.err, "status", lambda _: type("S", (), {"update": staticmethod(told.append), "stop": lambda _: None})())
    planning.plan_model(None, 1, example_inputs={})  # type: ignore[arg-type]
    assert told == ["solving …"]
