"""Branches on values of tensors that a capture can take without knowing the values.

A branch that only raises (``if x.max() > 1: raise ValueError(...)``) is left out, as assertions
are: a program does not look at values. The plain model raises there, and the log says so. A branch
on whether values are finite is taken for finite values.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import LazyVariableTracker, SymNodeVariable, TensorVariable
from torch.nn import functional

from autopar.capture.diagnostics import is_torchs
from autopar.capture.dynamo.constants import or_its_value
from autopar.errors import CaptureError, Where

_JUMPS = (
    "POP_JUMP_IF_FALSE",
    "POP_JUMP_IF_TRUE",
    "POP_JUMP_FORWARD_IF_FALSE",
    "POP_JUMP_FORWARD_IF_TRUE",
)
_LEAVING = ("RETURN", "YIELD", "STORE", "DELETE", "FOR_ITER", "IMPORT")
_TORCHS_OWN = ("gaussian_nll_loss",)  # of torch.nn.functional, which look at values so
_Handler = Callable[[Any, Any], None]


@contextlib.contextmanager
def raises_left_out() -> Iterator[list[str]]:
    """Let Dynamo skip branches that only raise; yields the list of their source lines."""
    lines: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in _TORCHS_OWN:
            stack.enter_context(
                mock.patch.object(functional, name, _copy_function(getattr(functional, name)))
            )
        for kind in _translators(symbolic_convert.InstructionTranslatorBase):
            for code in {
                symbolic_convert.dis.opmap[name]
                for name in _JUMPS
                if name in symbolic_convert.dis.opmap
            }:
                stack.enter_context(_add_handler(kind.dispatch_table, code, lines))
        yield lines


@contextlib.contextmanager
def _add_handler(table: list[Any], code: int, lines: list[str]) -> Iterator[None]:
    before = table[code]
    table[code] = _leaving_out(before, lines)
    try:
        yield
    finally:
        table[code] = before


def _copy_function(function: Any) -> Any:
    """Return the same function as another object: Dynamo does not recognize it as one of torch's,
    and traces it."""
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _translators(kind: Any) -> Iterator[Any]:
    yield kind
    for each in kind.__subclasses__():
        yield from _translators(each)


def _leaving_out(handler: _Handler, lines: list[str]) -> _Handler:
    def handle(translator: Any, instruction: Any) -> None:
        """Run an instruction, or leave out a branch on values that only raises."""
        translator.stack[-1] = or_its_value(translator.stack[-1])
        if not (_is_of_values(translator.stack[-1]) and _only_raises(translator, instruction)):
            handler(translator, instruction)
            return
        user = translator
        while is_torchs(user.f_code.co_filename) and getattr(user, "parent", None) is not None:
            user = user.parent
        line = f"{user.f_code.co_filename}:{user.lineno}"
        if line not in lines:
            lines.append(line)
        translator.pop()
        translator.jump(instruction)

    return handle


def _is_of_values(variable: Any) -> bool:
    """Whether a branch depends on the values of a tensor."""
    known = variable.realize() if isinstance(variable, LazyVariableTracker) else variable
    if isinstance(known, SymNodeVariable):
        return isinstance(known.sym_num, torch.SymBool | torch.SymInt | torch.SymFloat)
    return isinstance(known, TensorVariable)


def _only_raises(translator: Any, jump: Any) -> bool:
    """Whether the code that the jump skips ends by raising, and has no earlier effect outside its
    line."""
    here = translator.instruction_pointer
    for instruction in translator.instructions[here:]:
        if instruction is jump.target or any(word in instruction.opname for word in _LEAVING):
            return False
        if instruction.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in instruction.opname and instruction.target is not jump.target:
            return False
    return False


# --------------------------------------------------------------------------------------------------
# Branches on whether values are finite: ``if not torch.isfinite(x).all(): x = torch.clamp(x,
# ...)``, which many detection models have.
#
# A program has one branch. If only such a question prevents a capture, the program gets the branch
# for finite values, and the log says so. For an infinite value, the plain model takes its other
# branch, and the program continues with the infinite value.

_log = logging.getLogger("autopar")
_FINITE, _INFINITE, _NO_NUMBER = torch.isfinite, torch.isinf, torch.isnan


class _Answer:
    """The answer to a question about all elements. It is not a number: a model that computes with
    it fails, and stays refused."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def __bool__(self) -> bool:
        return self.answer

    def __or__(self, other: _Answer) -> _Answer:
        return _Answer(self.answer or other.answer)

    def __and__(self, other: _Answer) -> _Answer:
        return _Answer(self.answer and other.answer)

    def item(self) -> _Answer:
        """Return the answer itself."""
        return self


class _Everywhere:
    """The same answer for all elements of a tensor. It is not a tensor: any other use of it fails,
    and the model stays refused."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def all(self) -> _Answer:
        """Return the answer for all elements together."""
        return _Answer(self.answer)

    def any(self) -> _Answer:
        """Return the answer for any element."""
        return _Answer(self.answer)

    def __invert__(self) -> _Everywhere:
        return _Everywhere(not self.answer)


def _finite(input: Any) -> Any:
    return _Everywhere(True) if torch.compiler.is_dynamo_compiling() else _FINITE(input)


def _infinite(input: Any) -> Any:
    return _Everywhere(False) if torch.compiler.is_dynamo_compiling() else _INFINITE(input)


def _no_number(input: Any) -> Any:
    return _Everywhere(False) if torch.compiler.is_dynamo_compiling() else _NO_NUMBER(input)


# Dynamo traces these in the model's own code. torch's code, which meanwhile computes with tensors
# without values, gets the usual answers.
_ANSWERS = {"isfinite": _finite, "isinf": _infinite, "isnan": _no_number}


def asks_for_finite(refusal: CaptureError) -> bool:
    """Whether the source line of `refusal` asks whether values are finite."""
    return any(f"{name}(" in _line(refusal) for name in _ANSWERS)


def _line(refusal: CaptureError) -> str:
    return refusal.where.source if isinstance(refusal.where, Where) else ""


@contextlib.contextmanager
def all_finite(refusal: CaptureError) -> Iterator[None]:
    """Let Dynamo treat every value as finite; if the capture succeeds, log the source line of
    `refusal`."""
    with contextlib.ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(mock.patch.object(torch, name, answer))
        yield
    _log.warning(
        "forward asks whether values are finite (%s): the program has the branch for those"
        " that are",
        _line(refusal),
    )
