"""Shorten a model temporarily by removing layers, and restore it afterwards."""

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

from autopar.capture.folding.runs import (
    INTERNAL,
    Run,
    configurations,
    has_no_forward,
    outside_layers,
)

_COUNTS = re.compile(r"layer|block|depth")

Kept = Mapping[
    str, Mapping[str, str]
]  # path of a module in the full model → new names of its children → names in the full model


@contextlib.contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Restore the modules of a model, their configurations, and their lists, dicts and sets on
    exit.

    Tensors keep their identity. Values written to tensors are not restored, since the tensors are
    fake and have none.
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
        for now, contents_before in saved:
            now.clear()
            now.update(contents_before)
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
        return  # unchanged; includes immutable containers, such as FrozenDict of diffusers
    if isinstance(value, list):
        value[:] = before
    else:
        value.clear()
        value.update(before)


class CutWay(Enum):
    """How a model is shortened.

    ``REMOVED``: the layers are removed from their modules and lists. ``COUNTED``: in addition,
    attributes with numbers of layers are reduced and dict keys are renumbered, since some models
    index layers by them. ``PASSED``: layers that forward accesses by name are replaced by modules
    that return their first argument.
    """

    REMOVED, COUNTED, PASSED = auto(), auto(), auto()


class Passing(nn.Module):
    """A replacement of a removed layer that returns its first argument."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if name not in INTERNAL:
                self.__dict__[name] = value
        self.training = layer.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument."""
        return args[0] if args else next(iter(kwargs.values()))


def cut_runs(model: nn.Module, runs: Sequence[Run], way: CutWay) -> Kept:
    """Remove the interior units of all runs from a model and from related lists.

    Lists and tuples in configurations and in modules outside the layers are shortened in the same
    way if they have one element per layer (``layer_types``), or contain the layers or their names.
    Must be called within `preserve_model`.

    Args:
        model: the model, shortened in place.
        runs: the runs of equal layers.
        way: how the layers are removed.

    Returns:
        Path of each module with removed children → new names of its children → their names in the
        full model.
    """
    removed = {run.layers[position] for run in runs for position in run.removed_positions}
    if way is CutWay.PASSED:
        for path in removed:
            holder, name = model.get_submodule(_parent(path)), path.rpartition(".")[2]
            vars(holder)["_modules"] = {**holder._modules, name: Passing(holder._modules[name])}
        return {}
    _cut_lists(model, {id(model.get_submodule(path)) for path in removed})
    renamed_by_run: dict[str, Mapping[str, str]] = {}
    waiting = {_parent(path) for path in removed}
    while waiting:
        path = max(
            waiting, key=lambda each: each.count(".") + bool(each)
        )  # innermost first: a list that becomes empty is removed too
        waiting.remove(path)
        names = _cut_members(model, path, removed, runs, way)
        if not names and path and has_no_forward(model.get_submodule(path)):
            removed.add(path)
            waiting.add(_parent(path))
        else:
            renamed_by_run[path] = names
    return renamed_by_run


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _cut_members(
    model: nn.Module, path: str, removed: Collection[str], runs: Sequence[Run], way: CutWay
) -> Mapping[str, str]:
    """Remove children from the module at `path`; return the new names of the others → their names
    in the full model."""
    holder, prefix = model.get_submodule(path), f"{path}." if path else ""
    members = holder._modules
    names = list(members)
    stay = [position for position, name in enumerate(names) if prefix + name not in removed]
    here = [run for run in runs if _parent(run.layers[0]) == path]
    lengths = {run.num_layers: run.num_layers - len(run.removed_positions) for run in here} | {
        len(names): len(stay)
    }
    for other in outside_layers(model, members.values()):
        _shorten_attributes(vars(other), names, stay, lengths if way is CutWay.COUNTED else {})
    now = [names[position] for position in stay]
    if isinstance(holder, (nn.ModuleList, nn.Sequential)):
        now = names[: len(stay)]
    elif way is CutWay.COUNTED:
        for run in here:
            of_run = [name for name in names if prefix + name in run.layers]
            remaining = [name for name in of_run if prefix + name not in removed]
            first = dict(zip(remaining, of_run, strict=False))
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
    """Shorten list attributes that describe the children of a module, and reduce numbers of
    layers.

    Args:
        attributes: the attributes, changed in place.
        names: names of the children.
        stay: positions of the children that remain.
        lengths: number of layers → the reduced number.
    """
    remaining, every = {names[position] for position in stay}, set(names)
    for name, value in attributes.items():
        if type(value) in (list, tuple) and len(value) > 1:
            if all(type(item) is str and item in every for item in value):
                attributes[name] = type(value)(item for item in value if item in remaining)
            elif len(value) == len(names) and not any(
                isinstance(item, nn.Module) for item in value
            ):
                attributes[name] = type(value)(value[position] for position in stay)
        elif type(value) is int and value in lengths and _COUNTS.search(name):
            attributes[name] = lengths[value]


def _cut_lists(model: nn.Module, removed: Collection[int]) -> None:
    """Remove modules, given by id, from Python lists and tuples."""
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) in (list, tuple) and any(id(item) in removed for item in value):
                vars(module)[name] = type(value)(item for item in value if id(item) not in removed)
