"""Python attributes that forward changes. A compiled program does not change attributes.

A *write* is a change of forward to an attribute, a list, a dict or a set. The write is *read* if
forward also reads the previous value. Dynamo records both.

A write that is not read does not affect results. The program omits it, and `settle_attributes`
returns its name. A write that is read may change the results of the next forward. Therefore forward
is captured again in the state after the first forward. The write is accepted if the second capture
gives the same graph and leaves the same state. Examples are a setting that is chosen once (``if
config.kind is None: config.kind = ...``), a cached tensor that depends on no input (a mask, which
the first graph creates and the second reads), and a list that each forward clears. All other writes
are refused.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import logging
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
from torch import fx

from autopar.capture.side_effects import UNKNOWN, Notes, Write
from autopar.errors import CaptureError, Where

_RANDOM = re.compile(
    r"rand|normal|uniform|bernoulli|dropout|exponential|multinomial|cauchy|geometric|poisson|rrelu"
)
_FILLING = frozenset(
    ("append", "appendleft", "extend", "insert", "add", "update", "clear")
)  # methods that do not read the container
_SHOWN = 5  # most names or lines in a warning
log = logging.getLogger("autopar")


@functools.cache
def tell_of_unkept(names: tuple[str, ...]) -> None:
    """Warn once, on one rank of a job, that forward sets attributes and a program does not."""
    names = tuple(dict.fromkeys(names))
    if names and os.environ.get("RANK", "0") == "0":  # every rank captures
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        shown = ", ".join(name if " " in name else f"self.{name}" for name in names[:_SHOWN])
        log.warning(
            "forward sets %s%s, but a compiled call does not update %s",
            shown,
            more,
            "it" if len(names) == 1 else "them",
        )


def tell_of_raises(lines: Sequence[str]) -> None:
    """Warn, on one rank of a job, that forward raises errors depending on values and a program does
    not."""
    if lines and os.environ.get("RANK", "0") == "0":
        more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        log.warning(
            "forward checks values and may raise an error (%s%s); a compiled call does not",
            ", ".join(lines[:_SHOWN]),
            more,
        )


def tell_of_prints(lines: Sequence[str]) -> None:
    """Warn, on one rank of a job, that forward prints and a program does not."""
    if lines and os.environ.get("RANK", "0") == "0":
        more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        log.warning(
            "forward prints (%s%s); a compiled call does not", ", ".join(lines[:_SHOWN]), more
        )


def tell_of_known(paths: Sequence[str]) -> None:
    """Log, on one rank of a job, the inputs whose values determine shapes or branches."""
    if paths and os.environ.get("RANK", "0") == "0":
        log.info(
            "forward reads the values of %s: the plan is for these values, and other values need"
            " another plan",
            ", ".join(paths),
        )


def settle_attributes(
    first: Notes, again: Callable[[], Notes], like: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[str, ...]:
    """Return the names of attributes that forward writes and a program omits, since no later
    forward depends on them.

    Args:
        first: notes of the capture.
        again: captures the model in its current state.
        like: creates a fake tensor like a given one.

    Raises:
        CaptureError: the results of a later forward may depend on the write.
    """
    # The other writes do not change the value.
    changed = [write for write in first.writes if write.value is UNKNOWN or _changes_value(write)]
    visible = [write for write in changed if _is_visible(write)]
    if not visible:
        return tuple(sorted(write.text for write in changed))
    _check_unknown(visible, first.code)
    applied = [write for write in first.writes if write.value is not UNKNOWN]
    with _state_after(applied, like):
        second = _capture_again(first, again, visible[0])
    cached = {
        node: place
        for write in first.writes
        for node, place in write.nodes.items()
        if _is_constant(node)
    }
    if _graph_text(first, cached) != _graph_text(second, {}):
        raise _refusal(visible[0])
    repeated = {write.place.source for write in second.writes}
    once = {write.place.source for write in applied} - repeated
    return tuple(sorted(write.text for write in first.writes if write.place.source not in once))


def _check_unknown(writes: Iterable[Write], code: Iterable[CodeType]) -> None:
    """Raise CaptureError for a write whose value is unknown and that a later forward may depend
    on."""
    for write in writes:
        if write.value is UNKNOWN and (write.read or _is_read_elsewhere(write, code)):
            raise _refusal(write)


def _capture_again(first: Notes, again: Callable[[], Notes], shown: Write) -> Notes:
    """Capture forward in the state after the first forward, and return the notes.

    Args:
        first: notes of the first capture.
        again: captures the model.
        shown: the write that the error names if the capture fails.

    Raises:
        CaptureError: the capture fails, or forward changes a value again that a later forward may
            depend on.
    """
    try:
        second = again()
    except Exception as error:
        raise _refusal(shown) from error
    changed = {write.place.source: write for write in second.writes if _changes_value(write)}
    for source, write in changed.items():
        if _is_used(write, first.code + second.code):
            raise _refusal(first.write(source) or write)
    return second


def _is_visible(write: Write) -> bool:
    """Return whether forward reads the previous value, or writes to a container, which other code
    may read."""
    return write.read or not write.attribute


def _is_used(write: Write, code: Iterable[CodeType]) -> bool:
    """Return whether a later forward may depend on a write that it repeats."""
    if write.read and (write.nodes or not write.attribute):
        return True
    return _is_visible(write) and _is_read_elsewhere(write, code)


def _changes_value(write: Write) -> bool:
    """Return whether a write changes a constant, stores a new tensor, or changes the number or
    shapes of tensors."""
    return bool(write.attribute and write.nodes) or _comparable(write.value) != _comparable(
        write.place.found
    )


def _comparable(value: Any) -> Any:
    """Return a comparable form of a value, in which tensors of the same shape and dtype are
    equal."""
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return "dict", [(key, _comparable(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return "list", [_comparable(item) for item in value]
    return type(value).__name__, value


@contextlib.contextmanager
def _state_after(
    writes: Sequence[Write], like: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Set the attributes of the model to their values after forward; restore them on exit."""
    with contextlib.ExitStack() as stack:
        for write in writes:
            now = vars(write.holder) if write.attribute else write.holder
            stack.callback(_refill, now, now.copy())
            if write.attribute:
                now[write.attribute] = _with_new_tensors(write.value, like)
            else:
                _refill(now, _with_new_tensors(write.value, like))
        yield


