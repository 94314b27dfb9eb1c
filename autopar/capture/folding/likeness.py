"""What decides whether two layers compute the same: classes, attributes, shapes, dtypes, `requires_grad` and hooks of their modules.

Layers are equal where all of it is equal. An integer attribute that counts the layers (``layer_idx``) does not make them differ:
whether it matters is for the check against the full model to find.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

DEPTH = 6  # of nested containers in an attribute
INTERNAL = frozenset(vars(nn.Module()))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Fact = tuple[str, Any]  # (what, its value) of a layer


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    for _, module in model.named_modules(remove_duplicate=False):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor


def facts_beside(model: nn.Module, layers: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """For each layer what lists of the same length say at its position."""
    facts: list[dict[str, Any]] = [{} for _ in layers]
    for holder in beside(model, layers):
        for name, value in vars(holder).items():
            if type(value) in (list, tuple) and len(value) == len(layers):
                for fact, item in zip(facts, value, strict=True):
                    fact[f"{type(holder).__name__}.{name}"] = _described(item, {})
    return facts


def counters(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Integer facts that are the layer's position plus a constant."""
    names = dict.fromkeys(name for fact in facts for name in fact)
    found = []
    for name in names:
        held = [(position, fact[name]) for position, fact in enumerate(facts) if name in fact]
        if (
            len(held) > 1
            and all(type(value) is int for _, value in held)
            and len({value - position for position, value in held}) == 1
        ):
            found.append(name)
    return found


def difference(facts: Sequence[dict[str, Any]], keys: Sequence[int], paths: Sequence[str]) -> str:
    """A sentence on why there is no run: the last two neighbours that differ, and in what."""
    later = max(
        position for position in range(1, len(keys)) if keys[position] != keys[position - 1]
    )
    before, after = facts[later - 1], facts[later]
    names = [name for name in {**before, **after} if before.get(name, ...) != after.get(name, ...)]
    what = repr(names[0].strip()) if names else "the order of their attributes"
    (holder, _, one), (other_holder, _, other) = (
        path.rpartition(".") for path in paths[later - 1 : later + 1]
    )
    if holder != other_holder:
        return f"{paths[later - 1]} and {paths[later]} differ in {what}"
    return f"layers {one} and {other} of {holder or 'the model'} differ in {what}"


def facts_of(layer: nn.Module, owners: Counter[int]) -> Iterator[Fact]:
    inside = {id(module): name for name, module in layer.named_modules()}
    for name, module in layer.named_modules():
        yield f"{name} class", type(module)
        yield f"{name} training", module.training
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for attribute, tensor in tensors.items():
                yield f"{name}.{attribute}".lstrip("."), (kind, *_tensor_fact(tensor))
                if (
                    tensor is not None and owners[id(tensor)] > 1
                ):  # what something else has too is like no other
                    yield f"{name}.{attribute} (tied)".lstrip("."), id(tensor)
        for attribute, value in vars(module).items():
            if attribute not in INTERNAL:
                yield f"{name}.{attribute}".lstrip("."), _described(value, inside)
        for hooks in HOOKS:
            if vars(module)[hooks]:
                yield (
                    f"{name} {hooks}",
                    tuple(_described(hook, inside) for hook in vars(module)[hooks].values()),
                )


def _tensor_fact(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    return (
        ()
        if tensor is None
        else (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
    )


def _described(value: Any, inside: dict[int, str], depth: int = 0) -> Any:
    """Something hashable that is equal for values that act alike; identity where nothing better is known."""
    if value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
    ):
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
            return (
                "function",
                value.__code__,
                describe(value.__defaults__),
                describe(tuple(contents(value))),
            )
    return type(value), id(value)


def contents(function: types.FunctionType) -> Iterator[Any]:
    """What the variables of its closure hold, but for those without a value."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def beside(model: nn.Module, layers: Iterable[nn.Module | None]) -> Iterator[object]:
    """Modules outside of the layers, and all configurations."""
    inside = {id(module) for layer in layers if layer is not None for module in layer.modules()}
    yield from (module for module in model.modules() if id(module) not in inside)
    yield from configurations(model)


def configurations(model: nn.Module) -> list[Any]:
    """Objects that modules hold as ``config``, and those of the same name within them (``text_config``), each once."""
    found: dict[int, Any] = {}
    waiting = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if name == "config"
    ]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "__dict__") and not isinstance(config, type):
            found[id(config)] = config
            waiting += [value for name, value in vars(config).items() if "config" in name]
    return list(found.values())
