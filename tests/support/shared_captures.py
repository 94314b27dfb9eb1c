"""Captures shared between tests: a model that was captured before, in all that a capture can see,
is not traced again.

`share()` puts a memory of the latest captures under `autopar.capture.capture`. What is remembered
is a whole `Trace`; each call gets a copy with a graph of its own, so that a test which changes its
graph changes nobody else's. What a capture can see is written down in full by `look`: classes and
plain attributes of all modules, shapes, dtypes, strides and ties of their tensors, the call, and
`around` it. Whatever `look` does not know, as a closure over some state, makes the model one that
is never shared.

What this process has not captured, another of the same run of tests may have: `stored_captures`.

Tests of capturing itself do not use this. ``pytest --fresh-captures`` turns it off everywhere.
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

FRESH = "AUTOPAR_TESTS_FRESH_CAPTURES"  # in the environment, so that spawned processes know it too
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
)  # of a configuration: what it was, in a number that is another in each process
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_captured = capturing._capture_once
_kept: OrderedDict[Any, Trace] = OrderedDict()


class Unknown(Exception):
    """Something that a capture may depend on and that cannot be compared."""


def share() -> None:
    """From here on captures of this process are shared."""
    if not os.environ.get(FRESH):
        capturing._capture_once = captured


def unshare() -> None:
    """From here on each capture is traced."""
    capturing._capture_once = _captured


def captured(model: nn.Module, call: Any, fold: bool) -> Trace:
    """What ``capturing._captured`` returns."""
    try:
        leaves = tuple((path, _leaf(leaf)) for path, leaf in call.in_leaves)
        known = tuple((position, str(value.tolist())) for position, value in call.known.items())
        key = (
            fold,
            *around(),
            look(model),
            leaves,
            known,
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
    """What torch is set to: the default dtype, and autocast by device."""
    autocast = [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    return torch.get_default_dtype(), tuple(autocast), torch.are_deterministic_algorithms_enabled()


def copied(trace: Trace) -> Trace:
    """The same trace around a graph of its own."""
    graph, nodes = fx.Graph(), {}
    for node in trace.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
        nodes[node].name = node.name
    return replace(trace, graph=graph)


def look(model: nn.Module) -> Any:
    """All of a model that a capture can see, as something to compare.

    Raises:
        Unknown: where it has something that cannot be compared.
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
            for held in (module._parameters, module._buffers)
            for key, t in held.items()
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
    number = ties.setdefault(id(tensor), len(ties))  # tied ones have one number
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
    """`value` by its type and content; functions and classes by themselves, functions within
    functions by their code."""
    if (
        isinstance(value, types.FunctionType) and "<locals>" in value.__qualname__
    ):  # made anew for each model
        held = [
            value.__defaults__,
            value.__kwdefaults__,
            [cell.cell_contents for cell in value.__closure__ or ()],
        ]
        return value.__module__, value.__qualname__, value.__code__, _plain(held)
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
            {name: held for name, held in vars(value).items() if name not in _NOT_LOOKED_AT}
        )
    raise Unknown(f"{type(value)}")
