"""Whether forward takes a call at all, by its signature and by what it says of the shapes: before anything is said of the model."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.capture.refusals import user_line
from autopar.errors import CallError, Where

# Torch's own subclasses are of fakes.
_KINDS = (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError, NotImplementedError)
_OF_FAKES = ("fake", "meta tensor", "'meta' backend", "data pointer", "not allocated", "subclass", "unbacked", "symint", "item()")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_call(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise CallError where the arguments do not bind to forward's signature."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        what, remedy = _unbound(signature, args, kwargs, str(error))
        raise CallError(what, remedy=remedy) from None


def _unbound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], otherwise: str) -> tuple[str, str]:
    parameters = signature.parameters
    takes = f"call it as {_shown(signature)}"
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if any_name else [name for name in kwargs if name not in parameters or parameters[name].kind not in _BY_NAME]
    needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    places = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not args and kwargs and len(unknown) == len(kwargs) and len(needed) == 1:
        what = f"forward() has no argument {unknown[0]!r}: it takes {needed[0]!r}"
        return what, f"a mapping stands for keyword arguments; where the mapping is the one argument, pass ({needed[0]},)"
    if unknown:
        return f"forward() has no argument {unknown[0]!r}", takes
    if len(args) > len(places) and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        return f"forward() takes {len(places)} positional arguments, and {len(args)} were passed", takes
    missing = [name for name in needed if name not in kwargs and name not in places[: len(args)]]
    return (f"forward() misses {', '.join(map(repr, missing))}" if missing else f"forward(): {otherwise}"), takes


def refused_by_forward(model: nn.Module, run: Callable[[nn.Module], object], leaves: Iterable[tuple[str, Any]]) -> CallError | None:
    """The refusal of forward itself, where `run` calls it with tensors that have shapes and no values; None where it does not refuse.

    What such tensors alone are refused for is none of the call's. It is run of a copy, whose attributes it may change.
    """
    try:
        copied = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})
    except Exception:  # whatever a module's attributes raise: then nothing is known
        return None
    try:
        run(copied)
    except Exception as error:
        text = str(error).strip()
        if type(error) not in _KINDS or any(mark in text.lower() for mark in _OF_FAKES):
            return None
        shapes = ", ".join(f"{_named(path, model)} {tuple(x.shape)}" for path, x in leaves if isinstance(x, Tensor))
        kind = "" if isinstance(error, RuntimeError | ValueError) else f"{type(error).__name__}: "
        return CallError(
            f"forward does not take this call: {kind}{text.splitlines()[0] if text else type(error).__name__}",
            where=Where(source=user_line("".join(traceback.format_tb(error.__traceback__)))),
            remedy=f"pass what the plain model takes (this was {shapes or 'no tensor'}); if it takes this, report it",
        )
    return None


def _named(path: str, model: nn.Module) -> str:
    """An argument's path with its name in place of its number."""
    first, dot, rest = path.partition(".")
    names = list(inspect.signature(model.forward).parameters)
    return (names[int(first)] if first.isdecimal() and int(first) < len(names) else first) + dot + rest


def _shown(signature: inspect.Signature) -> str:
    """``forward(x, y, …)``: the arguments that it must have."""
    needed = [name for name, p in signature.parameters.items() if p.default is p.empty and p.kind in (*_BY_NAME, p.POSITIONAL_ONLY)]
    return f"forward({', '.join((*needed, '…') if len(needed) < len(signature.parameters) else needed)})"
