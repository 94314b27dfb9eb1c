"""Options that several commands share: those that name a model, and the checks that need no model.

This module does not import torch, which takes seconds: help texts and usage errors appear first.
"""

from __future__ import annotations

import functools
import inspect
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from autopar.core.mesh import read_hardware
from autopar.core.text_files import why_unreadable
from autopar.errors import AutoparError, PlanError
from autopar.hf.specs import KNOWN, parse
from autopar.request import OPTIONS, Call, options_of

F = TypeVar("F", bound=Callable[..., None])
DTYPES = ("float64", "float32", "bfloat16", "float16")
BATCH, DTYPE, RESTING = 8, "bfloat16", "float32"
"""Defaults of the built model: samples in the global batch, and dtype of the parameters. With
--precision, the latter is the dtype in which they are stored.
"""


def _as_typer_has_it(option: str) -> Any:
    """Return the typer annotation of the flag of a planning option."""
    flag = OPTIONS[option].flag
    assert flag is not None, f"{option} has no flag"
    return typer.Option(flag.name, metavar=flag.metavar, min=flag.least, help=flag.help)


PlanFile = Annotated[Path, typer.Argument(help="Plan file, as written by `autopar plan --out`.")]
Hf = Annotated[
    str | None,
    typer.Option(
        "--hf",
        metavar="TYPE[/AutoClass]:JSON",
        help="Name of a Hugging Face configuration. The model is built from it; no weights are "
        "downloaded.",
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help=f"Size of the model: {', '.join(KNOWN)}."),
]
Module = Annotated[
    str | None,
    typer.Option(
        "--module", metavar="FILE.py:FUNCTION", help="Function that returns (model, batch)."
    ),
]
Flips = Annotated[
    int,
    typer.Option(
        min=0,
        help=(
            "Number of close choices, per stage, for which to show the hardware change that "
            "would change them."
        ),
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"Global batch size in samples, {BATCH} by default. Not used with --module."
    ),
]
DevicesPerNode = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=(
            "With axes: number of consecutive ranks per node; by default the size of the last axis."
        ),
    ),
]
Constraints = Annotated[list[str] | None, _as_typer_has_it("constraints")]
Seq = Annotated[int | None, typer.Option(min=1, help="Sequence length in tokens.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help=(
            f"Dtype of the parameters, one of {', '.join(DTYPES)}; by default {DTYPE}, with "
            f"--precision {RESTING}. Not used with --module."
        )
    ),
]


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The model and batch that a command names: the values of --hf, --model and --module (exactly
    one is given) and of --batch, --seq and --dtype (None for the defaults).
    """

    hf: Hf = None
    model: ModelName = None
    module: Module = None
    batch: Batch = None
    seq: Seq = None
    dtype: Dtype = None

    def check(self) -> None:
        """Check the options that name the model, before any library that builds it is imported.

        Raises:
            AutoparError: if none or several are named, or a name cannot be read.
        """
        named = [option for option in (self.hf, self.model, self.module) if option is not None]
        if len(named) != 1:
            message = f"{len(named)} models are named" if named else "no model is named"
            raise AutoparError(message, remedy="pass one of --hf, --model and --module")
        check_dtype(self.dtype)
        if self.module is None:
            parse(named[0])


NO_MODEL = NamedModel()
_NAMING = get_type_hints(NamedModel, include_extras=True)


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter ``named`` of a command by the flags of a `NamedModel`."""
    here = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        """Run the command with the model that the flags name."""
        named = NamedModel(**{name: given.pop(name) for name in _NAMING})
        command(named=named, **given)

    parameters: list[inspect.Parameter] = []
    for parameter in here.parameters.values():
        flags = [
            parameter.replace(name=name, default=None, annotation=kind)
            for name, kind in _NAMING.items()
        ]
        parameters += flags if parameter.name == "named" else [parameter]
    run.__signature__ = here.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def takes_options(call: Call) -> Callable[[F], F]:
    """Decorate a command with ``**options``: add a flag for each option of a function that declares
    one, before the command's keyword-only parameters.

    Args:
        call: the function.
    """

    def decorate(command: F) -> F:
        here, kinds = inspect.signature(command, eval_str=True), inspect.Parameter
        first = [p for p in here.parameters.values() if p.kind is kinds.POSITIONAL_OR_KEYWORD]
        last = [p for p in here.parameters.values() if p.kind is kinds.KEYWORD_ONLY]
        flags = [
            kinds(
                name,
                kinds.KEYWORD_ONLY,
                default=option.flag.default,
                annotation=Annotated[option.flag.kind, _as_typer_has_it(name)],
            )
            for name, option in options_of(call).items()
            if option.flag is not None
        ]
        signature = here.replace(parameters=[*first, *flags, *last])
        command.__signature__ = signature  # type: ignore[attr-defined]
        return command

    return decorate


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the planning options from the values of their flags.

    Raises:
        AutoparError: if a value cannot be read.
    """
    flags = {name: OPTIONS[name].flag for name in given}
    return {
        name: given[name] if flag is None else flag.read(given[name])
        for name, flag in flags.items()
    }


def check_dtype(name: str | None) -> None:
    """Check that a name is one of `DTYPES`, or None.

    Raises:
        AutoparError: if the name is unknown.
    """
    if name is not None and name not in DTYPES:
        raise AutoparError(
            f"dtype {name!r} is not known", remedy=f"pass one of {', '.join(DTYPES)}"
        )


def check_files_exist(plan: Path, hardware: str | None = None) -> None:
    """Check that a plan file and a hardware profile exist.

    Raises:
        PlanError: if the plan file does not exist or cannot be read.
        HardwareError: if the profile does not exist.
    """
    if why := why_unreadable(plan):
        raise PlanError(
            f"cannot read plan '{plan}': {why}",
            remedy="check the path; `autopar plan --out FILE` writes a plan",
        )
    if hardware is not None:
        read_hardware(hardware)


# --------------------------------------------------------------------------------------------------
# Translate advice in errors and plans from Python to flags of the command line.

_CONSTRAINT = re.compile(r"constraints=[\[(]+autopar\.constraints\.(\w+\([^()]*\)),?[\])]+")
_FLAGS = (
    (r"\bmemory_bytes=([\w.*]+)", r"--memory \1"),
    (r"(?<!\.)\bmemory_bytes\b", "--memory"),
    (r"\boutputs=[\"'](\w+)[\"']", r"--outputs \1"),
    (r"\bnum_microbatches=(\d+)", r"--microbatches \1"),
    (r"\binference=True\b", "--inference"),
)


def as_flags(text: str) -> str:
    """Return a text in which options of `autopar.plan` are replaced by flags."""
    text = _CONSTRAINT.sub(_constraint, text)
    for python, flag in _FLAGS:
        text = re.sub(python, flag, text)
    return text


def _constraint(found: re.Match[str]) -> str:
    call = found[1].replace("'", '"')  # one pair of quotes then encloses it in a shell
    return f"--constraint {shlex.quote(call)}"
