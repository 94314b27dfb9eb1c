"""Find runs of equal layers in a model's lists of modules.

A *list* is a ModuleList, a Sequential, or a ModuleDict with the keys "0", "1", …, that is not inside another list's run. A
*unit* is `period` neighbouring layers; a *run* is several equal units in a row. Layers are equal where everything is equal that
could decide what they compute: classes, attributes, shapes, dtypes, `requires_grad` and hooks of all their modules. An integer
attribute that counts the layers (``layer_idx``) does not make them differ: whether it matters is for the check against the full
model to find.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

KEPT_FIRST, KEPT_LAST = 2, 2  # units that stay: between two equal neighbours there are enough to see what repeats
_LEAST_SAVING = 2  # layers: the check costs about as much as capturing one
_MAX_PERIOD = 8
DEPTH = 6  # of nested containers in an attribute
INTERNAL = frozenset(vars(nn.Module()))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Fact = tuple[str, Any]  # (what, its value) of a layer


@dataclass(frozen=True, slots=True)
class Run:
    """Units of equal layers: `period` layers each, `num_units` of them, from position `start` of the list at `path` on."""

    path: str
    start: int
    period: int
    num_units: int

    @property
    def removed(self) -> range:
        """Positions of the layers that a shortened model lacks."""
        return range(self.start + KEPT_FIRST * self.period, self.start + (self.num_units - KEPT_LAST) * self.period)

    @property
    def num_layers(self) -> int:
        """Layers in all units."""
        return self.period * self.num_units

    @property
    def name(self) -> str:
        """The list for people: its path, or the model where it is the list itself."""
        return self.path or "the model"

    def __str__(self) -> str:
        alternating = f", {self.period} kinds in turn" if self.period > 1 else ""
        return f"{self.num_layers} layers of {self.name}{alternating}"


def find_runs(model: nn.Module) -> tuple[tuple[Run, ...], str]:
    """Runs that are worth folding, outermost lists first; where there is none, why."""
    owners = Counter(id(tensor) for tensor in _tensors_by_path(model))
    runs: list[Run] = []
    reasons: list[str] = []
    _search(_Model(model, owners), model, "", runs, reasons)
    return tuple(runs), "" if runs else (reasons[0] if reasons else "no list of modules is long enough to fold")


@dataclass(frozen=True, slots=True)
class _Model:
    """The model, and how many modules hold each of its tensors (by id)."""

    root: nn.Module
    owners: Counter[int]


def _search(model: _Model, module: nn.Module, path: str, runs: list[Run], reasons: list[str]) -> None:
    if _is_list(module):
        found, reason = _runs_of(model, module, path)
        runs += found
        reasons += [reason] if reason else []
        if found:
            return
    for name, child in module.named_children():
        _search(model, child, f"{path}.{name}".lstrip("."), runs, reasons)


def _is_list(module: nn.Module) -> bool:
    containers = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    return isinstance(module, containers) and list(module._modules) == [str(i) for i in range(len(module))]


def _tensors_by_path(model: nn.Module) -> Iterator[torch.Tensor]:
    for _, module in model.named_modules(remove_duplicate=False):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor


def _runs_of(model: _Model, module: nn.Module, path: str) -> tuple[list[Run], str]:
    layers = list(module.children())
    if len(layers) < KEPT_FIRST + KEPT_LAST + _LEAST_SAVING:
        return [], ""
    facts = [dict(_facts(layer, model.owners)) for layer in layers]
    told = [{**fact, **more} for fact, more in zip(facts, _facts_beside(model.root, layers), strict=True)]
    reason = ""
    for candidates in (told, facts):  # lists that are as long as there are layers need not be about the layers
        for counter in _counters(candidates):
            for fact in candidates:
                fact.pop(counter, None)
        kinds: dict[Any, int] = {}
        keys = [kinds.setdefault(tuple(fact.items()), len(kinds)) for fact in candidates]
        found = list(_best(keys, 0, len(keys), path))
        if found:
            return found, ""
        reason = _difference(candidates, keys, path)
    return [], reason


def _facts_beside(model: nn.Module, layers: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """For each layer what lists of the same length say at its position."""
    facts: list[dict[str, Any]] = [{} for _ in layers]
    for holder in beside(model, layers):
        for name, value in vars(holder).items():
            if type(value) in (list, tuple) and len(value) == len(layers):
                for fact, item in zip(facts, value, strict=True):
                    fact[f"{type(holder).__name__}.{name}"] = _described(item, {})
    return facts


def _counters(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Integer facts that are the layer's position plus a constant."""
    names = dict.fromkeys(name for fact in facts for name in fact)
    found = []
    for name in names:
        held = [(position, fact[name]) for position, fact in enumerate(facts) if name in fact]
        if len(held) > 1 and all(type(value) is int for _, value in held) and len({value - position for position, value in held}) == 1:
            found.append(name)
    return found


