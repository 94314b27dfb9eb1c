"""Record the Python values that a model's forward reads and changes while Dynamo captures it."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CellType, CodeType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from autopar.capture.diagnostics import is_torchs, user_line
from autopar.capture.read_values import array_sources, lines_of_draws, variables_read
from autopar.capture.trace import (
    ArrayStamp,
    Constant,
    KnownBuffer,
    ModuleAttribute,
    OutsideValue,
    Stamp,
)
from autopar.core.same_values import is_same

# --------------------------------------------------------------------------------------------------
# Values outside the model's modules that forward reads: global and closure variables, and their
# attributes and items.
#
# Dynamo's source names identify the location: ``G['name']`` or ``G['__import_a_dot_b'].name`` for
# globals of a Python module, ``L['name']`` for a free variable of the model's own forward, and
# ``….__closure__[0].cell_contents`` for one of another function. Values of torch and the standard
# library are skipped.

STEP = re.compile(r"\.(\w+)|\[([^\[\]]+)\]")
PLAIN = (int, float, bool, str, type(None))
_CELL = re.compile(r"(.*)\.__closure__\[(\d+)\]\.cell_contents(.*)")
_ROOT = re.compile(r"([LG])\['(\w+)'\]")
_IGNORED = frozenset(("torch", "autopar", "builtins", *sys.stdlib_module_names)) - {"__main__"}


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
        holder = vars(sys.modules[holder])
    if isinstance(holder, CellType):
        try:
            holder = holder.cell_contents
        except ValueError as error:  # the cell is empty
            raise LookupError("no value") from error
    return follow(holder, steps)


def outside_values(
    sources: Iterable[str],
    tensors: frozenset[str],
    local: Mapping[str, Any],
    everywhere: dict[str, Any],
) -> Iterator[OutsideValue]:
    """Yield the plain values and tensors outside the model that forward reads.

    Args:
        sources: Dynamo source names of the values that forward reads.
        tensors: those of the tensors that the graph reads.
        local: local variables of the outermost frame that Dynamo traced.
        everywhere: global variables of that frame.
    """
    for source in sources:
        try:
            found = _locate_value(source, local, everywhere)
            value = None if found is None else value_at(found[1], found[2])
        except (AttributeError, LookupError, TypeError, ValueError, SyntaxError, NameError):
            continue  # not the source name of a value outside the model
        if found is None or any("__" in attribute for attribute, _ in found[2]):
            continue
        if (
            isinstance(value, torch.Tensor)
            and source in tensors
            and type(value) in (torch.Tensor, torch.nn.Parameter)
        ):
            yield OutsideValue(*found, Stamp.of(value))
        elif isinstance(value, np.ndarray) and source in tensors:
            yield OutsideValue(*found, ArrayStamp.of(value))
        elif isinstance(value, PLAIN):
            yield OutsideValue(*found, value)


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
    return found is not None and isinstance(value, PLAIN) and is_same(left, value)


def _locate_value(
    source: str, local: Mapping[str, Any], everywhere: dict[str, Any]
) -> tuple[str, Any, tuple[tuple[str, Any], ...]] | None:
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


def _of_closure(
    function: Any, position: int, rest: str
) -> tuple[str, Any, tuple[tuple[str, Any], ...]] | None:
    if function.__module__.partition(".")[0] in _IGNORED:
        return None
    name = function.__code__.co_freevars[position]
    return (
        f"variable {name}{rest} around {function.__qualname__}",
        function.__closure__[position],
        steps_of(rest),
    )


def _of_globals(
    everywhere: dict[str, Any], name: str, rest: str
) -> tuple[str, Any, tuple[tuple[str, Any], ...]] | None:
    """Locate a global variable in the innermost Python module that contains it."""
    module, steps, found = (
        everywhere.get("__name__", ""),
        (("", name), *steps_of(rest)),
        everywhere[name],
    )
    while isinstance(found, ModuleType) and len(steps) > 1:
        module, steps = found.__name__, (("", steps[1][0]), *steps[2:])
        found = vars(found)[steps[0][1]]
    if module.partition(".")[0] in _IGNORED or isinstance(found, ModuleType):
        return None
    here = vars(sys.modules[module]) if module in sys.modules else {}
    suffix = "".join(f".{attribute}" if attribute else f"[{key!r}]" for attribute, key in steps[1:])
    holder = module if steps[0][1] in here and here[steps[0][1]] is found else everywhere
    return f"global variable {steps[0][1]}{suffix} of {module}", holder, steps


UNKNOWN = object()  # a value that is neither a constant nor made of tensors
_HOOK = "_hooks[list("  # in the Dynamo source name of a hook
_OF_CLASS = re.compile(r"dict\(type\(([^()]*)\)(?:\.__mro__\[\d+\])?\.__dict__\)\['(\w+)'\]")
_OF_TYPE = re.compile(r"type\(([^()]*)\)(?:\.__mro__\[\d+\])?\.((?!__)\w+)")
_LOCAL_SOURCES = frozenset(
    ("TempLocalSource", "LocalCellSource", "Source")
)  # values that forward creates have no location
_SETATTR = (os.path.join("torch", "nn", "modules", "module.py"), "__setattr__")


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


@dataclass(frozen=True, slots=True)
class Write:
    """A write of forward to an attribute or a container.

    Attributes:
        place: its location.
        holder: the object whose attribute is written, or the container.
        attribute: name of the attribute; ``""`` for a container.
        value: value after forward: a constant, a fake tensor, a container of these, or `UNKNOWN`.
        nodes: nodes that compute its tensors → Dynamo source names of their new locations.
        read: whether forward reads the previous value, or the previous contents of a container.
        line: source line of the write.
    """

    place: ValuePlace
    holder: Any
    attribute: str
    value: Any
    nodes: dict[fx.Node, str]
    read: bool
    line: str

    @property
    def text(self) -> str:
        """Path of the attribute in messages."""
        return f"{self.place.path}.{self.place.name}".lstrip(".")


@dataclass(frozen=True, slots=True)
class Notes:
    """What Dynamo recorded during a capture.

    Attributes:
        writes: attributes and containers that forward changes.
        constants: values of modules that forward reads.
        outside: values outside the model that forward reads.
        sources: placeholder name → Dynamo source name of its value.
        code: the code objects that were traced.
        draws: the source lines that use numbers of Python's random generator (`lines_of_draws`).
    """

    writes: tuple[Write, ...]
    constants: tuple[ModuleAttribute, ...]
    outside: tuple[OutsideValue, ...]
    graph: fx.Graph
    sources: dict[str, str]
    code: tuple[CodeType, ...]
    draws: tuple[str, ...]

    def write(self, source: str) -> Write | None:
        """Return the write to the location with a Dynamo source name; None if there is none."""
        return next((write for write in self.writes if write.place.source == source), None)


def note_before(cleanup: Callable[[Any], None], notes: list[Notes]) -> Callable[[Any], None]:
    """Wrap Dynamo's `OutputGraph.cleanup` so that it appends to `notes` first."""

    def note(output: Any) -> None:
        """Record the notes, then run Dynamo's cleanup."""
        notes.append(_notes(output))
        cleanup(output)

    return note


