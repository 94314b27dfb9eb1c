"""Check whether forward accepts a call, by its signature and by running it on fake tensors."""

from __future__ import annotations

import copy
import dis
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.capture.diagnostics import is_torchs, user_line
from autopar.capture.trees import argument_name, leaves_of
from autopar.core.keywords import close_to
from autopar.errors import CallError, CaptureError, Where

# Types of errors that forward raises for unsuitable arguments. torch's subclasses of these types
# come from fake tensors.
_KINDS = (
    ValueError,
    TypeError,
    RuntimeError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
    NotImplementedError,
)
_OF_FAKES = (
    "swap",
    "fake",
    "meta tensor",
    "'meta' backend",
    "data pointer",
    "not allocated",
    "subclass",
    "unbacked",
    "symint",
    "item()",
)
_LINE = re.compile(r"(?P<file>.*?):(?P<line>\d+): ")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_call(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise CallError if the arguments do not bind to the signature of forward.

    Args:
        signature: the signature of forward.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        message, remedy = _binding_error(signature, args, kwargs, str(error))
        raise CallError(message, remedy=remedy) from None


def bind_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, including those of ``**kwargs``.

    Args:
        signature: the signature of forward.
        args: positional arguments; the call must bind.
        kwargs: keyword arguments.
    """
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    more = next((name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
    return arguments | arguments.pop(more, {})


def _binding_error(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], otherwise: str
) -> tuple[str, str]:
    """Return the error and the remedy for a call that does not bind.

    Args:
        signature: the signature of forward.
        args: positional arguments.
        kwargs: keyword arguments.
        otherwise: Python's message, which is used for any other mismatch.
    """
    takes, needed = f"call it as {_shown(signature)}", _required_names(signature)
    unknown = _unknown_names(signature, kwargs)
    kinds = [p.kind for p in signature.parameters.values()]
    places = [name for name, p in signature.parameters.items() if p.kind in _BY_PLACE]
    if not args and kwargs and len(unknown) == len(kwargs) and len(needed) == 1:
        return (
            f"forward() has no argument {unknown[0]!r}; it takes {needed[0]!r}",
            "a mapping is passed as keyword arguments; to pass the mapping itself as the only"
            f" argument, pass ({needed[0]},)",
        )
    if unknown:
        return f"forward() has no argument {unknown[0]!r}", _suggestion(
            signature, unknown[0]
        ) + takes
    if len(args) > len(places) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        message = f"forward() takes {len(places)} positional arguments, but {len(args)} were passed"
        return message, takes
    missing = [name for name in needed if name not in kwargs and name not in places[: len(args)]]
    if missing:
        return f"forward() is missing {', '.join(map(repr, missing))}", takes
    return f"forward(): {otherwise}", takes


def _suggestion(signature: inspect.Signature, name: str) -> str:
    """Return a question with the names of arguments similar to `name`; ``""`` if there are none."""
    names = [known for known, p in signature.parameters.items() if p.kind in _BY_NAME]
    close = close_to(name, names)
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""


def _required_names(signature: inspect.Signature) -> list[str]:
    """Return the names of the arguments without a default."""
    return [
        name
        for name, p in signature.parameters.items()
        if p.default is p.empty and p.kind in (*_BY_NAME, p.POSITIONAL_ONLY)
    ]


def _unknown_names(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> list[str]:
    """Return the names in `kwargs` that forward does not accept."""
    parameters = signature.parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    return [
        name for name in kwargs if name not in parameters or parameters[name].kind not in _BY_NAME
    ]


def refused_by_forward(
    model: nn.Module, run: Callable[[nn.Module], object], leaves: Iterable[tuple[str, Any]]
) -> CaptureError | None:
    """Run a copy of the model on fake tensors, and return the error that forward raises; None if it
    raises none.

    Errors that only occur for tensors without data are ignored.

    Args:
        model: the model; it is not changed.
        run: calls the copy.
        leaves: (path, value) of the call's arguments.
    """
    copied = _copy_module(model)
    if copied is None:
        return None
    entered = _note_entered(copied)
    try:
        if not any(isinstance(leaf, Tensor) for leaf in leaves_of(run(copied))):
            return CaptureError(
                "forward returns no tensor",
                remedy="return the loss, or the outputs that the loss is computed from",
            )
    except CaptureError as refusal:  # raised by a function that a capture replaces
        return refusal
    except Exception as error:
        text = str(error).strip()
        if _raised_by_the_model(error):
            return _error_of_forward(error, shapes_of(model, leaves))
        if type(error) not in _KINDS or any(mark in text.lower() for mark in _OF_FAKES):
            return None
        shapes = shapes_of(model, leaves)
        kind = "" if isinstance(error, RuntimeError | ValueError) else f"{type(error).__name__}: "
        return CallError(
            "forward does not accept this call:"
            f" {kind}{text.splitlines()[0] if text else type(error).__name__}",
            where=Where(
                module=entered[-1] if entered else "",
                source=user_line("".join(traceback.format_tb(error.__traceback__))),
            ),
            remedy=(
                f"pass arguments that the plain model accepts (these were {shapes}); if it accepts"
                " these, report it"
            ),
        )
    return None


def module_of(source: str, model: nn.Module, run: Callable[[nn.Module], object]) -> str:
    """Return the path of the module in which a run on fake tensors fails; empty for the model
    itself, or if the run does not fail in the function that contains `source`.

    Args:
        source: the source line of the error.
        model: the model; a copy is run.
        run: calls the copy.
    """
    copied = _copy_module(model)
    if copied is None:
        return ""
    entered = _note_entered(copied)
    try:
        run(copied)
    except Exception as error:
        return entered[-1] if entered and _stopped_in(error, source) else ""
    return ""


def _note_entered(model: nn.Module) -> list[str]:
    """Return a list of the paths of the modules that forward has entered and not left. A run of
    the model updates it."""
    entered: list[str] = []

    def leave(*_: Any) -> None:
        """Remove the innermost module."""
        entered.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _module, _args, name=name: entered.append(name))
        module.register_forward_hook(leave)
    return entered


def _stopped_in(error: BaseException, source: str) -> bool:
    """Return whether the user's innermost function that raised `error` contains the source line;
    with tensors without data, the function may fail at an earlier line."""
    at, place = (
        _LINE.match(user_line("".join(traceback.format_tb(error.__traceback__)))),
        _LINE.match(source),
    )
    if at is None or place is None:
        return False
    codes = [
        frame.f_code
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == at["file"]
    ]
    lines = {line for _, _, line in codes[-1].co_lines()} if codes else set()
    return at["file"] == place["file"] and int(place["line"]) in lines


def _copy_module(model: nn.Module) -> nn.Module | None:
    """Return a copy that shares all tensors; None if an attribute of a module cannot be copied."""
    attributes = (
        x for module in model.modules() for x in vars(module).values() if isinstance(x, Tensor)
    )
    try:
        return copy.deepcopy(
            model, {id(x): x for x in (*model.parameters(), *model.buffers(), *attributes)}
        )
    except Exception:  # a user's __deepcopy__ may raise any error
        return None


def _raised_by_the_model(error: Exception) -> bool:
    """Return whether the error comes from a `raise` or `assert` outside torch, or an undefined
    name."""
    inner = error.__traceback__
    while inner is not None and inner.tb_next is not None:
        inner = inner.tb_next
    if inner is None or is_torchs(inner.tb_frame.f_code.co_filename):
        return False
    return (
        isinstance(error, NameError)
        or inner.tb_frame.f_code.co_code[inner.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    )


def _error_of_forward(error: Exception, shapes: str) -> CallError:
    text = str(error).strip()
    return CallError(
        f"forward raises {type(error).__name__}{': ' + text.splitlines()[0] if text else ''}",
        where=Where(source=user_line("".join(traceback.format_tb(error.__traceback__)))),
        remedy=(
            "the plain model raises the same error: check the line, and pass arguments that the"
            f" model accepts (these were {shapes})"
        ),
    )


def shapes_of(model: nn.Module, leaves: Iterable[tuple[str, Any]]) -> str:
    """Return the names and shapes of the tensors of a call: ``x (8, 16), y (8,)``."""
    return (
        ", ".join(
            f"{argument_of(path, model)} {tuple(x.shape)}"
            for path, x in leaves
            if isinstance(x, Tensor)
        )
        or "no tensor"
    )


def find_called(
    model: nn.Module, paths: Collection[str], run: Callable[[nn.Module], object]
) -> set[str]:
    """Return the modules among `paths` that forward calls in a run on fake tensors; all of them if
    the run fails.

    Args:
        model: the model; a copy is run.
        paths: paths of modules.
        run: calls the copy.
    """
    called: set[str] = set()
    copied = _copy_module(model)
    if copied is None:
        return set(paths)
    try:
        for path in paths:
            copied.get_submodule(path).register_forward_pre_hook(
                lambda _module, _args, path=path: called.add(path)
            )
        run(copied)
    except Exception:  # a model may raise any error for tensors without data
        return set(paths)
    return called


def argument_of(path: str, model: nn.Module) -> str:
    """Return the path of an argument with the name of a positional argument instead of its
    index."""
    return argument_name(path, list(inspect.signature(model.forward).parameters))


def _shown(signature: inspect.Signature) -> str:
    """Return a call with the required arguments: ``forward(x, y, …)``."""
    needed = _required_names(signature)
    more = ["…"] if len(needed) < len(signature.parameters) else []
    return f"forward({', '.join([*needed, *more])})"