def _best(keys: Sequence[int], start: int, end: int, path: str) -> Iterator[Run]:
    """The run in ``keys[start:end]`` that saves most layers, and those beside it."""
    best = None
    for period in range(1, _MAX_PERIOD + 1):
        position = start
        while position + period <= end:
            reach = position + period
            while reach < end and keys[reach] == keys[reach - period]:
                reach += 1
            run = Run(path, position, period, (reach - position) // period)
            if len(run.removed) >= _LEAST_SAVING and (best is None or len(run.removed) > len(best.removed)):
                best = run
            position = max(position + 1, reach - period + 1)
    if best is not None:
        yield from _best(keys, start, best.start, path)
        yield best
        yield from _best(keys, best.start + best.num_layers, end, path)


def _difference(facts: Sequence[dict[str, Any]], keys: Sequence[int], path: str) -> str:
    """A sentence on why there is no run: the last two neighbours that differ, and in what."""
    later = max(position for position in range(1, len(keys)) if keys[position] != keys[position - 1])
    before, after = facts[later - 1], facts[later]
    names = [name for name in {**before, **after} if before.get(name, ...) != after.get(name, ...)]
    what = repr(names[0].strip()) if names else "the order of their attributes"
    return f"layers {later - 1} and {later} of {path or 'the model'} differ in {what}"


def _facts(layer: nn.Module, owners: Counter[int]) -> Iterator[Fact]:
    inside = {id(module): name for name, module in layer.named_modules()}
    for name, module in layer.named_modules():
        yield f"{name} class", type(module)
        yield f"{name} training", module.training
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for attribute, tensor in tensors.items():
                yield f"{name}.{attribute}".lstrip("."), (kind, *_tensor_fact(tensor))
                if tensor is not None and owners[id(tensor)] > 1:  # what something else has too is like no other
                    yield f"{name}.{attribute} (tied)".lstrip("."), id(tensor)
        for attribute, value in vars(module).items():
            if attribute not in INTERNAL:
                yield f"{name}.{attribute}".lstrip("."), _described(value, inside)
        for hooks in HOOKS:
            if vars(module)[hooks]:
                yield f"{name} {hooks}", tuple(_described(hook, inside) for hook in vars(module)[hooks].values())


def _tensor_fact(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    return () if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


def _described(value: Any, inside: dict[int, str], depth: int = 0) -> Any:
    """Something hashable that is equal for values that act alike; identity where nothing better is known."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)):
        return value if type(value) is int else (type(value), value)
    if isinstance(value, nn.Module) and id(value) in inside:
        return "module", inside[id(value)]
    if depth < DEPTH:
        describe = functools.partial(_described, inside=inside, depth=depth + 1)
        if isinstance(value, (tuple, list)):
            return (type(value), *map(describe, value))
        if isinstance(value, dict):
            return (type(value), *((describe(key), describe(item)) for key, item in value.items()))
        if isinstance(value, types.MethodType):
            return "method", id(value.__func__), describe(value.__self__)
        if isinstance(value, functools.partial):
            return "partial", describe(value.func), describe(value.args), describe(value.keywords)
        if isinstance(value, types.FunctionType):
            return "function", value.__code__, describe(value.__defaults__), describe(tuple(contents(value)))
    return type(value), id(value)


def contents(function: types.FunctionType) -> Iterator[Any]:
    """What the variables of its closure hold, but for those without a value."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def positions_kept(length: int, runs: Iterable[Run]) -> tuple[int, ...]:
    """Positions of a list's layers that stay in a shortened model."""
    removed = {position for run in runs for position in run.removed}
    return tuple(position for position in range(length) if position not in removed)


def beside(model: nn.Module, layers: Iterable[nn.Module | None]) -> Iterator[object]:
    """Modules outside of the layers, and all configurations."""
    inside = {id(module) for layer in layers if layer is not None for module in layer.modules()}
    yield from (module for module in model.modules() if id(module) not in inside)
    yield from configurations(model)


def configurations(model: nn.Module) -> list[Any]:
    """Objects that modules hold as ``config``, and those of the same name within them (``text_config``), each once."""
    found: dict[int, Any] = {}
    waiting = [value for module in model.modules() for name, value in vars(module).items() if name == "config"]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "__dict__") and not isinstance(config, type):
            found[id(config)] = config
            waiting += [value for name, value in vars(config).items() if "config" in name]
    return list(found.values())
