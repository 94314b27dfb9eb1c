"""Values outside the model's modules that forward reads: global and closure variables, and their
attributes and items.

Dynamo's source names identify the location: ``G['name']`` or ``G['__import_a_dot_b'].name`` for
globals of a Python module, ``L['name']`` for a free variable of the model's own forward, and
``….__closure__[0].cell_contents`` for one of another function. Values of torch, except the settings
of its backends, and of the standard library are skipped.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, ModuleType
from typing import Any

from autopar.capture.stamps import UNWATCHED, Check, FunctionStamp, Trait
from autopar.capture.trace import OutsideValue
from autopar.core.same_values import is_plain, is_same

Steps = tuple[tuple[str, Any], ...]
STEP = re.compile(r"\.(\w+)|\[([^\[\]]+)\]")
_INTERNAL = re.compile(r"(?<!\w)__(?!(?:kw)?defaults__|wrapped__)")
_CELL = re.compile(r"(.*)\.__closure__\[(\d+)\]\.cell_contents(.*)")
_BUILTINS = "__builtins_dict__"  # a global variable that Dynamo adds
_ROOT = re.compile(r"([LG])\['(\w+)'\]")
_IGNORED = frozenset(("torch", "autopar", "builtins", *sys.stdlib_module_names)) - {"__main__"}
_SETTINGS = "torch.backends"  # Python modules of torch whose variables users set


def steps_of(text: str) -> tuple[tuple[str, Any], ...]:
    """Parse an access path such as ``.config.sizes[0]`` into (attribute, key) pairs; the attribute
    of a key is ``""``.

    Raises:
        ValueError, SyntaxError: the text contains anything but attributes and keys.
    """
    steps = list(STEP.finditer(text))
    if "".join(step[0] for step in steps) != text:
        raise ValueError(text)
    return tuple((step[1], None) if step[1] else ("", ast.literal_eval(step[2])) for step in steps)


def follow(found: Any, steps: Iterable[tuple[str, Any]]) -> Any:
    """Apply the steps to an object and return the value that they reach; raise AttributeError,
    LookupError or TypeError if a step does not exist."""
    for attribute, key in steps:
        found = getattr(found, attribute) if attribute else found[key]
    return found


def value_at(holder: Any, steps: tuple[tuple[str, Any], ...]) -> Any:
    """Return the current value of an `OutsideValue`; raise as `follow`, and LookupError if a
    variable has no value."""
    if isinstance(holder, str):
        return follow(_variable(sys.modules[holder], steps[0][1]), steps[1:])
    if isinstance(holder, CellType):
        try:
            holder = holder.cell_contents
        except ValueError as error:  # the cell is empty
            raise LookupError("no value") from error
    return follow(holder, steps)


def _variable(module: ModuleType, name: str) -> Any:
    """Return a variable of a Python module. The settings of ``torch.backends`` are properties of
    the class of their module; raise AttributeError if there is no such variable."""
    variables = vars(module)
    return variables[name] if name in variables else getattr(module, name)


def is_internal(path: str) -> bool:
    """Return whether an access path contains an attribute such as ``__dict__``, except those of the
    defaults of functions."""
    return _INTERNAL.search(path) is not None


def outside_values(
    checks: Iterable[Check],
    tensors: frozenset[str],
    local: Mapping[str, Any],
    everywhere: dict[str, Any],
) -> Iterator[OutsideValue]:
    """Yield what forward reads outside the model.

    Args:
        checks: what Dynamo's guards check.
        tensors: Dynamo source names of the tensors that the graph reads.
        local: local variables of the outermost frame that Dynamo traced.
        everywhere: global variables of that frame.
    """
    for check in checks:
        try:
            found = _locate_value(check.source, local, everywhere)
            value = None if found is None else value_at(found[1], found[2])
        except (AttributeError, LookupError, TypeError, ValueError, SyntaxError, NameError):
            continue  # not the source name of a value outside the model
        if found is None or any(is_internal(attribute) for attribute, _ in found[2]):
            continue
        stamp = check.stamp(value, is_tensor=check.source in tensors)
        if stamp is not UNWATCHED and not (_is_of_library(found[1]) and _is_of_code(found, stamp)):
            yield OutsideValue(*found, stamp)


def _is_of_code(found: tuple[str, Any, Steps], stamp: Any) -> bool:
    """Return whether a value is a function, a default of one, or a trait of a container."""
    is_default = any("defaults__" in attribute for attribute, _ in found[2])
    return is_default or isinstance(stamp, FunctionStamp | Trait)


def _is_of_library(holder: Any) -> bool:
    """Return whether a holder is the name of a module of an installed library, or a closure
    variable with a function of one. Users rarely replace these functions; to check all of them
    would take a large part of a small step."""
    if isinstance(holder, CellType):
        holder = getattr(value_at(holder, ()), "__module__", None)
    file = getattr(sys.modules.get(holder), "__file__", None) if isinstance(holder, str) else None
    return f"{os.sep}site-packages{os.sep}" in (file or "")


def name_outside(source: str, local: Mapping[str, Any], everywhere: dict[str, Any]) -> str:
    """Return the name that messages use for a location outside the model, ``""`` for others.

    Args:
        source: Dynamo source name.
        local: local variables of the outermost frame that Dynamo traced.
        everywhere: global variables of that frame.
    """
    try:
        found = _locate_value(source, local, everywhere)
    except (AttributeError, LookupError, TypeError, ValueError, SyntaxError, NameError):
        return ""
    return "" if found is None else found[0]


def is_unchanged(
    source: str, left: Any, local: Mapping[str, Any], everywhere: dict[str, Any]
) -> bool:
    """Return whether a plain value outside the model is the same before and after forward.

    Args:
        source: Dynamo source name of the location.
        left: the value after forward.
        local: local variables of the outermost frame that Dynamo traced.
        everywhere: global variables of that frame.
    """
    try:
        found = _locate_value(source, local, everywhere)
        value = None if found is None else value_at(found[1], found[2])
    except (AttributeError, LookupError, TypeError, ValueError, SyntaxError, NameError):
        return False  # not the source name of a value outside the model
    return found is not None and is_plain(value) and is_same(left, value)


def _locate_value(
    source: str, local: Mapping[str, Any], everywhere: dict[str, Any]
) -> tuple[str, Any, Steps] | None:
    """Return the name for messages of a value outside the model, its holder and the steps from the
    holder; None if the value is not outside the model."""
    if cell := _CELL.fullmatch(source):
        known = {"dict": dict, "list": list, "type": type}
        function = eval(
            cell[1], {"L": local, "G": everywhere, "__builtins__": known}
        )  # Dynamo evaluates its guards in the same way
        return _of_closure(function, int(cell[2]), cell[3])
    root = _ROOT.match(source)
    if root is None:
        return None
    rest = source[root.end() :]
    if root[1] == "G":
        return _of_globals(everywhere, root[2], rest)
    forward = getattr(local.get("self"), "forward", None)
    free = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    return _of_closure(forward, free.index(root[2]), rest) if root[2] in free else None


def _of_closure(function: Any, position: int, rest: str) -> tuple[str, Any, Steps] | None:
    if function.__module__.partition(".")[0] in _IGNORED:
        return None
    name = function.__code__.co_freevars[position]
    return (
        f"variable {name}{rest} around {function.__qualname__}",
        function.__closure__[position],
        steps_of(rest),
    )


def _of_globals(everywhere: dict[str, Any], name: str, rest: str) -> tuple[str, Any, Steps] | None:
    """Locate a global variable in the innermost Python module that contains it."""
    if name.startswith(_BUILTINS):
        return None
    module, steps, found = (
        everywhere.get("__name__", ""),
        (("", name), *steps_of(rest)),
        everywhere[name],
    )
    while isinstance(found, ModuleType) and len(steps) > 1:
        module, steps = found.__name__, (("", steps[1][0]), *steps[2:])
        found = _variable(found, steps[0][1])
    is_ignored = module.partition(".")[0] in _IGNORED and not module.startswith(_SETTINGS)
    if is_ignored or isinstance(found, ModuleType):
        return None
    here = sys.modules.get(module)
    suffix = "".join(f".{attribute}" if attribute else f"[{key!r}]" for attribute, key in steps[1:])
    is_there = here is not None and getattr(here, steps[0][1], None) is found
    holder = module if is_there else everywhere
    return f"global variable {steps[0][1]}{suffix} of {module}", holder, steps