def _notes(output: Any) -> Notes:
    effects, scope = output.side_effects, output.local_scope
    names = [_name(guard) for guard in output.guards]
    code = tuple(output.tracing_context.traced_code or ())
    args = {
        node.name: node.meta["grapharg"].source
        for node in output.graph.nodes
        if node.meta.get("grapharg") is not None
    }
    held = {name: _name(source) for name, source in args.items()}
    arrays = array_sources(held.values())
    asked = {
        f"{_name(guard)}.{guard.create_fn.keywords['attr']}"
        for guard in output.guards
        if _checks_attribute(guard)
    }
    places = [
        place
        for place in (_place(name, scope) for name in dict.fromkeys((*names, *arrays)))
        if place is not None
    ]
    reader = _WriteReader(scope, output.global_scope, {*names, *asked})
    writes = [w for var in effects._get_modified_vars() for w in reader.writes(var, effects)]
    tensors = frozenset((*held.values(), *arrays))
    around = outside_values(dict.fromkeys((*names, *arrays)), tensors, scope, output.global_scope)
    return Notes(
        tuple(writes),
        tuple(_constants(places, tensors)),
        (*around, *variables_read(code)),
        output.graph,
        held,
        code,
        lines_of_draws(output, args),
    )


def _name(named: Any) -> str:
    name = named.name if isinstance(named.name, str) else named.name()
    name = re.sub(
        r"\.__dict__\['(\w+)'\]", r".\1", _OF_CLASS.sub(r"\1.\2", name)
    )  # one name per location
    return _OF_TYPE.sub(r"\1.\2", name)


