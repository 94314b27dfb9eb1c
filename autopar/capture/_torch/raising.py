"""``if x.max() > 1: raise ValueError(...)``: branches on values that do nothing but raise.

A program does not look at values. As with assertions, what only checks them is left out: the plain model raises there, and the log says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import LazyVariableTracker, SymNodeVariable, TensorVariable
from torch.nn import functional

from autopar.capture._torch.constants import or_its_value
from autopar.capture.refusals import is_torchs

_JUMPS = ("POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE")
_LEAVING = ("RETURN", "YIELD", "STORE", "DELETE", "FOR_ITER", "IMPORT")
_TORCHS_OWN = ("gaussian_nll_loss",)  # of torch.nn.functional, which look at values so
_Handler = Callable[[Any, Any], None]


@contextlib.contextmanager
def raises_left_out() -> Iterator[list[str]]:
    """Dynamo goes on behind such a branch; gives a list of the lines of those that it met."""
    lines: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in _TORCHS_OWN:
            stack.enter_context(mock.patch.object(functional, name, _copied(getattr(functional, name))))
        for kind in _translators(symbolic_convert.InstructionTranslatorBase):
            for code in {symbolic_convert.dis.opmap[name] for name in _JUMPS if name in symbolic_convert.dis.opmap}:
                stack.enter_context(_handled(kind.dispatch_table, code, lines))
        yield lines


@contextlib.contextmanager
def _handled(table: list[Any], code: int, lines: list[str]) -> Iterator[None]:
    before = table[code]
    table[code] = _leaving_out(before, lines)
    try:
        yield
    finally:
        table[code] = before


def _copied(function: Any) -> Any:
    """The same function as another object: Dynamo reads what it does not know as one of torch's."""
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _translators(kind: Any) -> Iterator[Any]:
    yield kind
    for each in kind.__subclasses__():
        yield from _translators(each)


def _leaving_out(handler: _Handler, lines: list[str]) -> _Handler:
    def handle(translator: Any, instruction: Any) -> None:
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
    """Whether a branch depends on what a tensor holds."""
    known = variable.realize() if isinstance(variable, LazyVariableTracker) else variable
    if isinstance(known, SymNodeVariable):
        return isinstance(known.sym_num, torch.SymBool | torch.SymInt | torch.SymFloat)
    return isinstance(known, TensorVariable)


def _only_raises(translator: Any, jump: Any) -> bool:
    """Whether what is jumped over ends by raising, and does nothing before that another line could see."""
    here = translator.instruction_pointer
    for instruction in translator.instructions[here:]:
        if instruction is jump.target or any(word in instruction.opname for word in _LEAVING):
            return False
        if instruction.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in instruction.opname and instruction.target is not jump.target:
            return False
    return False
