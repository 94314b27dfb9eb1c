"""Branches on values of tensors that a capture can resolve without knowing the values.

A branch that only raises an error (``if x.max() > 1: raise ValueError(...)``) is skipped, as
assertions are: a program does not check values. A warning says that the plain model may raise
there. A branch on whether values are finite is resolved for finite values.
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
_TORCHS_OWN = ("gaussian_nll_loss",)  # functions of torch.nn.functional with such branches
_Handler = Callable[[Any, Any], None]


@contextlib.contextmanager
def raises_left_out() -> Iterator[list[str]]:
    """Make Dynamo skip branches that only raise an error; yields a list that collects their source
    lines."""
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
    table[code] = _skipping_raises(before, lines)
    try:
        yield
    finally:
        table[code] = before


def _copy_function(function: Any) -> Any:
    """Return a copy of a torch function, which Dynamo does not recognize and therefore traces."""
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
    for subclass in kind.__subclasses__():
        yield from _translators(subclass)


def _skipping_raises(handler: _Handler, lines: list[str]) -> _Handler:
    def handle(translator: Any, instruction: Any) -> None:
        """Run an instruction; skip a branch on values that only raises an error."""
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
    """Return whether a branch depends on the values of a tensor."""
    known = variable.realize() if isinstance(variable, LazyVariableTracker) else variable
    if isinstance(known, SymNodeVariable):
        return isinstance(known.sym_num, torch.SymBool | torch.SymInt | torch.SymFloat)
    return isinstance(known, TensorVariable)


def _only_raises(translator: Any, jump: Any) -> bool:
    """Return whether the code that the jump skips ends by raising an error, without storing values
    or leaving the branch before."""
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
# ...)``, as in many detection models.
#
# A program contains one of the branches. If only such a branch prevents a capture, the program
# contains the branch for finite values, and a warning is logged. For an infinite value, the plain
# model takes the other branch, while the program continues with the infinite value.

_log = logging.getLogger("autopar")
_FINITE, _INFINITE, _NAN = torch.isfinite, torch.isinf, torch.isnan


class _Truth:
    """The result of `all` or `any` of a test for finite values. It is not a number: a model that
    computes with it raises an error and remains refused."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def __bool__(self) -> bool:
        return self.answer

    def __or__(self, other: _Truth) -> _Truth:
        return _Truth(self.answer or other.answer)

    def __and__(self, other: _Truth) -> _Truth:
        return _Truth(self.answer and other.answer)

    def item(self) -> _Truth:
        """Return the object itself."""
        return self


class _SameForAll:
    """The result of a test for finite values, the same for all elements. It is not a tensor: any
    other use raises an error, and the model remains refused."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def all(self) -> _Truth:
        """Return whether the test holds for all elements."""
        return _Truth(self.answer)

    def any(self) -> _Truth:
        """Return whether the test holds for any element."""
        return _Truth(self.answer)

    def __invert__(self) -> _SameForAll:
        return _SameForAll(not self.answer)


def _finite(input: Any) -> Any:
    return _SameForAll(True) if torch.compiler.is_dynamo_compiling() else _FINITE(input)


def _infinite(input: Any) -> Any:
    return _SameForAll(False) if torch.compiler.is_dynamo_compiling() else _INFINITE(input)


def _not_a_number(input: Any) -> Any:
    return _SameForAll(False) if torch.compiler.is_dynamo_compiling() else _NAN(input)


# Dynamo traces these functions in the code of the model. Code of torch that runs meanwhile on fake
# tensors uses the original functions.
_REPLACEMENTS = {"isfinite": _finite, "isinf": _infinite, "isnan": _not_a_number}


def asks_for_finite(refusal: CaptureError) -> bool:
    """Return whether the source line of `refusal` tests whether values are finite."""
    return any(f"{name}(" in _line(refusal) for name in _REPLACEMENTS)


def _line(refusal: CaptureError) -> str:
    return refusal.where.source if isinstance(refusal.where, Where) else ""


@contextlib.contextmanager
def all_finite(refusal: CaptureError) -> Iterator[None]:
    """Make Dynamo treat every value as finite; if the capture succeeds, log a warning with the
    source line of `refusal`."""
    with contextlib.ExitStack() as stack:
        for name, answer in _REPLACEMENTS.items():
            stack.enter_context(mock.patch.object(torch, name, answer))
        yield
    _log.warning(
        "forward tests whether values are finite (%s): the program uses the branch for finite"
        " values",
        _line(refusal),
    )
