"""Shorten a model for a while, and leave no trace of it."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from torch import nn

from autopar.capture.folding.runs import INTERNAL, Run, beside, configurations, has_no_forward

_COUNTS = re.compile(r"layer|block|depth")

Kept = Mapping[
    str, Mapping[str, str]
]  # path of a module in the full model → its members' names → those in the full model


@contextlib.contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Whatever happens to the model's modules, their configurations and their lists and dicts is
    undone on exit.

    Tensors keep their identity; what was written into them is not undone (there is nothing in fake
    ones).
    """
    holders = [*model.modules(), *configurations(model)]
    saved = [(vars(holder), dict(vars(holder))) for holder in holders]
    inner = [
        value
        for _, before in saved
        for value in before.values()
        if isinstance(value, (list, dict, set))
    ]
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
    if len(now) == len(before) and all(
        a is b for a, b in zip(flat(now), flat(before), strict=True)
    ):
        return  # as it was: those that refuse to be changed (diffusers' FrozenDict) are among these
    if isinstance(value, list):
        value[:] = before
    else:
        value.clear()
        value.update(before)


class Way(Enum):
    """How a model is shortened.

    ``REMOVED``: the layers are taken out of what holds them. ``COUNTED``: numbers of layers, and
    the keys, are cut alike (some models index up to them). ``PASSED``: what forward names itself
    stays in its place, and returns what it is given.
    """

    REMOVED, COUNTED, PASSED = auto(), auto(), auto()


class Passing(nn.Module):
    """In place of a layer: returns its first argument."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if name not in INTERNAL:
                self.__dict__[name] = value
        self.training = layer.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Its first argument."""
        return args[0] if args else next(iter(kwargs.values()))


def cut_runs(model: nn.Module, runs: Sequence[Run], way: Way) -> Kept:
    """Remove the interior units of all runs from the model, and from what stands beside them,
    position by position.

    Lists and tuples in configurations and outside of the layers that have one element per layer
    (``layer_types``), or that hold the layers or their names, are cut alike. Call it within
    `preserved`.

    Returns:
        For each module whose members have other names now, these names → those in the full model.
    """
    removed = {run.layers[position] for run in runs for position in run.removed_positions}
    if way is Way.PASSED:
        for path in removed:
            holder, name = model.get_submodule(_parent(path)), path.rpartition(".")[2]
            vars(holder)["_modules"] = {**holder._modules, name: Passing(holder._modules[name])}
        return {}
    _cut_lists(model, {id(model.get_submodule(path)) for path in removed})
    kept: dict[str, Mapping[str, str]] = {}
    waiting = {_parent(path) for path in removed}
    while waiting:
        path = max(
            waiting, key=lambda each: each.count(".") + bool(each)
        )  # a list that becomes empty goes, too
        waiting.remove(path)
        names = _cut_members(model, path, removed, runs, way)
        if not names and path and has_no_forward(model.get_submodule(path)):
            removed.add(path)
            waiting.add(_parent(path))
        else:
            kept[path] = names
    return kept


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _cut_members(
    model: nn.Module, path: str, removed: Collection[str], runs: Sequence[Run], way: Way
) -> Mapping[str, str]:
    """Take the removed members out of the module at `path`; the names of the others → their
    names in the full model."""
    holder, prefix = model.get_submodule(path), f"{path}." if path else ""
    members = holder._modules
    names = list(members)
    stay = [position for position, name in enumerate(names) if prefix + name not in removed]
    here = [run for run in runs if _parent(run.layers[0]) == path]
    lengths = {run.num_layers: run.num_layers - len(run.removed_positions) for run in here} | {
        len(names): len(stay)
    }
    for other in beside(model, members.values()):
        _shorten_attributes(vars(other), names, stay, lengths if way is Way.COUNTED else {})
    now = [names[position] for position in stay]
    if isinstance(holder, (nn.ModuleList, nn.Sequential)):
        now = names[: len(stay)]
    elif way is Way.COUNTED:
        for run in here:
            of_run = [name for name in names if prefix + name in run.layers]
            left = [name for name in of_run if prefix + name not in removed]
            first = dict(zip(left, of_run, strict=False))
            now = [first.get(name, name) for name in now]
    vars(holder)["_modules"] = type(members)(
        (name, members[names[position]]) for name, position in zip(now, stay, strict=True)
    )
    return {name: names[position] for name, position in zip(now, stay, strict=True)}


def _shorten_attributes(
    attributes: dict[str, Any],
    names: Sequence[str],
    stay: Sequence[int],
    lengths: Mapping[int, int],
) -> None:
    """Cut what is about the members of a module, whose names these are; numbers of members
    become what `lengths` says."""
    left, every = {names[position] for position in stay}, set(names)
    for name, value in attributes.items():
        if type(value) in (list, tuple) and len(value) > 1:
            if all(type(item) is str and item in every for item in value):
                attributes[name] = type(value)(item for item in value if item in left)
            elif len(value) == len(names) and not any(
                isinstance(item, nn.Module) for item in value
            ):
                attributes[name] = type(value)(value[position] for position in stay)
        elif type(value) is int and value in lengths and _COUNTS.search(name):
            attributes[name] = lengths[value]


def _cut_lists(model: nn.Module, removed: Collection[int]) -> None:
    """Take removed modules (by id) out of lists of Python's."""
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) in (list, tuple) and any(id(item) in removed for item in value):
                vars(module)[name] = type(value)(item for item in value if id(item) not in removed)
