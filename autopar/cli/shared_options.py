"""The options that several commands share: those that name a model, with the checks that are
possible before anything is built.

Nothing here needs torch, which takes seconds to import: help and refusals of mistyped options come
before it.
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
from autopar.errors import AutoparError, PlanError
from autopar.hf.models import KNOWN, parse
from autopar.request import OPTIONS

F = TypeVar("F", bound=Callable[..., None])
DTYPES = ("float64", "float32", "bfloat16", "float16")
BATCH, DTYPE, RESTING = 8, "bfloat16", "float32"
"""What is built unless it is given: samples in the global batch, and the parameters' dtype; with
--precision that in which they rest."""


def _as_typer_has_it(option: str) -> Any:
    """Return the annotation by which typer reads the flag of an option of planning."""
    flag = OPTIONS[option].flag
    assert flag is not None, f"{option} has no flag"
    return typer.Option(flag.name, metavar=flag.metavar, min=flag.least, help=flag.help)


PlanFile = Annotated[Path, typer.Argument(help="A plan, as `autopar plan --out` writes it.")]
Hf = Annotated[
    str | None,
    typer.Option(
        "--hf",
        metavar="TYPE[/AutoClass]:JSON",
        help="A Hugging Face configuration, built and not downloaded.",
    ),
]
ModelName = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help=f"A known size: {', '.join(KNOWN)}.")
]
Module = Annotated[
    str | None,
    typer.Option(
        "--module", metavar="FILE.py:FUNCTION", help="A function that returns (model, batch)."
    ),
]
Flips = Annotated[
    int,
    typer.Option(
        min=0,
        help=(
            "Of so many close choices, in each stage, say at which change of the hardware they"
            " turn."
        ),
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"Global batch in samples; {BATCH} unless given. Of --module the function says."
    ),
]
DevicesPerNode = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=(
            "Of axes: how many ranks in a row share a node; by default as many as the last axis"
            " has."
        ),
    ),
]
Constraints = Annotated[list[str] | None, _as_typer_has_it("constraints")]
Seq = Annotated[int | None, typer.Option(min=1, help="Tokens of a sample.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help=(
            f"Of parameters, one of {', '.join(DTYPES)}; unless given {DTYPE}, with --precision"
            f" {RESTING}. Of --module the function says."
        )
    ),
]


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The model that a command names, and its batch: the values of --hf, --model and --module, of
    which exactly one is given, and of --batch, --seq and --dtype, None for their defaults."""

    hf: Hf = None
    model: ModelName = None
    module: Module = None
    batch: Batch = None
    seq: Seq = None
    dtype: Dtype = None

    def check(self) -> None:
        """Check how the model is named, before any library is imported that builds it.

        Raises:
            AutoparError: if none or several are named, or a name cannot be read.
        """
        given = [option for option in (self.hf, self.model, self.module) if option is not None]
        if len(given) != 1:
            what = f"{len(given)} models are named" if given else "no model is named"
            raise AutoparError(what, remedy="pass one of --hf, --model and --module")
        check_dtype(self.dtype)
        if self.module is None:
            parse(given[0])


NO_MODEL = NamedModel()
_NAMING = get_type_hints(NamedModel, include_extras=True)


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of a `NamedModel` in place of its parameter ``named``."""
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


def takes_options(command: F) -> F:
    """Give a command with ``**options`` a flag for each option of planning that declares one, ahead
    of its keyword-only parameters."""
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
        for name, option in OPTIONS.items()
        if option.flag is not None
    ]
    signature = here.replace(parameters=[*first, *flags, *last])
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the options of planning from the values of their flags.

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
        AutoparError: if it is not.
    """
    if name is not None and name not in DTYPES:
        raise AutoparError(
            f"dtype {name!r} is not known", remedy=f"pass one of {', '.join(DTYPES)}"
        )


def check_there(plan: Path, hardware: str | None = None) -> None:
    """Check that a plan's file, and a hardware profile, exist.

    Raises:
        PlanError: if there is no such file.
        HardwareError: if there is no such profile.
    """
    if not plan.is_file():
        why = "it is a folder" if plan.is_dir() else "there is no such file"
        raise PlanError(
            f"cannot read plan '{plan}': {why}",
            remedy="check the path; `autopar plan --out` writes one",
        )
    if hardware is not None:
        read_hardware(hardware)


# --------------------------------------------------------------------------------------------------
# Translate the Python advice of errors and plans into flags of the command line.

_CONSTRAINT = re.compile(r"constraints=[\[(]+autopar\.constraints\.(\w+\([^()]*\)),?[\])]+")
_FLAGS = (
    (r"\bmemory_bytes=([\w.*]+)", r"--memory \1"),
    (r"(?<!\.)\bmemory_bytes\b", "--memory"),
    (r"\boutputs=[\"'](\w+)[\"']", r"--outputs \1"),
    (r"\bnum_microbatches=(\d+)", r"--microbatches \1"),
    (r"\binference=True\b", "--inference"),
)


def as_flags(text: str) -> str:
    """Return a text with options of `autopar.plan` replaced by flags."""
    text = _CONSTRAINT.sub(_constraint, text)
    for python, flag in _FLAGS:
        text = re.sub(python, flag, text)
    return text


def _constraint(found: re.Match[str]) -> str:
    call = found[1].replace("'", '"')  # so that one pair of quotes holds it in a shell
    return f"--constraint {shlex.quote(call)}"
