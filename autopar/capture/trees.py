"""Nested structures of tensors, as calls take and return them: their leaves, with paths."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a nested structure, in order."""
    return pytree.tree_leaves(tree)


def flatten_with_paths(tree: Any) -> tuple[tuple[tuple[str, Any], ...], Any]:
    """Leaves of `tree` with their paths (``logits``, ``past.0``), and its spec."""
    pairs, spec = pytree.tree_flatten_with_path(tree)
    return tuple((".".join(_step(step) for step in path), leaf) for path, leaf in pairs), spec


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[tuple[str, Any], ...], Any]:
    """Leaves of (args, kwargs) with their paths, and the spec: keyword arguments by name, positional ones by number."""
    leaves, spec = flatten_with_paths((args, kwargs))
    return tuple((path.split(".", 1)[1], leaf) for path, leaf in leaves), spec


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """The tree that `flatten_with_paths` took apart."""
    return pytree.tree_unflatten(leaves, spec)


def _step(key: Any) -> str:
    for field in ("key", "idx", "name"):
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)
