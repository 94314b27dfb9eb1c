"""Every printed remedy works: a program that is refused runs after the change that it names.

Remedies are collected from the source. The number of remedies without a program may only go down.
The programs are in `tests/support/remedy_programs_*.py`, with the place of the remedy as the key:
its module, its function, and its number within the function. If a place has several programs, each
has a name after a bar.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import autopar
from autopar.errors import AutoparError
from tests.support import (
    remedy_programs_api,
    remedy_programs_capture,
    remedy_programs_commands,
    remedy_programs_constraints,
    remedy_programs_files,
    remedy_programs_forward,
    remedy_programs_inputs,
    remedy_programs_kernels,
    remedy_programs_launchers,
    remedy_programs_lightning,
    remedy_programs_modules,
    remedy_programs_planning,
    remedy_programs_plans,
    remedy_programs_proofs,
    remedy_programs_ranks,
    remedy_programs_saved,
    remedy_programs_stages,
    remedy_programs_steps,
    remedy_programs_strategies,
    remedy_programs_training,
    remedy_programs_weights,
)

ROOT = Path(autopar.__file__).parent
MOST_WITHOUT_A_PROGRAM = 11  # lower it with each program that is added
PARTS = (
    remedy_programs_capture,
    remedy_programs_inputs,
    remedy_programs_api,
    remedy_programs_constraints,
    remedy_programs_planning,
    remedy_programs_plans,
    remedy_programs_stages,
    remedy_programs_forward,
    remedy_programs_commands,
    remedy_programs_launchers,
    remedy_programs_saved,
    remedy_programs_files,
    remedy_programs_modules,
    remedy_programs_steps,
    remedy_programs_weights,
    remedy_programs_ranks,
    remedy_programs_training,
    remedy_programs_lightning,
    remedy_programs_strategies,
    remedy_programs_kernels,
    remedy_programs_proofs,
)
PROGRAMS = {place: program for part in PARTS for place, program in part.PROGRAMS.items()}


class Lines(NamedTuple):
    """The lines of a remedy in the source."""

    file: str
    first: int
    last: int


def remedies() -> dict[str, Lines]:
    """Return every place in the source with a remedy, by module, function and number."""
    return {
        place: Lines(str(file), node.lineno, node.end_lineno or node.lineno)
        for file in sorted(ROOT.rglob("*.py"))
        for place, node in _within(ast.parse(file.read_text()), str(file.relative_to(ROOT)))
    }


def _within(tree: ast.AST, module: str, function: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Return the places of one module. Nested functions are counted separately."""
    number, waiting = 0, list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _within(node, module, f"{function}.{node.name}".lstrip("."))
        else:
            if isinstance(node, ast.Call) and any(word.arg == "remedy" for word in node.keywords):
                if not _is_passed_on(node, function):
                    yield f"{module} {function} {number}", node
                number += 1
            waiting = [*ast.iter_child_nodes(node), *waiting]


def _is_passed_on(call: ast.Call, function: str) -> bool:
    """Return whether the remedy is passed on from another error or from the caller of a
    constructor."""
    given = next(word.value for word in call.keywords if word.arg == "remedy")
    if isinstance(given, ast.Attribute):
        return f"{ast.unparse(given.value)}.what" in ast.unparse(call)
    return isinstance(given, ast.Name) and function.endswith("Error.__init__")


REMEDIES = remedies()


def place_of(name: str) -> str:
    """Return the place of the remedy of a program."""
    return name.partition(" | ")[0]


def test_each_program_belongs_to_a_remedy_in_the_source() -> None:
    assert {place_of(name) for name in PROGRAMS} <= REMEDIES.keys()
    assert len(PROGRAMS) == sum(len(part.PROGRAMS) for part in PARTS)


def test_the_number_of_remedies_without_a_program_only_goes_down() -> None:
    without = REMEDIES.keys() - {place_of(name) for name in PROGRAMS}
    assert len(without) == MOST_WITHOUT_A_PROGRAM, (
        "lower the number, or write a program for each new remedy"
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[AutoparError, list[tuple[str, int]]]]:
    """The errors that are created, with the (file, line) of each frame."""
    found: list[tuple[AutoparError, list[tuple[str, int]]]] = []
    plain = AutoparError.__init__

    def noted(self: AutoparError, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        frame, lines = sys._getframe(1), []
        while frame.f_back is not None:
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        found.append((self, lines))

    monkeypatch.setattr(AutoparError, "__init__", noted)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_remedy_is_printed_and_works(
    name: str, made: list[tuple[AutoparError, list[tuple[str, int]]]]
) -> None:
    program, place = PROGRAMS[name], REMEDIES[place_of(name)]
    with pytest.raises(AutoparError) as refusal:
        program.refused()
    remedy = refusal.value.remedy or ""
    assert program.says in remedy
    lines = [line for error, lines in made if (error.remedy or "") in remedy for line in lines]
    assert any(f == place.file and place.first <= n <= place.last for f, n in lines), (
        f"made at {[f'{f}:{n}' for f, n in lines if f.startswith(str(ROOT))][:9]}"
    )
    program.followed()