def _checks_attribute(guard: Any) -> bool:
    """Return whether a guard checks that an attribute exists, as in ``hasattr(self, "cache")``."""
    return (
        "HASATTR" in str(getattr(guard.create_fn, "func", ""))
        and "attr" in guard.create_fn.keywords
    )


def _constants(places: Iterable[ValuePlace], tensors: frozenset[str]) -> Iterator[ModuleAttribute]:
    """Yield the plain values and tensors of modules that the graph reads, except parameters,
    buffers and `training`."""
    for place in places:
        if (
            not place.name
            or place.name == "training"
            or "__" in place.name
            or hasattr(nn.Module, place.name)
        ):
            continue
        if isinstance(place.found, PLAIN):
            yield ModuleAttribute(place.path, place.name, place.found)
        elif place.source in tensors and type(place.found) in (torch.Tensor, nn.Parameter):
            yield ModuleAttribute(place.path, place.name, Stamp.of(place.found))
        elif place.source in tensors and isinstance(place.found, np.ndarray):
            yield ModuleAttribute(place.path, place.name, ArrayStamp.of(place.found))


def _place(source: str, scope: dict[str, Any]) -> ValuePlace | None:
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
        name = each.name if each.name.startswith("[") else f".{each.name}"
        place = _place(f"L['model']{modules}{name}", scope)
        value = None if place is None else place.found
        if place is None or not isinstance(value, (*PLAIN, torch.Tensor)):
            found.append(each)
        else:
            stamp = Stamp.of(value) if isinstance(value, torch.Tensor) else value
            found.append(replace(each, value=stamp))
    return tuple({_where(each): each for each in found}.values())


def _where(each: Constant) -> tuple[Any, str]:
    """Return a key of a value's location; variables of two closures may have the same name."""
    if isinstance(each, ModuleAttribute):
        return each.path, each.name
    if isinstance(each, KnownBuffer):
        return KnownBuffer, each.name
    return each.holder if isinstance(each.holder, str) else id(each.holder), each.name


@dataclass(frozen=True, slots=True)
class _WriteReader:
    """Finds the writes of one capture in Dynamo's side effects.

    `scope` and `everywhere` are the local and global variables of the outermost frame, `seen` the
    Dynamo source names of the values that forward reads.
    """

    scope: dict[str, Any]
    everywhere: dict[str, Any]
    seen: set[str]

    def writes(self, var: Any, effects: Any) -> Iterator[Write]:
        """Yield the writes to the value that a Dynamo variable represents."""
        stacks = getattr(effects, "mutation_user_stacks", {}).get(var, [])
        if any(_is_torch_write(stack) for stack in stacks):
            return  # a cache of torch
        attributes = effects.store_attr_mutations.get(var)
        if type(var).__name__ == "NewGlobalVariable":
            for name, value in (attributes or {}).items():
                yield from self._outside(f"G[{name!r}]", name, value, stacks)
            return
        if getattr(var, "source", None) is None or type(var.source).__name__ in _LOCAL_SOURCES:
            return
        source = _name(var.source)
        if source.endswith(("._buffers", "._parameters")):
            return  # another check handles assigned parameters and buffers
        place = _place(source, self.scope)
        if attributes is None:
            yield from self._contents(var, source, place, stacks)
        for name, value in (attributes or {}).items():
            if place is not None:
                yield self._attribute(place, name, value, stacks)
            else:
                yield from self._outside(f"{source}.{name}", name, value, stacks)

    def _attribute(self, place: ValuePlace, name: str, value: Any, stacks: Any) -> Write:
        """Return the write to attribute `name` of the value at `place`."""
        held, inner = place.found, f"{place.source}.{name}"
        path = f"{place.name}.{name}".lstrip(".")
        at = ValuePlace(inner, getattr(held, name, None), place.path, path)
        left = _value(value) if hasattr(held, "__dict__") else UNKNOWN
        read = _reads(inner, self.seen)
        return Write(at, held, name, left, _nodes(value, inner), read, _line(stacks, name))

    def _outside(self, source: str, name: str, value: Any, stacks: Any) -> Iterator[Write]:
        """Yield the write to a value outside the modules, if forward reads it or a hook has it."""
        if _reads(source, self.seen):
            if not is_unchanged(source, _value(value), self.scope, self.everywhere):
                yield _outside_write(source, name, stacks)
        elif _HOOK in source:
            yield _outside_write(source, _of_hook(source), stacks, read=False)

    def _contents(
        self, var: Any, source: str, place: ValuePlace | None, stacks: Any
    ) -> Iterator[Write]:
        """Yield the write to the items of a container."""
        if place is not None:
            left = _value(var) if isinstance(place.found, (list, dict, set, deque)) else UNKNOWN
            read = _reads(source, self.seen, within=True)
            line = _line(stacks, "")
            yield Write(place, place.found, "", left, _nodes(var, source), read, line)
        elif outside := name_outside(source, self.scope, self.everywhere):
            yield _outside_write(source, outside, stacks, read=False)
        elif _HOOK in source:  # mostly activations that a hook stores
            yield _outside_write(source, _of_hook(source), stacks, read=False)


