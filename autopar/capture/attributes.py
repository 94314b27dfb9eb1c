"""Python attributes in a capture: those that forward reads as constants, and those that it changes, which no program does.

A *write* is an attribute, a list, a dict or a set that forward leaves otherwise than it found it; it is *read* where forward looks at
what was there before. Dynamo records both. A write that is not read changes nothing: the program lacks it, and `settled` names it. One
that is read may change what the next forward computes. So forward is captured again in the state that it left. It may pass where that is
the same graph in the same state: a setting that is guessed once (``if config.kind is None: config.kind = ...``), a cache of what depends
on nothing (a mask, which the second graph takes where the first makes it), a list that each forward clears. All others are refused.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import logging
import os
import re
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.refusals import is_torchs, user_line
from autopar.capture.trace import ModuleAttribute
from autopar.errors import CaptureError, Where

_STEP = re.compile(r"\.(\w+)|\[([^\[\]]+)\]")
_RANDOM = re.compile(r"rand|normal|uniform|bernoulli|dropout|exponential|multinomial|cauchy|geometric|poisson|rrelu")
_PLAIN = (int, float, bool, str, type(None))
_SETATTR = (os.path.join("torch", "nn", "modules", "module.py"), "__setattr__")
_FILLING = frozenset(("append", "appendleft", "extend", "insert", "add", "update", "clear"))  # methods that look at nothing
_UNKNOWN = object()


_SHOWN = 5
log = logging.getLogger("autopar")


@functools.cache
def tell_of_unkept(names: tuple[str, ...]) -> None:
    """Say once that forward writes attributes of these names and a program does not."""
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        log.warning("forward sets %s%s, which a program leaves as they are: no forward depends on them", ", ".join(names[:_SHOWN]), more)


@dataclass(frozen=True, slots=True)
class Place:
    """Where Dynamo found a value: its own name for it, the object (None where it is not the model's), and the user's words.

    Attributes:
        path: of the innermost module that holds it. name: from that module on, ``n`` or ``config.kind``.
    """

    source: str
    found: Any
    path: str
    name: str


@dataclass(frozen=True, slots=True)
class Write:
    """What forward left at `place`, an attribute of `holder` or (where `attribute` is empty) a container itself.

    Attributes:
        value: a constant, a fake tensor, a container of these, or `_UNKNOWN`. line: the user's.
        nodes: what makes its tensors, each with Dynamo's name for the place where it then is.
        read: whether forward looked at what was there before; of a container, at what it holds.
    """

    place: Place
    holder: Any
    attribute: str
    value: Any
    nodes: dict[fx.Node, str]
    read: bool
    line: str

    @property
    def text(self) -> str:
        """The attribute for people."""
        return f"{self.place.path}.{self.place.name}".lstrip(".")


@dataclass(frozen=True, slots=True)
class Notes:
    """What Dynamo knew at the end of a capture.

    Attributes:
        constants: plain values that forward looked at. code: all that ran.
    """

    writes: tuple[Write, ...]
    constants: tuple[ModuleAttribute, ...]
    graph: fx.Graph
    sources: dict[str, str]  # placeholder → Dynamo's name of what goes in
    code: tuple[CodeType, ...]

    def write(self, source: str) -> Write | None:
        """The write at a place, by Dynamo's name for it."""
        return next((write for write in self.writes if write.place.source == source), None)


def noting(cleanup: Callable[[Any], None], notes: list[Notes]) -> Callable[[Any], None]:
    """Dynamo's `OutputGraph.cleanup`, which also takes notes before it forgets."""

    def note(output: Any) -> None:
        notes.append(_notes(output))
        cleanup(output)

    return note


def _notes(output: Any) -> Notes:
    effects, scope = output.side_effects, output.local_scope
    names = [_name(guard) for guard in output.guards]
    asked = {f"{_name(guard)}.{guard.create_fn.keywords['attr']}" for guard in output.guards if _asks(guard)}
    places = [place for place in (_place(name, scope) for name in dict.fromkeys(names)) if place is not None]
    writes = [write for var in effects._get_modified_vars() for write in _writes(var, effects, scope, {*names, *asked})]
    held = {node.name: node.meta["grapharg"].source for node in output.graph.nodes if node.meta.get("grapharg") is not None}
    return Notes(
        tuple(writes),
        tuple(ModuleAttribute(place.path, place.name, place.found) for place in places if _is_setting(place)),
        output.graph,
        {name: _name(source) for name, source in held.items()},
        tuple(output.tracing_context.traced_code or ()),
    )


def _name(named: Any) -> str:
    name = named.name if isinstance(named.name, str) else named.name()
    return re.sub(r"\.__dict__\['(\w+)'\]", r".\1", name)  # one name for one place


def _asks(guard: Any) -> bool:
    """Whether it is about there being an attribute: ``hasattr(self, "cache")``."""
    return "HASATTR" in str(getattr(guard.create_fn, "func", "")) and "attr" in guard.create_fn.keywords


def _is_setting(place: Place) -> bool:
    return isinstance(place.found, _PLAIN) and bool(place.name) and place.name != "training" and "__" not in place.name


def _place(source: str, scope: dict[str, Any]) -> Place | None:
    """Follow Dynamo's name for a value from the local variable where it begins; None where it is none of a module's."""
    root = re.match(r"L\['(\w+)'\]", source)
    if root is None or not isinstance(scope.get(root[1]), nn.Module):
        return None
    found, path, name, rest = scope[root[1]], "", "", source[root.end() :]
    steps = list(_STEP.finditer(rest))
    if "".join(step[0] for step in steps) != rest:
        return None
    for step in steps:
        attribute, key = step[1], step[2]
        try:
            found = getattr(found, attribute) if attribute else found[ast.literal_eval(key)]
        except (AttributeError, LookupError, TypeError, ValueError, SyntaxError):
            return None
        name += step[0]
        if isinstance(found, nn.Module):
            path, name = f"{path}.{re.sub(r'_modules|[^A-Za-z0-9_.]', '', name.replace('[', '.'))}", ""
            path = re.sub(r"\.+", ".", path)
    return Place(source, found, path.strip("."), name.lstrip("."))


def of_the_model(attributes: Iterable[ModuleAttribute], model: nn.Module) -> tuple[ModuleAttribute, ...]:
    """The attributes with the values that they have in `model`: a capture changes some for a while; layers count themselves."""
    scope = {"model": model}
    found = []
    for each in attributes:
        modules = "".join(f"._modules[{name!r}]" for name in each.path.split(".") if name)
        name = each.name if each.name.startswith("[") else f".{each.name}"
        place = _place(f"L['model']{modules}{name}", scope)
        found.append(each if place is None or not isinstance(place.found, _PLAIN) else replace(each, value=place.found))
    return tuple(dict.fromkeys(found))


def _writes(var: Any, effects: Any, scope: dict[str, Any], seen: set[str]) -> Iterator[Write]:
    stacks = getattr(effects, "mutation_user_stacks", {}).get(var, [])
    attributes = effects.store_attr_mutations.get(var)
    if any(_by_torch(stack) for stack in stacks):
        return  # torch's own caches
    if type(var).__name__ == "NewGlobalVariable":
        yield from (_elsewhere(f"G[{name!r}]", name, stacks) for name in attributes or () if _reads(f"G[{name!r}]", seen))
        return
    if getattr(var, "source", None) is None or type(var.source).__name__ == "TempLocalSource":
        return
    source = _name(var.source)
    place = _place(source, scope)
    if source.endswith(("._buffers", "._parameters")):
        return  # `rebinding` is about these
    for name, value in (attributes or {}).items():
        inner = f"{source}.{name}"
        if place is not None:
            at = Place(inner, getattr(place.found, name, None), place.path, f"{place.name}.{name}".lstrip("."))
            yield Write(at, place.found, name, _value(value), _nodes(value, inner), _reads(inner, seen), _line(stacks, name))
        elif _reads(inner, seen):
            yield _elsewhere(inner, name, stacks)
    if attributes is None and place is not None:
        yield Write(place, place.found, "", _value(var), _nodes(var, source), _reads(source, seen, within=True), _line(stacks, ""))


def _elsewhere(source: str, name: str, stacks: Iterable[Any]) -> Write:
    """A write to what no module holds: a global variable, an attribute of a class."""
    return Write(Place(source, None, "", name), None, name, _UNKNOWN, {}, True, _line(stacks, name))


def _reads(source: str, seen: set[str], *, within: bool = False) -> bool:
    return (not within and source in seen) or any(other.startswith((f"{source}.", f"{source}[")) for other in seen)


def _by_torch(stack: Sequence[Any]) -> bool:
    frames = [frame for frame in stack if not (frame.filename.endswith(_SETATTR[0]) and frame.name == _SETATTR[1])]
    return bool(frames) and is_torchs(frames[-1].filename)


def _line(stacks: Iterable[Any], name: str) -> str:
    """The user's line of the last of several writes; of one attribute of several, the line that names it."""
    lines = [line for line in (user_line("".join(traceback.format_list(list(stack)))) for stack in stacks) if line]
    return next((line for line in reversed(lines) if name and name in line), lines[-1] if lines else "")


def _realized(var: Any) -> Any:
    return var.realize() if type(var).__name__.startswith("Lazy") and var.is_realized() else var


def _value(var: Any) -> Any:
    """What a tracker of Dynamo's stands for."""
    var = _realized(var)
    if type(var).__name__.startswith("Lazy"):
        return var.original_value()
    if (node := _node(var)) is not None:
        return node.meta["example_value"]
    with contextlib.suppress(Exception):  # no constant: torch says so in one way or another
        return var.as_python_constant()
    items = _items(var)
    values = None if items is None else [_value(item) for _, item in items]
    if items is None or values is None or _UNKNOWN in map(_unless_tensor, values):
        return _UNKNOWN
    return dict(zip((key for key, _ in items), values, strict=True)) if "Dict" in type(var).__name__ else values


def _items(var: Any) -> list[tuple[Any, Any]] | None:
    """The trackers in that of a container, by key or position."""
    kind = type(var).__name__
    if kind in ("ListVariable", "DequeVariable"):
        return list(enumerate(var.items))
    if kind in ("ConstDictVariable", "DictVariable"):
        with contextlib.suppress(Exception):  # keys that are no constants
            return [(key.vt.as_python_constant(), item) for key, item in var.items.items()]
    return None


def _nodes(var: Any, source: str) -> dict[fx.Node, str]:
    """The nodes of the tensors in a tracker, and the names that Dynamo will have for their places."""
    var = _realized(var)
    if (node := _node(var)) is not None:
        return {node: source}
    return {node: f"{source}[{key!r}]" for key, item in _items(var) or () if (node := _node(_realized(item))) is not None}


def _unless_tensor(value: Any) -> Any:
    return None if isinstance(value, torch.Tensor) else value


def _node(var: Any) -> fx.Node | None:
    node = getattr(getattr(var, "proxy", None), "node", None)
    return node if node is not None and isinstance(node.meta.get("example_value"), torch.Tensor) else None


def settled(first: Notes, again: Callable[[], Notes], like: Callable[[torch.Tensor], torch.Tensor]) -> tuple[str, ...]:
    """The names of what forward writes and a program does not keep, since no forward depends on it.

    Args:
        again: captures the model as it now is. like: a fake tensor as a given one.

    Raises:
        CaptureError: a later forward may compute something else.
    """
    telling = [write for write in first.writes if write.read or not write.attribute]
    if not telling:
        return tuple(sorted(write.text for write in first.writes))
    for write in telling:
        if write.value is _UNKNOWN and (write.read or _is_read_elsewhere(write, first.code)):
            raise _refusal(write)
    applied = [write for write in first.writes if write.value is not _UNKNOWN]
    with _left_behind(applied, like):
        try:
            second = again()
        except Exception as error:  # forward cannot be captured in the state that it leaves
            raise _refusal(telling[0]) from error
        changed = {write.place.source: write for write in second.writes if _goes_on(write)}
    for source, write in changed.items():
        by_value = write.read and (bool(write.nodes) or not write.attribute)
        if by_value or ((write.read or not write.attribute) and _is_read_elsewhere(write, first.code + second.code)):
            raise _refusal(first.write(source) or write)
    cached = {node: place for write in first.writes for node, place in write.nodes.items() if _is_constant(node)}
    if _story(first, cached) != _story(second, {}):
        raise _refusal(telling[0])
    once = {write.place.source for write in applied} - {write.place.source for write in second.writes}
    return tuple(sorted(write.text for write in first.writes if write.place.source not in once))


def _goes_on(write: Write) -> bool:
    """Whether forward leaves it otherwise than the forward before: another constant, another tensor, or not as many of them."""
    return bool(write.attribute and write.nodes) or _outline(write.value) != _outline(write.place.found)


def _outline(value: Any) -> Any:
    """A value with all tensors of a kind alike."""
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return "dict", [(key, _outline(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return "list", [_outline(item) for item in value]
    return type(value).__name__, value


@contextlib.contextmanager
def _left_behind(writes: Sequence[Write], like: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """The model's attributes as forward leaves them; as they were on exit."""
    with contextlib.ExitStack() as stack:
        for write in writes:
            now = vars(write.holder) if write.attribute else write.holder
            stack.callback(_refill, now, now.copy())
            if write.attribute:
                now[write.attribute] = _remade(write.value, like)
            else:
                _refill(now, _remade(write.value, like))
        yield


def _refill(held: Any, value: Any) -> None:
    held.clear()
    held.extend(value) if isinstance(held, (list, deque)) else held.update(value)


def _remade(value: Any, like: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: like(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def _is_read_elsewhere(write: Write, code: Iterable[CodeType]) -> bool:
    """Whether forward looks at what goes on changing for more than its next value, as ``self.calls += 1`` and `append` do not."""
    name = re.findall(r"\w+", write.place.name)[-1]
    surplus: Counter[tuple[CodeType, int | None]] = Counter()
    for each in set(code):
        steps = list(dis.get_instructions(each))
        for step, following in pairwise(steps):
            line = each, step.positions.lineno if step.positions else None
            looks = step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST") and step.argval == name
            surplus[line] += looks and (bool(write.attribute) or following.argval not in _FILLING)
            surplus[line] -= step.opname == "STORE_ATTR" and step.argval == name
    return not code or any(more > 0 for more in surplus.values())


def _is_constant(node: fx.Node) -> bool:
    """Whether a value depends on nothing: neither on what goes in, nor on chance."""
    return all(each.op in ("call_function", "call_method") and not _RANDOM.search(str(each.target)) for each in _ancestors(node))


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, left = set(), [node]
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left += each.all_input_nodes
    return found


def _story(notes: Notes, cached: dict[fx.Node, str]) -> list[str]:
    """The graph as text: calls in order, what goes in by Dynamo's names; `cached` values as if they went in."""
    making = {each for node in cached for each in _ancestors(node)}
    spare = set(cached)
    for node in reversed(list(notes.graph.nodes)):
        if node in making and all(user in spare for user in node.users):
            spare.add(node)
    told: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in notes.graph.nodes:
        if node in cached or node.op == "placeholder":
            told[node] = cached[node] if node in cached else notes.sources.get(node.name, node.name)
        elif node not in spare:
            told[node] = f"%{len(lines)}"
            args = fx.map_arg((node.args, node.kwargs), lambda operand: _Told(told[operand]))
            lines.append(f"{node.op} {node.target if node.op != 'get_attr' else ''} {args}")
    return lines


class _Told(str):
    """A text that is printed without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _refusal(write: Write) -> CaptureError:
    name = write.attribute or write.place.name
    number = isinstance(write.value, (int, float)) and not isinstance(write.value, bool)
    buffer = f"make it a buffer: self.register_buffer({name!r}, torch.zeros(())) in __init__, and change it in place (self.{name} += 1)"
    state = f"make it a buffer of fixed shape and change it in place (self.{name}.copy_(value))"
    cache = "a cache that stays as it is once it is filled can be made in __init__, or by calling the model once before"
    return CaptureError(
        f"forward reads the attribute {name!r} and changes it: a later forward may compute something else, which no program does",
        where=Where(module=write.place.path or "the model itself", source=write.line),
        remedy=f"{buffer if number else state}, or compute it outside and pass it in; {cache}",
    )
