"""Find runs of equal layers in a model.

The children of each list of modules (ModuleList, Sequential, ModuleDict) are candidates for layers.
If a module has no run in its lists, the modules at each depth below it are candidates too; these
may be attributes of a module, or layers of several parents. A list without its own forward within
another list is replaced by its members. Layers are in the order of registration, or in the order in
which forward calls them if that differs.

A *unit* consists of `period` consecutive layers; a *run* is a sequence of equal units. Two layers
are equal if classes, attributes, shapes, dtypes, `requires_grad` and hooks of their modules are
equal.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

# --------------------------------------------------------------------------------------------------
# Equality of layers: classes, attributes, shapes, dtypes, `requires_grad` and hooks of modules.
#
# An integer attribute that numbers the layers (``layer_idx``) is ignored; the check against the
# full model determines whether it affects the computation.

DEPTH = 6  # of nested containers in an attribute
INTERNAL = frozenset(vars(nn.Module()))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Fact = tuple[str, Any]  # (description, value) of a property of a layer


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of all modules; a shared tensor is yielded once per module
    that has it."""
    for _, module in model.named_modules(remove_duplicate=False):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor


def facts_outside_layers(model: nn.Module, layers: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Return facts from lists and tuples outside the layers that have one element per layer: for
    each layer, the elements at its position."""
    facts: list[dict[str, Any]] = [{} for _ in layers]
    for holder in outside_layers(model, layers):
        for name, value in vars(holder).items():
            if type(value) in (list, tuple) and len(value) == len(layers):
                for fact, item in zip(facts, value, strict=True):
                    fact[f"{type(holder).__name__}.{name}"] = _describe_value(item, {})
    return facts


def counters(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of integer facts that equal the position of the layer plus a constant."""
    names = dict.fromkeys(name for fact in facts for name in fact)
    counter_names = []
    for name in names:
        values = [(position, fact[name]) for position, fact in enumerate(facts) if name in fact]
        if (
            len(values) > 1
            and all(type(value) is int for _, value in values)
            and len({value - position for position, value in values}) == 1
        ):
            counter_names.append(name)
    return counter_names


def difference(facts: Sequence[dict[str, Any]], keys: Sequence[int], paths: Sequence[str]) -> str:
    """Explain in one sentence why there is no run: name the last two consecutive layers that
    differ, and the first difference.

    Args:
        facts: the facts of each layer.
        keys: one number per layer, the same for equal layers.
        paths: the paths of the layers.
    """
    later = max(
        position for position in range(1, len(keys)) if keys[position] != keys[position - 1]
    )
    before, after = facts[later - 1], facts[later]
    names = [name for name in {**before, **after} if before.get(name, ...) != after.get(name, ...)]
    aspect = repr(names[0].strip()) if names else "the order of their attributes"
    (holder, _, one), (other_holder, _, other) = (
        path.rpartition(".") for path in paths[later - 1 : later + 1]
    )
    if holder != other_holder:
        return f"{paths[later - 1]} and {paths[later]} differ in {aspect}"
    return f"layers {one} and {other} of {holder or 'the model'} differ in {aspect}"


def facts_of(layer: nn.Module, owners: Counter[int]) -> Iterator[Fact]:
    """Yield all properties that determine the computation of a layer.

    Args:
        layer: the layer.
        owners: id of each tensor → number of modules of the model that have it. A layer with a
            shared tensor differs from all other layers.
    """
    inside = {id(module): name for name, module in layer.named_modules()}
    for name, module in layer.named_modules():
        yield f"{name} class", type(module)
        yield f"{name} training", module.training
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for attribute, tensor in tensors.items():
                yield f"{name}.{attribute}".lstrip("."), (kind, *_tensor_fact(tensor))
                if (
                    tensor is not None and owners[id(tensor)] > 1
                ):  # a shared tensor is different from every other tensor
                    yield f"{name}.{attribute} (tied)".lstrip("."), id(tensor)
        for attribute, value in vars(module).items():
            if attribute not in INTERNAL:
                yield f"{name}.{attribute}".lstrip("."), _describe_value(value, inside)
        for hooks in HOOKS:
            if vars(module)[hooks]:
                yield (
                    f"{name} {hooks}",
                    tuple(_describe_value(hook, inside) for hook in vars(module)[hooks].values()),
                )


def _tensor_fact(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    return (
        ()
        if tensor is None
        else (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
    )


def _describe_value(value: Any, inside: dict[int, str], depth: int = 0) -> Any:
    """Return a hashable description that is equal for values with equal behaviour; for values of
    unknown behaviour, it contains the id."""
    if value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
    ):
        return value if type(value) is int else (type(value), value)
    if isinstance(value, nn.Module) and id(value) in inside:
        return "module", inside[id(value)]
    if depth < DEPTH:
        describe = functools.partial(_describe_value, inside=inside, depth=depth + 1)
        described = _describe_parts(value, describe)
        if described is not None:
            return described
    return (type(value), "stateless") if _is_stateless(value) else (type(value), id(value))


def _describe_parts(value: Any, describe: Callable[[Any], Any]) -> tuple[Any, ...] | None:
    """Return the description of a container or a function by those of its parts; None for other
    values."""
    if isinstance(value, (tuple, list)):
        return (type(value), *map(describe, value))
    if isinstance(value, dict):
        return (type(value), *((describe(key), describe(item)) for key, item in value.items()))
    if isinstance(value, types.MethodType):
        return "method", id(value.__func__), describe(value.__self__)
    if isinstance(value, functools.partial):
        return "partial", describe(value.func), describe(value.args), describe(value.keywords)
    if isinstance(value, types.FunctionType):
        closure = describe(tuple(contents(value)))
        return "function", value.__code__, describe(value.__defaults__), closure
    return None


class _Plain:
    """An object without slots."""


def _is_stateless(value: Any) -> bool:
    """Return whether an object of a Python class has neither attributes nor slots, so that all
    objects of its class behave the same, such as the attention processors of diffusers."""
    kind = type(value)
    has_slots = any("__slots__" in vars(each) for each in kind.__mro__)
    return (
        kind.__basicsize__ == _Plain.__basicsize__
        and not has_slots
        and getattr(value, "__dict__", None) == {}
    )


def contents(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values of the closure variables of a function, except those without a value."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def outside_layers(model: nn.Module, layers: Iterable[nn.Module | None]) -> Iterator[object]:
    """Yield the modules outside the layers, and all configuration objects of the model."""
    inside = {id(module) for layer in layers if layer is not None for module in layer.modules()}
    yield from (module for module in model.modules() if id(module) not in inside)
    yield from configurations(model)


def configurations(model: nn.Module) -> list[Any]:
    """Return the ``config`` attributes of modules and the configurations nested in them
    (``text_config``), each once."""
    configs: dict[int, Any] = {}
    waiting = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if name == "config"
    ]
    while waiting:
        config = waiting.pop()
        if (
            id(config) not in configs
            and hasattr(config, "__dict__")
            and not isinstance(config, type)
        ):
            configs[id(config)] = config
            waiting += [value for name, value in vars(config).items() if "config" in name]
    return list(configs.values())


KEPT_FIRST, KEPT_LAST = (
    2,
    2,
)  # units that remain; the two interior ones show the pattern that repeats
_LEAST_SAVING = 2  # layers; the check takes about as long as capturing one layer
_FEWEST = KEPT_FIRST + KEPT_LAST + _LEAST_SAVING
_MAX_PERIOD = 8
_MAX_LEVELS = 4  # depth below a module at which layers are searched
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

Order = Mapping[nn.Module, int]  # module that forward calls → number of its first call
Named = tuple[str, nn.Module]  # path, module


@dataclass(frozen=True, slots=True)
class Run:
    """A sequence of equal units, each with `period` layers.

    Attributes:
        path: path of the innermost module that contains the layers.
        layers: paths of the layers, in the order in which forward calls them.
        period: number of layers in a unit.
    """

    path: str
    layers: tuple[str, ...]
    period: int
    _index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "_index", {path: position for position, path in enumerate(self.layers)}
        )

    @property
    def num_layers(self) -> int:
        """Number of layers in all units."""
        return len(self.layers)

    @property
    def num_units(self) -> int:
        """Number of units."""
        return len(self.layers) // self.period

    @property
    def removed_positions(self) -> range:
        """Positions of the layers that are removed from the shortened model."""
        return range(KEPT_FIRST * self.period, (self.num_units - KEPT_LAST) * self.period)

    @property
    def name(self) -> str:
        """Name of the module that contains the layers in messages: its path, or "the model"."""
        return self.path or "the model"

    def layer(self, position: int) -> str:
        """Return the name of a layer in messages: ``layer 7 of layers``."""
        return f"layer {self.layers[position].removeprefix(f'{self.path}.')} of {self.name}"

    def find(self, path: str) -> tuple[int, str] | None:
        """Return the position of the layer that contains `path`, and the rest of the path
        (``.weight``); None outside the run."""
        prefix = path
        while prefix:
            if prefix in self._index:
                return self._index[prefix], path[len(prefix) :]
            prefix = prefix.rpartition(".")[0]
        return None

    def like(self, position: int) -> int:
        """Return the position of the equal layer in the first unit."""
        return position % self.period

    def others(self, unit: int) -> tuple[Run, ...]:
        """Return the runs to try if unit `unit` differs from the others: the same layers with a
        unit per parent module, or the units before and after `unit`."""
        unit_sizes = [
            len(list(group))
            for _, group in itertools.groupby(self.layers, key=lambda path: path.rpartition(".")[0])
        ]
        if self.period < unit_sizes[0] <= _MAX_PERIOD and len(set(unit_sizes)) == 1:
            return _worthwhile((replace(self, period=unit_sizes[0]),))
        pieces = self.layers[: unit * self.period], self.layers[(unit + 1) * self.period :]
        return _worthwhile(replace(self, layers=layers) for layers in pieces)

    def __str__(self) -> str:
        alternating = f", {self.period} alternating kinds" if self.period > 1 else ""
        return f"{self.num_layers} layers of {self.name}{alternating}"


def _worthwhile(runs: Iterable[Run]) -> tuple[Run, ...]:
    return tuple(run for run in runs if len(run.removed_positions) >= _LEAST_SAVING)


def find_runs(model: nn.Module, order: Order | None = None) -> tuple[tuple[Run, ...], str]:
    """Find the runs that are worth folding.

    Args:
        model: the model to search.
        order: number of the first call of each module, to order layers by their calls; None to
            order them by registration.

    Returns:
        The runs, those of the outermost lists first, and the reason if there are none, else ``""``.
    """
    owners = Counter(id(tensor) for tensor in tensors_of(model))
    search = _Search(model, owners, order)
    search.within(model, "")
    runs, reasons = search.runs, search.reasons
    return tuple(runs), "" if runs else (
        reasons[0] if reasons else "no list of modules is long enough to fold"
    )


class _Search:
    """A search for runs in a model; collects the runs, and reasons why lists have none."""

    def __init__(self, model: nn.Module, owners: Counter[int], order: Order | None) -> None:
        self.model, self.owners, self.order = model, owners, order
        self.runs: list[Run] = []
        self.reasons: list[str] = []

    def within(self, module: nn.Module, path: str) -> bool:
        """Search a module and its children; return whether there are runs."""
        has_runs = isinstance(module, LISTS) and self._search_modules(
            _members(module, path), with_lists=True
        )
        if not has_runs:
            has_runs = any(
                [
                    self.within(child, _join_path(path, name))
                    for name, child in module.named_children()
                ]
            )
        return has_runs or (not has_no_forward(module) and self._search_levels(module, path))

    def _search_levels(self, module: nn.Module, path: str) -> bool:
        """Search the modules of each depth below `module`, except those of long lists, which were
        searched before."""
        level = _members(module, path, skip_long=True)
        for _ in range(_MAX_LEVELS):
            if self._search_modules(level, with_lists=False):
                return True
            deeper = [
                inner
                for name, each in level
                for inner in (
                    (not _is_long(each) and _members(each, name, skip_long=True)) or [(name, each)]
                )
            ]
            if len(deeper) == len(level):
                return False
            level = deeper
        return False

    def _search_modules(self, layers: Sequence[Named], *, with_lists: bool) -> bool:
        """Search the given modules for runs; with `with_lists`, first also compare the elements of
        lists that have one element per module."""
        if self.order is not None:
            layers = [each for each in layers if each[1] in self.order]
        if len(layers) < _FEWEST:
            return False
        modules = [module for _, module in layers]
        facts = [dict(facts_of(module, self.owners)) for module in modules]
        tries = [facts]
        if with_lists:
            listed = facts_outside_layers(self.model, modules)
            tries.insert(0, [{**fact, **more} for fact, more in zip(facts, listed, strict=True)])
        for (
            candidates
        ) in tries:  # a list with as many elements as layers may be unrelated to the layers
            reason = self._equal(layers, candidates, least_units=0 if with_lists else _FEWEST)
            if not reason:
                return True
        self.reasons += [reason] if with_lists else []
        return False

    def _equal(
        self, layers: Sequence[Named], facts: Sequence[dict[str, Any]], least_units: int
    ) -> str:
        """Add the runs of layers with equal facts; return the reason if there are none, else
        ``""``."""
        for counter in counters(facts):
            for fact in facts:
                fact.pop(counter, None)
        kinds: dict[Any, int] = {}
        keys = [kinds.setdefault(tuple(fact.items()), len(kinds)) for fact in facts]
        positions = list(range(len(layers)))
        if self.order is not None:
            positions.sort(key=lambda i: self.order[layers[i][1]])  # type: ignore[index]
        paths = tuple(layers[position][0] for position in positions)
        spans = _best([keys[position] for position in positions], 0, len(keys))
        runs = [
            Run(_holder(paths[span.start : span.stop]), paths[span.start : span.stop], period)
            for span, period in spans
        ]
        runs = [run for run in runs if run.num_units >= least_units]
        self.runs += runs
        return "" if runs else difference(facts, keys, [path for path, _ in layers])


def _members(module: nn.Module, path: str, *, skip_long: bool = False) -> list[Named]:
    """Return the children of a module; a list without a forward is replaced by its members, or
    omitted if it is long and `skip_long` is set."""
    members: list[Named] = []
    for name, child in module._modules.items():
        if child is None or (skip_long and has_no_forward(child) and _is_long(child)):
            continue
        inner = _join_path(path, name)
        members += (
            _members(child, inner, skip_long=skip_long)
            if has_no_forward(child)
            else [(inner, child)]
        )
    return members


def _is_long(module: nn.Module) -> bool:
    return isinstance(module, LISTS) and len(module) >= _FEWEST


def _holder(layers: Sequence[str]) -> str:
    """Return the path of the innermost module that contains all layers."""
    parts = [path.split(".")[:-1] for path in layers]
    shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    return ".".join(names[0] for names in shared)


def has_no_forward(module: nn.Module) -> bool:
    """Return whether `module` is a list or dict of modules that cannot be called."""
    return (
        isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and type(module).forward is nn.Module.forward
    )


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _best(keys: Sequence[int], start: int, end: int) -> Iterator[tuple[range, int]]:
    """Yield the positions and period of the run in ``keys[start:end]`` that saves the most layers,
    and those of the best runs before and after it."""
    best, period_of_best = range(0), 1
    for period in range(1, _MAX_PERIOD + 1):
        position = start
        while position + period <= end:
            reach = position + period
            while reach < end and keys[reach] == keys[reach - period]:
                reach += 1
            span = range(position, position + (reach - position) // period * period)
            saved = len(span) - (KEPT_FIRST + KEPT_LAST) * period
            if (
                saved >= _LEAST_SAVING
                and saved > len(best) - (KEPT_FIRST + KEPT_LAST) * period_of_best
            ):
                best, period_of_best = span, period
            position = max(position + 1, reach - period + 1)
    if best:
        yield from _best(keys, start, best.start)
        yield best, period_of_best
        yield from _best(keys, best.stop, end)
