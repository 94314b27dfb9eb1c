"""Every remedy that is printed helps: a program that is refused, and the same program changed as the remedy says.

Remedies are found in the source. Those without a program here are counted; their number may only go down.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import autopar
from autopar.constraints import pipeline
from autopar.errors import AutoparError
from autopar.planning.units import check_parts

ROOT = Path(autopar.__file__).parent
MOST_WITHOUT_A_PROGRAM = 572  # lower it with each program that is added


class Program(NamedTuple):
    """What is refused, what the remedy says, and what helps."""

    refused: Callable[[], object]
    says: str
    followed: Callable[[], object]


# By module, function and number of the remedy within it.
PROGRAMS: dict[str, Program] = {
    "constraints/pipelines.py pipeline 0": Program(
        lambda: pipeline("pp", schedule="zigzag"), "1f1b", lambda: pipeline("pp", schedule="1f1b")
    ),
    "constraints/pipelines.py pipeline 1": Program(
        lambda: pipeline("pp", microbatches=0),
        "a number from 1",
        lambda: pipeline("pp", microbatches=1),
    ),
    "constraints/pipelines.py pipeline 2": Program(
        lambda: pipeline("pp", chunks=2),
        "schedule='interleaved_1f1b'",
        lambda: pipeline("pp", chunks=2, schedule="interleaved_1f1b"),
    ),
    "constraints/pipelines.py pipeline 3": Program(
        lambda: pipeline(cuts=["layers.1"], schedule="auto"),
        'schedule="1f1b"',
        lambda: pipeline(cuts=["layers.1"], schedule="1f1b"),
    ),
    "planning/units.py check_parts 0": Program(
        lambda: check_parts(3, 4), "at most 3 stages", lambda: check_parts(3, 3)
    ),
}


def remedies() -> Iterator[str]:
    """Every place in the source that gives a remedy: module, function and its number there."""
    for file in sorted(ROOT.rglob("*.py")):
        yield from _within(ast.parse(file.read_text()), str(file.relative_to(ROOT)))


def _within(tree: ast.AST, module: str, function: str = "") -> Iterator[str]:
    """Those of one module; a function within a function counts for itself."""
    number, waiting = 0, list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _within(node, module, f"{function}.{node.name}".lstrip("."))
        else:
            if isinstance(node, ast.Call) and any(word.arg == "remedy" for word in node.keywords):
                yield f"{module} {function} {number}"
                number += 1
            waiting = [*ast.iter_child_nodes(node), *waiting]


def test_each_program_is_of_a_remedy_in_the_source() -> None:
    assert PROGRAMS.keys() <= set(remedies())


def test_the_number_of_remedies_without_a_program_only_goes_down() -> None:
    without = set(remedies()) - PROGRAMS.keys()
    assert len(without) == MOST_WITHOUT_A_PROGRAM, (
        "lower the number, or write a program for each new remedy"
    )


@pytest.mark.parametrize("place", PROGRAMS)
def test_the_remedy_is_printed_and_helps(place: str) -> None:
    program = PROGRAMS[place]
    with pytest.raises(AutoparError) as refusal:
        program.refused()
    assert program.says in (refusal.value.remedy or "")
    program.followed()
