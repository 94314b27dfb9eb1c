"""What forward logs and prints: a program does neither."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo.variables.misc import IgnoredFunctionVariable

from autopar.capture._transformers import model_loggers

_METHODS = ("debug", "info", "warning", "warning_once", "error", "log", "info_once")


def logging_functions() -> set[Callable[..., Any]]:
    """What Dynamo shall skip instead of refusing the graph: loggers' methods, warnings and `print`."""
    loggers = [logging.getLogger(), *model_loggers()]
    found = {getattr(logger, name) for logger in loggers for name in _METHODS if hasattr(logger, name)}
    functions = {getattr(method, "__func__", method) for method in found}
    return functions | {warnings.warn, print, *torch._dynamo.config.ignore_logging_functions}


@contextlib.contextmanager
def prints_left_out() -> Iterator[list[str]]:
    """Gives a list of the lines at which Dynamo meets a `print`."""
    lines: list[str] = []
    call = IgnoredFunctionVariable.call_function

    def called(variable: Any, translator: Any, *args: Any) -> Any:
        line = f"{translator.f_code.co_filename}:{translator.lineno}"
        if variable.value is print and line not in lines:
            lines.append(line)
        return call(variable, translator, *args)

    with mock.patch.object(IgnoredFunctionVariable, "call_function", called):
        yield lines
