"""Variables of closures that layers hold: those of a layer that was captured, and of its likes, which were not."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.capture.folding.likeness import DEPTH, HOOKS, INTERNAL, contents
from autopar.capture.folding.runs import Run
from autopar.capture.trace import OutsideValue


def closures_repeated(outside: Iterable[OutsideValue], model: nn.Module, run: Run) -> tuple[OutsideValue, ...]:
    """Those of the full model: each layer that a shortened one lacks reads in its own closures what its like, of the first unit, does.

    Args:
        model: the full one.
    """
    layers, found = [model.get_submodule(path) for path in run.layers], tuple(outside)
    added = []
    for position in run.removed:
        pairs = zip(_cells(layers[run.like(position)]), _cells(layers[position]), strict=True)  # equal layers hold equal functions
        own = {id(theirs): its for theirs, its in pairs if its is not theirs}
        added += [replace(each, holder=own[id(each.holder)]) for each in found if id(each.holder) in own]
    return found + tuple(added)


def _cells(layer: nn.Module) -> Iterator[types.CellType]:
    """In the order of what `runs` compares."""
    for module in layer.modules():
        for attribute, value in vars(module).items():
            if attribute not in INTERNAL:
                yield from _within(value)
        for hooks in HOOKS:
            yield from _within(vars(module)[hooks])


def _within(value: Any, depth: int = 0) -> Iterator[types.CellType]:
    held: Iterable[Any] = ()
    if isinstance(value, (tuple, list)):
        held = value
    elif isinstance(value, dict):
        held = (item for pair in value.items() for item in pair)
    elif isinstance(value, types.MethodType):
        held = (value.__self__,)
    elif isinstance(value, functools.partial):
        held = (value.func, value.args, value.keywords)
    elif isinstance(value, types.FunctionType):
        yield from value.__closure__ or ()
        held = (value.__defaults__, *contents(value))
    for each in held if depth < DEPTH else ():
        yield from _within(each, depth + 1)

