"""Shorten a model for a while, and leave no trace of it."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from autopar.capture.folding.runs import Run, beside, configurations, positions_kept

_COUNTS = re.compile(r"layer|block|depth")


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Whatever happens to the model's modules, their configurations and their lists and dicts is undone on exit.

    Tensors keep their identity; what was written into them is not undone (there is nothing in fake ones).
    """
    holders = [*model.modules(), *configurations(model)]
    saved = [(vars(holder), dict(vars(holder))) for holder in holders]
    inner = [value for _, before in saved for value in before.values() if isinstance(value, (list, dict, set))]
    saved_inner = [(value, _contents(value)) for value in inner]
    python, numpy = random.getstate(), sys.modules.get("numpy.random")
    drawn = numpy.get_state() if numpy else None
    try:
        yield
    finally:
        for now, held in saved:
            now.clear()
            now.update(held)
        for value, before in saved_inner:
            _restore(value, before)
        random.setstate(python)
        if numpy:
            numpy.set_state(drawn)


def _contents(value: Any) -> list[Any]:
    return list(value.items()) if isinstance(value, dict) else list(value)


def _restore(value: Any, before: list[Any]) -> None:
    now = _contents(value)
    flat = itertools.chain.from_iterable if isinstance(value, dict) else iter
    if len(now) == len(before) and all(a is b for a, b in zip(flat(now), flat(before), strict=True)):
        return  # as it was: those that refuse to be changed (diffusers' FrozenDict) are among these
    if isinstance(value, list):
        value[:] = before
    else:
        value.clear()
        value.update(before)


def cut(model: nn.Module, runs: Sequence[Run], *, counts: bool) -> Mapping[str, tuple[int, ...]]:
    """Remove the interior units of all runs from the model, and from what stands beside their lists, position by position.

    Lists and tuples in configurations and outside of the layers that have one element per layer (``layer_types``) are cut
    alike; with `counts`, numbers of layers too (some models index up to them). Call it within `preserved`.

    Returns:
        For each list's path, the full model's positions of the layers that stay.
    """
    kept: dict[str, tuple[int, ...]] = {}
    for path in dict.fromkeys(run.path for run in runs):
        container = model.get_submodule(path)
        layers = list(container._modules.values())
        positions = positions_kept(len(layers), [run for run in runs if run.path == path])
        for holder in beside(model, layers):
            _shorten(vars(holder), len(layers), positions, counts)
        vars(container)["_modules"] = type(container._modules)((str(i), layers[position]) for i, position in enumerate(positions))
        kept[path] = positions
    return kept


def _shorten(attributes: dict[str, Any], length: int, positions: Sequence[int], counts: bool) -> None:
    for name, value in attributes.items():
        if type(value) in (list, tuple) and len(value) == length:
            attributes[name] = type(value)(value[position] for position in positions)
        elif counts and type(value) is int and value == length and _COUNTS.search(name):
            attributes[name] = len(positions)
