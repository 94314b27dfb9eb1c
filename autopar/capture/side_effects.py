"""Record the Python values that a model's forward reads and changes while Dynamo captures it."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.diagnostics import is_torchs, user_line
from autopar.capture.module_values import ValuePlace, constants_of, place_of, source_name
from autopar.capture.outside_values import is_unchanged, name_outside, outside_values
from autopar.capture.read_values import array_sources, lines_of_draws, variables_read
from autopar.capture.stamps import Check
from autopar.capture.trace import (
    ModuleAttribute,
    OutsideValue,
)

UNKNOWN = object()  # a value that is neither a constant nor made of tensors
_HOOK = "_hooks[list("  # in the Dynamo source name of a hook
_LOCAL = re.compile(r"L\['(\w+)'\]")
_LOCAL_SOURCES = frozenset(
    ("TempLocalSource", "LocalCellSource", "Source")
)  # values that forward creates have no location
_SETATTR = (os.path.join("torch", "nn", "modules", "module.py"), "__setattr__")


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
    defaults = _defaults_of_forward(scope)
    checks = [Check.by(guard, defaults(source_name(guard))) for guard in output.guards]
    names = [source_name(guard) for guard in output.guards]
    code = tuple(output.tracing_context.traced_code or ())
    args = {
        node.name: node.meta["grapharg"].source
        for node in output.graph.nodes
        if node.meta.get("grapharg") is not None
    }
    held = {name: source_name(source) for name, source in args.items()}
    arrays = array_sources(held.values())
    asked = {
        f"{source_name(guard)}.{guard.create_fn.keywords['attr']}"
        for guard in output.guards
        if _checks_attribute(guard)
    }
    reader = _WriteReader(scope, output.global_scope, {*names, *asked})
    writes = [w for var in effects._get_modified_vars() for w in reader.writes(var, effects)]
    tensors = frozenset(map(defaults, (*held.values(), *arrays)))
    checks = list(dict.fromkeys((*checks, *(Check(defaults(name)) for name in arrays))))
    around = outside_values(checks, tensors, scope, output.global_scope)
    return Notes(
        tuple(writes),
        tuple(constants_of(checks, scope, tensors)),
        (*around, *variables_read(code)),
        output.graph,
        held,
        code,
        lines_of_draws(output, args),
    )


def _defaults_of_forward(scope: dict[str, Any]) -> Callable[[str], str]:
    """Return a function that replaces a local variable at the beginning of a Dynamo source name
    with the default of forward that it contains, if the call omits that argument.

    Args:
        scope: local variables of the outermost frame.
    """
    root = next((name for name, value in scope.items() if isinstance(value, nn.Module)), "")
    forward = getattr(getattr(scope.get(root), "forward", None), "__func__", None)
    if not isinstance(forward, FunctionType):
        return lambda source: source
    given, named = forward.__defaults__ or (), forward.__kwdefaults__ or {}
    end = forward.__code__.co_argcount
    names = forward.__code__.co_varnames[end - len(given) : end]
    values = {
        **{
            name: (f"__defaults__[{i}]", x)
            for i, (name, x) in enumerate(zip(names, given, strict=True))
        },
        **{name: (f"__kwdefaults__[{name!r}]", x) for name, x in named.items()},
    }
    places = {n: at for n, (at, x) in values.items() if n in scope and scope[n] is x}

    def replace(source: str) -> str:
        """Return the source name of a default."""
        start = _LOCAL.match(source)
        if start is None or start[1] not in places:
            return source
        return f"L[{root!r}].forward.{places[start[1]]}{source[start.end() :]}"

    return replace


def _checks_attribute(guard: Any) -> bool:
    """Return whether a guard checks that an attribute exists, as in ``hasattr(self, "cache")``."""
    return (
        "HASATTR" in str(getattr(guard.create_fn, "func", ""))
        and "attr" in guard.create_fn.keywords
    )


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
        source = source_name(var.source)
        if source.endswith(("._buffers", "._parameters")):
            return  # another check handles assigned parameters and buffers
        place = place_of(source, self.scope)
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
