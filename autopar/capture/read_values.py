"""Numbers of Python's random generator, NumPy arrays and environment variables that forward
reads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

from autopar.capture.diagnostics import user_line
from autopar.capture.trace import OutsideValue

_ARRAY = re.compile(r"___from_numpy\((.*)\)")  # Dynamo source name of the tensor of an array
_READING = frozenset(("environ", "getenv"))


def array_sources(sources: Iterable[str]) -> list[str]:
    """Return the Dynamo source names of the NumPy arrays that the graph reads.

    Args:
        sources: those of the tensors that the graph reads.
    """
    return [match[1] for name in sources if (match := _ARRAY.fullmatch(name))]


class _Environment:
    """The environment variables of this process; None for those that are not set."""

    def __getitem__(self, name: str) -> str | None:
        return os.environ.get(name)


ENVIRONMENT = _Environment()


def variables_read(code: Iterable[CodeType]) -> Iterator[OutsideValue]:
    """Yield the environment variables that code may read: if it uses `os.environ` or `os.getenv`,
    those that its constants name."""
    names = {
        constant
        for each in code
        if not _READING.isdisjoint(each.co_names)
        for constant in each.co_consts
        if isinstance(constant, str) and constant.isidentifier()
    }
    for name in sorted(names):
        name_text = f"environment variable {name}"
        yield OutsideValue(
            name_text, __name__, (("", "ENVIRONMENT"), ("", name)), os.environ.get(name)
        )


def lines_of_draws(output: Any, args: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the source lines that use numbers of Python's random generator, ``""`` for an unknown
    line; empty if forward draws none.

    Args:
        output: Dynamo's `OutputGraph`.
        args: placeholder name → Dynamo source of its value.
    """
    if not output.random_calls:
        return ()
    users = [
        user
        for node in output.graph.nodes
        if "RandomValue" in type(args.get(node.name)).__name__
        for user in node.users
    ]
    return tuple(user_line(user.meta.get("stack_trace") or "") for user in users) or ("",)
