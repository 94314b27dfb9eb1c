"""Build the models that the options of a command name."""

from __future__ import annotations

import logging
from typing import Any, TypedDict, overload

import torch

from autopar import hf
from autopar.api import flips
from autopar.cli.shared_options import BATCH, DTYPE, RESTING, NamedModel, check_dtype
from autopar.core.terminal import progress, say
from autopar.errors import AutoparError
from autopar.plans import Flips, Plan


class ModelOptions(TypedDict):
    """Options of a plan that `built` reads."""

    inference: bool
    precision: str | None


@overload
def read_dtype(name: str) -> torch.dtype: ...


@overload
def read_dtype(name: str | None) -> torch.dtype | None: ...


def read_dtype(name: str | None) -> torch.dtype | None:
    """Return the torch dtype with a name; None for None.

    Raises:
        AutoparError: if the name is not one of `options.DTYPES`.
    """
    check_dtype(name)
    return None if name is None else getattr(torch, name)


def turning_of(plan: Plan, num: int, named: NamedModel) -> Flips:
    """Return the hardware changes that would change close choices of a plan; empty if `num` is 0.

    Args:
        plan: the plan.
        num: number of choices to examine.
        named: the model.

    Raises:
        AutoparError: if no model is named, or the model cannot be built.
    """
    if not num:
        return Flips()
    if (named.hf, named.model, named.module) == (None, None, None):
        what = "--flips needs the model of the plan"
        raise AutoparError(what, remedy="pass one of --hf, --model and --module")
    with progress("building the model") as tell:
        network, example = built(named, "meta", **options_asked(plan))
        tell("pricing other hardware")
        return flips(plan, network, example, most=num)


def options_asked(plan: Plan) -> ModelOptions:
    """Return the plan options that affect how the model is built: whether there is no backward, and
    the precision in which parameters are read.
    """
    return {
        "inference": bool(plan.options.get("inference")),
        "precision": plan.options.get("precision"),
    }


def say_if_none(found: Flips) -> None:
    """Print why no hardware change changes the requested choices, if so."""
    if found.why:
        say(found.why)


def built(
    named: NamedModel,
    device: str,
    *,
    inference: bool = False,
    precision: str | None = None,
) -> tuple[torch.nn.Module, Any]:
    """Build the named model and a batch for it.

    Args:
        named: the model and its batch.
        device: device of the weights; "meta" for no storage.
        inference: whether to set eval mode and omit labels from the batch.
        precision: precision of the plan; if set, parameters have a wider dtype by default.

    Raises:
        AutoparError: if none or several are named, or the model cannot be built.
    """
    named.check()
    if named.module is not None:
        sizes = {"--batch": named.batch, "--seq": named.seq, "--dtype": named.dtype}
        ignored = [option for option, value in sizes.items() if value is not None]
        if ignored:
            remedy = (
                f"omit {' and '.join(ignored)}; the function of --module returns the model and "
                "the batch"
            )
            raise AutoparError(
                f"{' and '.join(ignored)} cannot be combined with --module, whose function makes "
                "the batch",
                remedy=remedy,
            )
        return hf.load_function(named.module)
    try:
        rests = read_dtype(named.dtype or (RESTING if precision else DTYPE))
        network, example = hf.build(
            named.hf or named.model or "",
            dtype=rests,
            device=device,
            batch=BATCH if named.batch is None else named.batch,
            seq=named.seq,
        )
        logging.getLogger("transformers").setLevel(
            logging.ERROR
        )  # transformers warns about configurations that it made itself
        return (
            (network.eval(), hf.unlabelled(network, example)) if inference else (network, example)
        )
    except ModuleNotFoundError as error:
        raise AutoparError(
            f"{error.name} is not installed", remedy='pip install "autopar[hf]", or pass --module'
        ) from error