def _of_hook(source: str) -> str:
    """Return the name that messages use for a value of a hook."""
    path = ".".join(re.findall(r"_modules\['([^']+)'\]", source.partition(_HOOK)[0]))
    return f"{source.rpartition('.')[2]} of a hook on {path or 'the model'}"


def _outside_write(source: str, name: str, stacks: Iterable[Any], *, read: bool = True) -> Write:
    """Return a write to a location outside the model's modules, such as a global variable or an
    attribute of a class."""
    return Write(
        ValuePlace(source, None, "", name), None, name, UNKNOWN, {}, read, _line(stacks, name)
    )


def _reads(source: str, seen: set[str], *, within: bool = False) -> bool:
    return (not within and source in seen) or any(
        other.startswith((f"{source}.", f"{source}[")) for other in seen
    )


def _is_torch_write(stack: Sequence[Any]) -> bool:
    frames = [
        frame
        for frame in stack
        if not (frame.filename.endswith(_SETATTR[0]) and frame.name == _SETATTR[1])
    ]
    return bool(frames) and is_torchs(frames[-1].filename)


def _line(stacks: Iterable[Any], name: str) -> str:
    """Return the line of the last write whose line contains `name`, else of the last write."""
    lines = [
        line
        for line in (user_line("".join(traceback.format_list(list(stack)))) for stack in stacks)
        if line
    ]
    return next(
        (line for line in reversed(lines) if name and name in line), lines[-1] if lines else ""
    )


def _realize_variable(var: Any) -> Any:
    return var.realize() if type(var).__name__.startswith("Lazy") and var.is_realized() else var


def _value(var: Any) -> Any:
    """Return the value that a Dynamo variable represents, or `UNKNOWN`."""
    var = _realize_variable(var)
    if type(var).__name__.startswith("Lazy"):
        return var.original_value()
    if (node := _node(var)) is not None:
        return node.meta["example_value"]
    with contextlib.suppress(Exception):  # torch raises different errors for non-constants
        return var.as_python_constant()
    items = _items(var)
    values = None if items is None else [_value(item) for _, item in items]
    if items is None or values is None or UNKNOWN in map(_unless_tensor, values):
        return UNKNOWN
    return (
        dict(zip((key for key, _ in items), values, strict=True))
        if "Dict" in type(var).__name__
        else values
    )


def _items(var: Any) -> list[tuple[Any, Any]] | None:
    """Return the (key or index, variable) pairs of a container variable; None for others."""
    kind = type(var).__name__
    if kind in ("ListVariable", "DequeVariable"):
        return list(enumerate(var.items))
    if kind in ("ConstDictVariable", "DictVariable"):
        with contextlib.suppress(Exception):  # a key is not a constant
            return [(key.vt.as_python_constant(), item) for key, item in var.items.items()]
    return None


def _nodes(var: Any, source: str) -> dict[fx.Node, str]:
    """Return the nodes of the tensors in a variable → Dynamo source names of their locations once
    the variable is stored at `source`."""
    var = _realize_variable(var)
    if (node := _node(var)) is not None:
        return {node: source}
    return {
        node: f"{source}[{key!r}]"
        for key, item in _items(var) or ()
        if (node := _node(_realize_variable(item))) is not None
    }


def _unless_tensor(value: Any) -> Any:
    return None if isinstance(value, torch.Tensor) else value


def _node(var: Any) -> fx.Node | None:
    node = getattr(getattr(var, "proxy", None), "node", None)
    return (
        node
        if node is not None and isinstance(node.meta.get("example_value"), torch.Tensor)
        else None
    )
