"""The models that commands speak of: the options that name one, and building it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any, overload

import torch
import typer

from autopar import hf
from autopar.api import flips
from autopar.errors import AutoparError
from autopar.plans import NO_FLIP, Flip, Plan
from autopar.terminal import progress, say

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Hf = Annotated[
    str | None, typer.Option("--hf", metavar="TYPE[/AutoClass]:JSON", help="A Hugging Face configuration, built and not downloaded.")
]
ModelName = Annotated[str | None, typer.Option("--model", metavar="NAME", help=f"A known size: {', '.join(hf.KNOWN)}.")]
Module = Annotated[str | None, typer.Option("--module", metavar="FILE.py:FUNCTION", help="A function that returns (model, batch).")]
Function = Annotated[
    str | None, typer.Option("--function", metavar="FILE.py:FUNCTION", help="A function that returns (model, batch), for --flips.")
]
Flips = Annotated[int, typer.Option(min=0, help="Of so many close choices, in each stage, say at which change of the hardware they turn.")]
_BATCH, _DTYPE = 8, "bfloat16"
Batch = Annotated[int | None, typer.Option(min=1, help=f"Global batch in samples; {_BATCH} unless given. Of --module the function says.")]
Seq = Annotated[int | None, typer.Option(min=1, help="Tokens of a sample.")]
Dtype = Annotated[str | None, typer.Option(help=f"One of {', '.join(DTYPES)}; {_DTYPE} unless given. Of --module the function says.")]


@overload
def read_dtype(name: str) -> torch.dtype: ...


@overload
def read_dtype(name: str | None) -> torch.dtype | None: ...


def read_dtype(name: str | None) -> torch.dtype | None:
    """torch's dtype of that name; None stays None.

    Raises:
        AutoparError: where it is none of `DTYPES`.
    """
    if name is not None and name not in DTYPES:
        raise AutoparError(f"dtype {name!r} is not known", remedy=f"pass one of {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]


def turning_of(
    plan: Plan, num: int, config: str | None, name: str | None, function: str | None, batch: int | None, seq: int | None, dtype: str | None
) -> tuple[Flip, ...]:
    """What would turn close choices; nothing where that is not asked for."""
    if not num:
        return ()
    if (config, name, function) == (None, None, None):
        what = "what would turn choices cannot be told without the model"
        raise AutoparError(what, remedy="pass --hf or --model, or a function: --function of explain, --module of report")
    with progress("building the model") as tell:
        network, example = built(config, name, function, batch, seq, dtype, "meta", inference=for_inference(plan))
        tell("pricing other hardware")
        return flips(plan, network, example, most=num)


def for_inference(plan: Plan) -> bool:
    """Whether it has no backward."""
    return bool(plan.options.get("inference"))


def say_if_none(num: int, found: Sequence[Flip]) -> None:
    """That nothing turns the choices that were asked about, if so."""
    if num and not found:
        say(NO_FLIP)


def check_named(config: str | None, name: str | None, module: str | None, dtype: str | None) -> None:
    """What can be said of a named model before any library is imported that builds it. Raises AutoparError as `built`."""
    given = [option for option in (config, name, module) if option is not None]
    if len(given) != 1:
        raise AutoparError(f"{len(given)} models are named", remedy="pass one of --hf, --model and --module")
    read_dtype(dtype)
    if module is None:
        hf.parse(given[0])


def built(
    config: str | None, name: str | None, module: str | None, batch: int | None, seq: int | None, dtype: str | None, device: str,
    *, inference: bool = False,
) -> tuple[torch.nn.Module, Any]:  # fmt: skip
    """The model that is named, and a batch for it; for inference without labels, in eval mode.

    Raises:
        AutoparError: where none is named, or several, or it cannot be built.
    """
    check_named(config, name, module, dtype)
    if module is not None:
        ignored = [option for option, value in (("--batch", batch), ("--seq", seq), ("--dtype", dtype)) if value is not None]
        if ignored:
            raise AutoparError(f"{' and '.join(ignored)} with --module: its function makes the batch", remedy="change what it returns")
        return hf.load_function(module)
    try:
        network, example = hf.build(
            config or name or "", dtype=read_dtype(dtype or _DTYPE), device=device, batch=_BATCH if batch is None else batch, seq=seq
        )
        logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of configurations that it made itself
        return (network.eval(), hf.unlabelled(network, example)) if inference else (network, example)
    except ModuleNotFoundError as error:
        raise AutoparError(f"{error.name} is not installed", remedy='pip install "autopar[hf]", or pass --module') from error
