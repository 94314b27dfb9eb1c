"""Whether forward takes a call at all, by its signature and by what it says of the shapes: before anything is said of the model."""

from __future__ import annotations

import copy
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.capture.refusals import user_line
from autopar.capture.trees import argument_name
from autopar.errors import CallError, Where

# Torch's own subclasses are of fakes.
_KINDS = (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError, NotImplementedError)
_OF_FAKES = ("fake", "meta tensor", "'meta' backend", "data pointer", "not allocated", "subclass", "unbacked", "symint", "item()")
_LINE = re.compile(r"(?P<file>.*?):(?P<line>\d+): ")
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
    copied = _copied(model)
    if copied is None:
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


def module_of(source: str, model: nn.Module, run: Callable[[nn.Module], object]) -> str:
    """The path of the module in which `run` stops, with tensors that have shapes and no values, in the function that has the line `source`;
    empty where it does not, or where that is the model itself."""
    copied = _copied(model)
    if copied is None:
        return ""
    entered: list[str] = []
    for name, module in copied.named_modules():
        module.register_forward_pre_hook(lambda _module, _args, name=name: entered.append(name))  # type: ignore[misc]
        module.register_forward_hook(lambda _module, _args, _made: entered.pop() and None)
    try:
        run(copied)
    except Exception as error:
        return entered[-1] if entered and _stopped_in(error, source) else ""
    return ""


def _stopped_in(error: BaseException, source: str) -> bool:
    """Whether the user's innermost function where `error` was raised has the line: tensors without values may stop earlier in it."""
    at, place = _LINE.match(user_line("".join(traceback.format_tb(error.__traceback__)))), _LINE.match(source)
    if at is None or place is None:
        return False
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == at["file"]]
    lines = {line for _, _, line in codes[-1].co_lines()} if codes else set()
    return at["file"] == place["file"] and int(place["line"]) in lines


def _copied(model: nn.Module) -> nn.Module | None:
    """A copy over the same tensors; None where an attribute of a module cannot be copied."""
    attributes = (x for module in model.modules() for x in vars(module).values() if isinstance(x, Tensor))
    try:
        return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers(), *attributes)})
    except Exception:  # whatever it raises
        return None


def called(model: nn.Module, paths: Collection[str], run: Callable[[nn.Module], object]) -> set[str]:
    """Which of these modules `run` calls, with tensors that have shapes and no values; all where that cannot be found out."""
    seen: set[str] = set()
    copied = _copied(model)
    if copied is None:
        return set(paths)
    try:
        for path in paths:
            copied.get_submodule(path).register_forward_pre_hook(lambda _module, _args, path=path: seen.add(path))  # type: ignore[misc]
        run(copied)
    except Exception:  # whatever a model raises of such tensors
        return set(paths)
    return seen


def _named(path: str, model: nn.Module) -> str:
    """An argument's path with its name in place of its number."""
    return argument_name(path, list(inspect.signature(model.forward).parameters))


def _shown(signature: inspect.Signature) -> str:
    """``forward(x, y, …)``: the arguments that it must have."""
    needed = [name for name, p in signature.parameters.items() if p.default is p.empty and p.kind in (*_BY_NAME, p.POSITIONAL_ONLY)]
    return f"forward({', '.join((*needed, '…') if len(needed) < len(signature.parameters) else needed)})"
