"""Runs of equal layers in groups, each of which decides for itself.

Equal layers take one decision as long as that is good enough. Where the best would be a mixture (say, memory for two thirds of the layers
to keep something), a list of layers is cut: what stands in the layers before a cut is one class, what stands behind it another.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.strategies.clusters import pattern_of

Starts = Mapping[str, tuple[int, ...]]
"""Path of a list of layers → the layers at which its second and later groups begin, ascending."""


def layer_of(key: str) -> tuple[str, int] | None:
    """The outermost list of layers that a node key or a parameter's name lies in, and in which layer; None where it lies in none."""
    pattern, indices = pattern_of(key)
    return (pattern[: pattern.index("{0}")].rstrip("."), indices[0]) if indices else None


def group_of(key: str, starts: Starts) -> int:
    """In which group of its list of layers a node or a parameter is."""
    where = layer_of(key) if starts else None
    return sum(where[1] >= start for start in starts.get(where[0], ())) if where else 0
