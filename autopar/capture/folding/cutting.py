"""Shorten a model for a while, and leave no trace of it."""

from __future__ import annotations

import contextlib
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from autopar.capture.folding.runs import Run, positions_kept

_COUNTS = re.compile(r"layer|block|depth")


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Whatever happens to the model's modules, their configurations and their lists and dicts is undone on exit.

    Tensors keep their identity; what was written into them is not undone (there is nothing in fake ones).
    """
    holders = [*model.modules(), *_configurations(model)]
    saved = [(vars(holder), dict(vars(holder))) for holder in holders]
    inner: list[tuple[Any, Any]] = [
        (value, value.copy()) for _, before in saved for value in before.values() if isinstance(value, (list, dict, set))
    ]
    python, numpy = random.getstate(), sys.modules.get("numpy.random")
    drawn = numpy.get_state() if numpy else None
    try:
        yield
    finally:
        for now, before in saved:
            now.clear()
            now.update(before)
        for value, before in inner:
            _restore(value, before)
        random.setstate(python)
        if numpy:
            numpy.set_state(drawn)


def _restore(value: Any, before: Any) -> None:
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
        for holder in _beside(model, layers):
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


def _beside(model: nn.Module, layers: Iterable[nn.Module | None]) -> Iterator[object]:
    """Modules outside of the layers, and all configurations."""
    inside = {id(module) for layer in layers if layer is not None for module in layer.modules()}
    yield from (module for module in model.modules() if id(module) not in inside)
    yield from _configurations(model)


def _configurations(model: nn.Module) -> list[Any]:
    """Objects that modules hold as ``config``, and those of the same name within them (``text_config``), each once."""
    found: dict[int, Any] = {}
    waiting = [value for module in model.modules() for name, value in vars(module).items() if name == "config"]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "__dict__") and not isinstance(config, type):
            found[id(config)] = config
            waiting += [value for name, value in vars(config).items() if "config" in name]
    return list(found.values())