def _refill(held: Any, value: Any) -> None:
    held.clear()
    held.extend(value) if isinstance(held, (list, deque)) else held.update(value)


def _with_new_tensors(value: Any, like: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return torch.utils._pytree.tree_map(
        lambda leaf: like(leaf) if isinstance(leaf, torch.Tensor) else leaf, value
    )


def _is_read_elsewhere(write: Write, code: Iterable[CodeType]) -> bool:
    """Return whether the code reads the attribute other than to update it, as ``self.calls += 1``
    and `append` do."""
    name = re.findall(r"\w+", write.place.name)[-1]
    surplus: Counter[tuple[CodeType, int | None]] = Counter()
    for code_object in set(code):
        steps = list(dis.get_instructions(code_object))
        for step, following in pairwise(steps):
            line = code_object, step.positions.lineno if step.positions else None
            looks = (
                step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST") and step.argval == name
            )
            surplus[line] += looks and (bool(write.attribute) or following.argval not in _FILLING)
            surplus[line] -= step.opname == "STORE_ATTR" and step.argval == name
    return not code or any(more > 0 for more in surplus.values())


def _is_constant(node: fx.Node) -> bool:
    """Return whether a value depends neither on inputs nor on random numbers."""
    return all(
        each.op in ("call_function", "call_method") and not _RANDOM.search(str(each.target))
        for each in _ancestors(node)
    )


def _ancestors(node: fx.Node) -> set[fx.Node]:
    ancestors, pending = set(), [node]
    while pending:
        node_now = pending.pop()
        if node_now not in ancestors:
            ancestors.add(node_now)
            pending += node_now.all_input_nodes
    return ancestors


def _graph_text(notes: Notes, cached: dict[fx.Node, str]) -> list[str]:
    """Return the graph as text, one line per call in order.

    Args:
        notes: the notes with the graph; placeholders are named by their Dynamo source names.
        cached: node → Dynamo source name, for nodes that are treated as placeholders.
    """
    making = {each for node in cached for each in _ancestors(node)}
    spare = set(cached)
    for node in reversed(list(notes.graph.nodes)):
        if node in making and all(user in spare for user in node.users):
            spare.add(node)
    names: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in notes.graph.nodes:
        if node in cached or node.op == "placeholder":
            names[node] = (
                cached[node] if node in cached else notes.sources.get(node.name, node.name)
            )
        elif node not in spare:
            names[node] = f"%{len(lines)}"
            args = fx.map_arg((node.args, node.kwargs), lambda operand: _Unquoted(names[operand]))
            lines.append(f"{node.op} {node.target if node.op != 'get_attr' else ''} {args}")
    return lines


class _Unquoted(str):
    """A text that is printed without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _refusal(write: Write) -> CaptureError:
    name = write.attribute or write.place.name
    number = isinstance(write.value, (int, float)) and not isinstance(write.value, bool)
    buffer = (
        f"make it a buffer: self.register_buffer({name!r}, torch.zeros(())) in __init__, and change"
        f" it in place (self.{name} += 1)"
    )
    state = f"make it a buffer of fixed shape and change it in place (self.{name}.copy_(value))"
    cache = (
        "a cache that is filled once can be filled in __init__, or by calling the model once before"
    )
    return CaptureError(
        f"forward reads and changes the attribute {name!r}, so a later forward may give other"
        " results; a program does not update attributes",
        where=Where(module=write.place.path or "the model itself", source=write.line),
        remedy=f"{buffer if number else state}, or compute it outside the model and pass it as an"
        f" argument; {cache}",
    )
