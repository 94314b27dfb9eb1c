"""Options are declared once, in `PlanOptions`. Signatures, docstrings, flags and the table in
the documentation agree with it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from torch import nn

import autopar
from autopar.api.options import takes_options
from autopar.cli import app
from autopar.constraints import ddp
from autopar.errors import ArgumentError, AutoparError
from autopar.request import (
    DEFAULTS,
    OPTIONS,
    Call,
    CompileKeywords,
    Option,
    PlanKeywords,
    PlanOptions,
    WhatIfKeywords,
    options_of,
)

ROOT = Path(__file__).parents[3]
ACCEPTED = {"constraints": "Sequence[Constraint]", "memory_bytes": "int | str | None"}
"""What functions accept for an option, where `PlanOptions` keeps something else."""
CALLS: dict[Call, Callable[..., Any]] = {
    "plan": autopar.plan,
    "compile": autopar.compile,
    "what_if": autopar.what_if,
}


def words(text: str) -> str:
    return " ".join(text.split())


def test_every_field_except_ends_is_an_option() -> None:
    assert [f.name for f in fields(PlanOptions)] == [*OPTIONS, "ends"]
    assert PlanOptions() == PlanOptions(**DEFAULTS), "every default passes its check"


@pytest.mark.parametrize("call", CALLS)
def test_the_signature_shows_every_option_with_its_default_and_type(call: Call) -> None:
    shown = list(inspect.signature(CALLS[call]).parameters.items())
    options = dict(shown[-len(options_of(call)) :])
    assert list(options) == list(options_of(call))
    assert inspect.Parameter.VAR_KEYWORD not in {parameter.kind for _, parameter in shown}
    declared = {f.name: f.type for f in fields(PlanOptions)}
    for name, parameter in options.items():
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default == DEFAULTS[name], (
            name
        )
        assert parameter.annotation == ACCEPTED.get(name, declared[name]), name


@pytest.mark.parametrize(
    ("call", "keywords"),
    [("plan", PlanKeywords), ("compile", CompileKeywords), ("what_if", WhatIfKeywords)],
)
def test_type_checkers_see_the_same_options(call: Call, keywords: Any) -> None:
    assert set(keywords.__annotations__) == set(options_of(call))


@pytest.mark.parametrize("call", CALLS)
def test_the_docstring_describes_every_option(call: Call) -> None:
    docstring = CALLS[call].__doc__ or ""
    arguments = docstring.partition("Raises:")[0]
    told = re.findall(r"^ {8}(\w+): ", arguments, re.MULTILINE)
    assert told[-len(options_of(call)) :] == list(options_of(call))
    for name, option in options_of(call).items():
        assert words(f"{name}: {option.help}") in words(docstring), name
    assert "Raises:" in docstring, "the text after the arguments is unchanged"
    assert max(map(len, docstring.splitlines())) <= 140


def test_a_docstring_without_an_args_section_is_unchanged() -> None:
    def told(**options: Any) -> None:
        """Do it."""

    def untold(**options: Any) -> None:  # as under python -OO
        pass

    assert (
        takes_options("plan")(told).__doc__ == "Do it."
        and takes_options("plan")(untold).__doc__ is None
    )


def test_an_option_of_one_function_is_refused_by_the_other() -> None:
    of_compile = set(options_of("compile")) - set(options_of("plan"))
    for name in of_compile:
        with pytest.raises(ArgumentError, match=f"autopar.plan has no argument '{name}'"):
            autopar.plan(nn.Linear(2, 2), 1, example_inputs={}, **cast(Any, {name: DEFAULTS[name]}))


def test_options_of_a_deferred_module_are_checked_before_the_first_call() -> None:
    with pytest.raises(AutoparError, match=r"gap=2 is not a relative gap"):
        autopar.compile(nn.Linear(2, 2), 1, gap=2)
    with pytest.raises(AutoparError, match="is not a sequence"):
        autopar.compile(nn.Linear(2, 2), 1, constraints=cast(Any, ddp()))


def flags(command: str) -> dict[str, Any]:
    found = cast(Any, typer.main.get_command(app)).commands[command]
    return {parameter.name: parameter for parameter in found.params}


@pytest.mark.parametrize(("command", "call"), [("plan", "plan"), ("what-if", "what_if")])
def test_the_command_line_has_a_flag_for_every_option_that_declares_one(
    command: str, call: Call
) -> None:
    there = flags(command)
    assert "options" not in there
    for name, option in options_of(call).items():
        if option.flag is None:
            continue
        shown = there[name]
        assert option.flag.name in ("/".join((*shown.opts, *shown.secondary_opts)), *shown.opts), (
            name
        )
        assert (shown.help, shown.metavar, shown.default) == (
            option.flag.help,
            option.flag.metavar,
            option.flag.default,
        ), name


@pytest.mark.parametrize(
    "name", [name for name, option in OPTIONS.items() if option.flag is not None]
)
def test_an_omitted_flag_leaves_the_option_at_its_default(name: str) -> None:
    flag = OPTIONS[name].flag
    assert flag is not None and flag.read(flag.default) == DEFAULTS[name]


def test_flag_values_are_converted_to_option_values() -> None:
    given = {
        "memory_bytes": "2GiB",
        "num_microbatches": 3,
        "time_limit_s": 5.0,
        "constraints": ["ddp()"],
    }
    read = {name: cast(Any, OPTIONS[name].flag).read(value) for name, value in given.items()}
    assert read == {
        "memory_bytes": 2 * 2**30,
        "num_microbatches": 3,
        "time_limit_s": 5.0,
        "constraints": (ddp(),),
    }


def row(name: str, option: Option) -> str:
    """Return the row of an option in the table of the documentation."""
    default = repr(DEFAULTS[name]).replace("'", '"')
    return f"| `{name}` | {option.default_in_words or f'`{default}`'} | {option.brief} |"


def test_the_documentation_has_a_table_of_the_options() -> None:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    table = (
        page.split("## Options", 1)[1]
        .split("|---|---|---|\n", 1)[1]
        .split("\n\n", 1)[0]
        .splitlines()
    )
    assert table[0].startswith("| `hardware` |"), (
        "hardware is an option of the machine and not of the planner"
    )
    assert table[1:] == [row(name, option) for name, option in OPTIONS.items() if option.brief], (
        "write these rows into docs/planning.md"
    )


def test_option_names_end_with_their_units() -> None:
    for name, option in OPTIONS.items():
        assert option.unit == {"bytes": "bytes", "s": "seconds"}.get(name.rpartition("_")[2], ""), (
            name
        )


def test_options_can_be_read_without_importing_torch() -> None:
    """Help and errors of mistyped options do not wait for the import of torch."""
    read = "p.PlanOptions(**p.read_options({'constraints': None, 'gap': 0.5}))"
    code = f"import sys, autopar.cli.commands as p; {read}; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert found.stdout.strip() == "False"
