"""Errors for wrong arguments of public functions: a misspelt or missing argument raises
`ArgumentError`, which suggests the closest known name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

from autopar.errors import ArgumentError

F = TypeVar("F", bound=Callable[..., Any])
_UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def close_to(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that are spelt most like `name`, the closest first."""
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)


def named(name: str, page: str) -> Callable[[F], F]:
    """Decorate a public function so that unknown and missing arguments raise `ArgumentError`.

    Args:
        name: what users call the function, for errors.
        page: page of the documentation that lists the arguments.
    """

    def decorate(function: F) -> F:
        """Wrap `function` in a check of its arguments."""
        signature = inspect.signature(function)

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            """Call `function` if its signature takes the arguments."""
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise _refusal(name, page, signature, args, kwargs, str(error)) from None
            return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate


def _refusal(
    name: str, page: str, signature: inspect.Signature, args: Any, kwargs: Any, problem: str
) -> ArgumentError:
    parameters = [p for p in signature.parameters.values() if p.kind not in _UNNAMED]
    known = [p.name for p in parameters]
    listed = f"help({name}) and {page} list the arguments"
    unknown = next((given for given in kwargs if given not in known), None)
    if unknown is not None:
        close = close_to(unknown, known)
        remedy = (
            f"did you mean {' or '.join(f'{c}=' for c in close)}? {listed}"
            if close
            else f"{name} takes {', '.join(known)}; {listed}"
        )
        return ArgumentError(f"{name} has no argument {unknown!r}", remedy=remedy)
    positions = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    by_position = positions[: len(args)]
    missing = [
        p.name for p in parameters if p.default is p.empty and p.name not in (*by_position, *kwargs)
    ]
    if missing and len(args) <= len(positions):
        message = f"{name} is missing {' and '.join(map(repr, missing))}"
        return ArgumentError(
            message, remedy=f"pass {', '.join(f'{m}=' for m in missing)}; {listed}"
        )
    return ArgumentError(
        f"{name}: {problem}",
        remedy=f"positional arguments are {', '.join(positions)}, others are keywords; {listed}",
    )
