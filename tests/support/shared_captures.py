"""Captures shared between tests: a model that was captured before, with equal relevant state, is
not traced again.

`share()` adds a cache of the latest captures below `autopar.capture.capture`. The cache contains
`Trace` objects. Each call gets a copy with its own graph, so that a test that changes its graph
does not affect other tests. `look` describes everything that a capture can depend on: classes and
plain attributes of all modules, shapes, dtypes, strides and ties of their tensors, the call, and
the settings in `around`. A model with anything that `look` does not support, such as a closure over
some state, is never shared.

Captures of other processes of the same test run are read from `stored_captures`.

Tests of capture itself do not use this module. ``pytest --fresh-captures`` disables it everywhere.
"""

from __future__ import annotations

import os
import types
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from stored_captures import stored
from torch import fx, nn

from autopar.capture import Trace, capturing

FRESH = "AUTOPAR_TESTS_FRESH_CAPTURES"  # in the environment, so that spawned processes inherit it
NUM_KEPT = 24
_ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
)
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}
_NOT_LOOKED_AT = (
    "_original_object_hash",
)  # of a configuration: a hash of its original state, which differs between processes
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_captured = capturing._capture_once
_kept: OrderedDict[Any, Trace] = OrderedDict()


class Unknown(Exception):
    """An object that a capture may depend on and that cannot be compared."""


def share() -> None:
    """Share the captures of this process from now on."""
    if not os.environ.get(FRESH):
        capturing._capture_once = captured


def unshare() -> None:
    """Trace at each capture from now on."""
    capturing._capture_once = _captured


def captured(model: nn.Module, call: Any, fold: bool) -> Trace:
    """Return the result of ``capturing._captured``."""
    try:
        leaves = tuple((path, _leaf(leaf)) for path, leaf in call.in_leaves)
        known_values = tuple(
            (position, str(value.tolist())) for position, value in call.known.items()
        )
        key = (
            fold,
            *around(),
            look(model),
            leaves,
            known_values,
            str(call.in_spec),
            call.precision,
            call.inference,
            tuple(call.stored.items()),
        )
    except Unknown:
        return _captured(model, call, fold)
    if key not in _kept:
        _kept[key] = stored(key, lambda: _captured(model, call, fold))
        if len(_kept) > NUM_KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return copied(_kept[key])


def around() -> tuple[Any, ...]:
    """Return the global settings of torch: the default dtype, and autocast by device."""
    autocast = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    return torch.get_default_dtype(), tuple(autocast), torch.are_deterministic_algorithms_enabled()


def copied(trace: Trace) -> Trace:
    """Return the same trace with a copy of its graph."""
    graph, nodes = fx.Graph(), {}
    for node in trace.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
        nodes[node].name = node.name
    return replace(trace, graph=graph)


def look(model: nn.Module) -> Any:
    """Return everything of a model that a capture can depend on, as a comparable object.

    Raises:
        Unknown: the model has something that cannot be compared.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    numbers: dict[int, int] = {}
    ties: dict[int, int] = {}
    looks = []
    for name, module in modules:
        number = numbers.setdefault(id(module), len(numbers))
        own = {key: value for key, value in module.__dict__.items() if key not in _OF_EVERY_MODULE}
        hooks = [_plain(list(getattr(module, key).values())) for key in _HOOKS]
        tensors = [
            (key, _tensor(t, ties))
            for named_tensors in (module._parameters, module._buffers)
            for key, t in named_tensors.items()
        ]
        looks.append(
            (
                name,
                number,
                type(module),
                type(module).forward,
                _plain(own),
                tuple(hooks),
                tuple(tensors),
            )
        )
    return tuple(looks)


def _tensor(tensor: torch.Tensor | None, ties: dict[int, int]) -> Any:
    if tensor is None:
        return None
    number = ties.setdefault(id(tensor), len(ties))  # tied tensors have the same number
    return (
        number,
        isinstance(tensor, nn.Parameter),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
    )


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return "tensor", tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return _plain(leaf)


def _plain(value: Any) -> Any:
    """Return `value` by type and content. Functions and classes are compared by identity, nested
    functions by their code."""
    if (
        isinstance(value, types.FunctionType) and "<locals>" in value.__qualname__
    ):  # created for each model
        contents = [
            value.__defaults__,
            value.__kwdefaults__,
            [cell.cell_contents for cell in value.__closure__ or ()],
        ]
        return value.__module__, value.__qualname__, value.__code__, _plain(contents)
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # 0.0 equals -0.0
    if isinstance(value, _ATOMS):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_plain, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_plain, value))
    if isinstance(value, Mapping):
        return type(value), tuple((_plain(key), _plain(item)) for key, item in value.items())
    if type(value).__module__.startswith("transformers.") and hasattr(
        value, "to_dict"
    ):  # configurations
        return type(value), _plain(
            {name: contents for name, contents in vars(value).items() if name not in _NOT_LOOKED_AT}
        )
    raise Unknown(f"{type(value)}")
