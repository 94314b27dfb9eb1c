"""What forward looked at outside of the model's modules: global variables, those of closures, and what these hold.

Dynamo's names say where: ``G['name']`` or ``G['__import_a_dot_b'].name`` of a module's globals, ``L['name']`` of a free variable of the
model's own forward, ``….__closure__[0].cell_contents`` of another function's. Left out is what belongs to torch and the standard library.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, ModuleType
from typing import Any

import torch

from autopar.capture.refusals import user_line
from autopar.capture.trace import OutsideValue, Stamp

STEP = re.compile(r"\.(\w+)|\[([^\[\]]+)\]")
PLAIN = (int, float, bool, str, type(None))
_CELL = re.compile(r"(.*)\.__closure__\[(\d+)\]\.cell_contents(.*)")
_ROOT = re.compile(r"([LG])\['(\w+)'\]")
_OTHERS = frozenset(("torch", "autopar", "builtins", *sys.stdlib_module_names)) - {"__main__"}


def steps_of(text: str) -> tuple[tuple[str, Any], ...]:
    """``.config.sizes[0]`` as attributes to get and keys to look up.

    Raises:
        ValueError, SyntaxError: where there is more in it.
    """
    steps = list(STEP.finditer(text))
    if "".join(step[0] for step in steps) != text:
        raise ValueError(text)
    return tuple((step[1], None) if step[1] else ("", ast.literal_eval(step[2])) for step in steps)


def follow(found: Any, steps: Iterable[tuple[str, Any]]) -> Any:
    """What the steps lead to. Raises AttributeError, LookupError or TypeError where they do not."""
    for attribute, key in steps:
        found = getattr(found, attribute) if attribute else found[key]
    return found


def value_at(holder: Any, steps: tuple[tuple[str, Any], ...]) -> Any:
    """Of an `OutsideValue` what is there now; raises as `follow`, also where a variable has no value."""
    if isinstance(holder, str):
        holder = vars(sys.modules[holder])
    if isinstance(holder, CellType):
        try:
            holder = holder.cell_contents
        except ValueError as error:  # it is empty
            raise LookupError("no value") from error
    return follow(holder, steps)


def outside_values(
    sources: Iterable[str], tensors: frozenset[str], local: Mapping[str, Any], everywhere: dict[str, Any]
) -> Iterator[OutsideValue]:
    """Those that are plain, or tensors.

    Args:
        sources: Dynamo's names of what it looked at. tensors: those of tensors that the graph reads.
        local, everywhere: the local variables and globals of the frame that it began with.
    """
    for source in sources:
        try:
            found = _found(source, local, everywhere)
            value = None if found is None else value_at(found[1], found[2])
        except (AttributeError, LookupError, TypeError, ValueError, SyntaxError, NameError):
            continue  # a name of another kind
        if found is None or any("__" in attribute for attribute, _ in found[2]):
            continue
        if isinstance(value, torch.Tensor) and source in tensors and type(value) in (torch.Tensor, torch.nn.Parameter):
            yield OutsideValue(*found, Stamp.of(value))
        elif isinstance(value, PLAIN):
            yield OutsideValue(*found, value)


def name_outside(source: str, local: Mapping[str, Any], everywhere: dict[str, Any]) -> str:
    """What people call a place outside of the model by Dynamo's name; ``""`` where it is none."""
    try:
        found = _found(source, local, everywhere)
    except (AttributeError, LookupError, TypeError, ValueError, SyntaxError, NameError):
        return ""
    return "" if found is None else found[0]


def is_as_found(source: str, left: Any, local: Mapping[str, Any], everywhere: dict[str, Any]) -> bool:
    """Whether what forward left at a place outside of the model is the plain value that it found there."""
    try:
        found = _found(source, local, everywhere)
        value = None if found is None else value_at(found[1], found[2])
    except (AttributeError, LookupError, TypeError, ValueError, SyntaxError, NameError):
        return False  # a name of another kind
    return found is not None and isinstance(value, PLAIN) and type(left) is type(value) and left == value


def lines_of_draws(output: Any, args: Mapping[str, Any]) -> tuple[str, ...]:
    """The user's lines where what Python's generator drew is used, ``""`` where that is not known; none where it drew nothing.

    Args:
        output: Dynamo's graph as it is made. args: placeholder → where what goes in comes from.
    """
    if not output.random_calls:
        return ()
    users = [user for node in output.graph.nodes if "RandomValue" in type(args.get(node.name)).__name__ for user in node.users]
    return tuple(user_line(user.meta.get("stack_trace") or "") for user in users) or ("",)


def _found(source: str, local: Mapping[str, Any], everywhere: dict[str, Any]) -> tuple[str, Any, tuple[tuple[str, Any], ...]] | None:
    """What people call it, its holder and the steps from there; None where it is no such value."""
    if cell := _CELL.fullmatch(source):
        known = {"dict": dict, "list": list, "type": type}
        function = eval(cell[1], {"L": local, "G": everywhere, "__builtins__": known})  # an expression of Dynamo's, as its guards are
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


def _of_closure(function: Any, position: int, rest: str) -> tuple[str, Any, tuple[tuple[str, Any], ...]] | None:
    if function.__module__.partition(".")[0] in _OTHERS:
        return None
    name = function.__code__.co_freevars[position]
    return f"variable {name}{rest} around {function.__qualname__}", function.__closure__[position], steps_of(rest)


def _of_globals(everywhere: dict[str, Any], name: str, rest: str) -> tuple[str, Any, tuple[tuple[str, Any], ...]] | None:
    """Of the innermost module that holds it."""
    module, steps, found = everywhere.get("__name__", ""), (("", name), *steps_of(rest)), everywhere[name]
    while isinstance(found, ModuleType) and len(steps) > 1:
        module, steps = found.__name__, (("", steps[1][0]), *steps[2:])
        found = vars(found)[steps[0][1]]
    if module.partition(".")[0] in _OTHERS or isinstance(found, ModuleType):
        return None
    here = vars(sys.modules[module]) if module in sys.modules else {}
    said = "".join(f".{attribute}" if attribute else f"[{key!r}]" for attribute, key in steps[1:])
    holder = module if steps[0][1] in here and here[steps[0][1]] is found else everywhere
    return f"global variable {steps[0][1]}{said} of {module}", holder, steps
