"""Branches on whether values are finite: ``if not torch.isfinite(x).all(): x = torch.clamp(x, ...)``, as many detectors have them.

A program has one branch. Where nothing but such a question keeps a model from being captured, it is that of finite values, and the log says
so: where a value is infinite, the plain model goes on with what its other branch makes of it, the program with the infinite value.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from autopar.errors import CaptureError, Where

_log = logging.getLogger("autopar")
_FINITE, _INFINITE, _NO_NUMBER = torch.isfinite, torch.isinf, torch.isnan


class _Answer:
    """To a question about all elements. It is no number: where a model computes with it, that fails, and the model stays refused."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def __bool__(self) -> bool:
        return self.answer

    def __or__(self, other: _Answer) -> _Answer:
        return _Answer(self.answer or other.answer)

    def __and__(self, other: _Answer) -> _Answer:
        return _Answer(self.answer and other.answer)

    def item(self) -> _Answer:
        return self


class _Everywhere:
    """One answer for all elements of a tensor. No tensor: whatever else is done with it fails, and the model stays refused."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer

    def all(self) -> _Answer:
        return _Answer(self.answer)

    def any(self) -> _Answer:
        return _Answer(self.answer)

    def __invert__(self) -> _Everywhere:
        return _Everywhere(not self.answer)


def _finite(input: Any) -> Any:
    return _Everywhere(True) if torch.compiler.is_dynamo_compiling() else _FINITE(input)


def _infinite(input: Any) -> Any:
    return _Everywhere(False) if torch.compiler.is_dynamo_compiling() else _INFINITE(input)


def _no_number(input: Any) -> Any:
    return _Everywhere(False) if torch.compiler.is_dynamo_compiling() else _NO_NUMBER(input)


# What a model's own code is answered, as Dynamo reads it; torch's, which makes tensors without values meanwhile, is answered as ever.
_ANSWERS = {"isfinite": _finite, "isinf": _infinite, "isnan": _no_number}


def asks_for_finite(refusal: CaptureError) -> bool:
    """Whether the line that could not be captured asks whether values are finite."""
    return any(f"{name}(" in _line(refusal) for name in _ANSWERS)


def _line(refusal: CaptureError) -> str:
    return refusal.where.source if isinstance(refusal.where, Where) else ""


@contextlib.contextmanager
def all_finite(refusal: CaptureError) -> Iterator[None]:
    """Every value counts as finite; once that was enough, the log says where it was asked first."""
    with contextlib.ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(mock.patch.object(torch, name, answer))
        yield
    _log.warning("forward asks whether values are finite (%s): the program has the branch for those that are", _line(refusal))
