"""Values of a model's modules that forward reads: plain attributes, and tensors that are neither
parameters nor buffers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.capture.outside_values import STEP, is_internal
from autopar.capture.stamps import UNWATCHED, Check, Trait, renewed
from autopar.capture.trace import (
    Constant,
    KnownBuffer,
    ModuleAttribute,
    OutsideValue,
)

_OF_CLASS = re.compile(
    r"dict\(type\(([^()]*)\)(?:\.__mro__\[\d+\])?\.__dict__\)\['(\w+)'\](?!\.f(?:get|unc)\b)"
)  # but not the function of a property
_FIRST = re.compile(r"[.\[]")
_OF_MODULES = frozenset(vars(nn.Module()))
_OF_TYPE = re.compile(r"type\(([^()]*)\)(?:\.__mro__\[\d+\])?\.((?!__)\w+)")


@dataclass(frozen=True, slots=True)
class ValuePlace:
    """The location of a value that Dynamo read or changed.

    Attributes:
        source: Dynamo source name.
        found: the value; None if it does not belong to the model.
        path: path of the innermost module that contains it.
        name: access path from that module: ``n`` or ``config.kind``.
    """

    source: str
    found: Any
    path: str
    name: str


def source_name(named: Any) -> str:
    """Return the Dynamo source name of a guard or a source."""
    name = named.name if isinstance(named.name, str) else named.name()
    name = re.sub(
        r"\.__dict__\['(\w+)'\]", r".\1", _OF_CLASS.sub(r"\1.\2", name)
    )  # one name per location
    return _OF_TYPE.sub(r"\1.\2", name).replace(".__func__", "")  # a method has its attributes


def constants_of(
    checks: Iterable[Check], scope: dict[str, Any], tensors: frozenset[str]
) -> Iterator[ModuleAttribute]:
    """Yield the values of modules that forward reads, except parameters, buffers and `training`.

    Args:
        checks: what Dynamo's guards check.
        scope: local variables of the outermost frame.
        tensors: Dynamo source names of the tensors that the graph reads.
    """
    for check in checks:
        place = place_of(check.source, scope)
        if (
            place is None
            or place.name == "training"
            or is_internal(place.name)
            or hasattr(nn.Module, place.name)
            or (check.is_trait and _FIRST.split(place.name)[0] in _OF_MODULES)
        ):
            continue
        stamp = check.stamp(place.found, is_tensor=check.source in tensors)
        if stamp is not UNWATCHED and (place.name or isinstance(stamp, Trait)):
            yield ModuleAttribute(place.path, place.name, stamp)


def place_of(source: str, scope: dict[str, Any]) -> ValuePlace | None:
    """Return the location of a Dynamo source name; None if it is not in a module of the model."""
    root = re.match(r"L\['(\w+)'\]", source)
    if root is None or not isinstance(scope.get(root[1]), nn.Module):
        return None
    found, path, name, rest = scope[root[1]], "", "", source[root.end() :]
    steps = list(STEP.finditer(rest))
    if "".join(step[0] for step in steps) != rest:
        return None
    for step in steps:
        attribute, key = step[1], step[2]
        try:
            if attribute and isinstance(getattr(type(found), attribute, None), property):
                return None  # it is computed from other attributes, which are recorded themselves
            found = getattr(found, attribute) if attribute else found[ast.literal_eval(key)]
        except Exception:  # the user's class may raise any error on attribute access
            return None
        name += step[0]
        if isinstance(found, nn.Module):
            path, name = (
                f"{path}.{re.sub(r'_modules|[^A-Za-z0-9_.]', '', name.replace('[', '.'))}",
                "",
            )
            path = re.sub(r"\.+", ".", path)
    return ValuePlace(source, found, path.strip("."), name.lstrip("."))


def path_of(name: str) -> str:
    """Return the access path of a `ModuleAttribute`, which `steps_of` parses."""
    return name if not name or name.startswith("[") else f".{name}"


def of_the_model(attributes: Iterable[Constant], model: nn.Module) -> tuple[Constant, ...]:
    """Return the attributes with their current values in `model`; a capture changes some values
    temporarily, such as numbers of layers."""
    scope = {"model": model}
    found: list[Constant] = []
    for each in attributes:
        if isinstance(each, OutsideValue | KnownBuffer):
            found.append(each)
            continue
        modules = "".join(f"._modules[{name!r}]" for name in each.path.split(".") if name)
        place = place_of(f"L['model']{modules}{path_of(each.name)}", scope)
        found.append(
            each if place is None else replace(each, value=renewed(each.value, place.found))
        )
    return tuple({_where(each): each for each in found}.values())


def _where(each: Constant) -> tuple[Any, str]:
    """Return a key of a value's location; variables of two closures may have the same name."""
    if isinstance(each, KnownBuffer):
        return KnownBuffer, each.name
    trait = (each.value.kind, each.value.of) if isinstance(each.value, Trait) else None
    if isinstance(each, ModuleAttribute):
        return (each.path, trait), each.name
    return (each.holder if isinstance(each.holder, str) else id(each.holder), trait), each.name
