"""Runs of equal layers in groups, each of which decides for itself.

Equal layers take one decision as long as that is good enough. Where the best would be a mixture (say, memory for two thirds of the layers
to keep something), a list of layers is cut: what stands in the layers before a cut is one class, what stands behind it another.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from autopar.capture.trace import Trace
from autopar.strategies.clusters import pattern_of

Starts = Mapping[str, tuple[int, ...]]
"""Path of a list of layers → the layers at which its second and later groups begin, ascending."""
_MOST_CUTS = 3  # of a list; layers that alternate stay together


def layer_of(key: str) -> tuple[str, int] | None:
    """The outermost list of layers that a node key or a parameter's name lies in, and in which layer; None where it lies in none."""
    pattern, indices = pattern_of(key)
    return (pattern[: pattern.index("{0}")].rstrip("."), indices[0]) if indices else None


def group_of(key: str, starts: Starts) -> int:
    """In which group of its list of layers a node or a parameter is."""
    where = layer_of(key) if starts else None
    return sum(where[1] >= start for start in starts.get(where[0], ())) if where else 0


def frozen_starts(trace: Trace) -> Starts:
    """Where backward begins to read other things of layers that are alike in forward: gradients end there, since all before it is frozen.

    Were such layers to decide alike, what backward runs again for one would be run again for all, and nothing would read it in some.
    """
    if all(p.gradient is not None for p in trace.parameters):
        return {}
    read: dict[str, dict[int, set[str]]] = {}
    for node in trace.graph.nodes:
        where = layer_of(node.meta["key"]) if node.op == "call_function" and node.meta["phase"] == "forward" else None
        if where is not None:
            here = read.setdefault(where[0], {}).setdefault(where[1], set())
            if any(user.op == "call_function" and user.meta["phase"] == "backward" for user in node.users):
                here.add(pattern_of(node.meta["key"])[0])
    found: dict[str, tuple[int, ...]] = {}
    for path, layers in read.items():
        order = sorted(layers)
        cuts = tuple(after for before, after in itertools.pairwise(order) if layers[before] != layers[after])
        found |= {path: cuts} if 0 < len(cuts) <= _MOST_CUTS else {}
    return found


def together(some: Starts, others: Starts) -> Starts:
    """The groups in which both are apart."""
    return {path: tuple(sorted({*some.get(path, ()), *others.get(path, ())})) for path in (*some, *(p for p in others if p not in some))}
