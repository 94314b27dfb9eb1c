"""Nested structures of tensors in calls and results, flattened to leaves with paths; and parameters
and buffers with several names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autopar.errors import CaptureError, Where


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a nested structure, in order."""
    see_into_dataclasses(tree)
    return pytree.tree_leaves(tree)


def see_into_dataclasses(tree: Any) -> None:
    """Register the dataclasses in `tree` that contain tensors with torch
    (`torch.export.register_dataclass`), once per process.

    Raises:
        CaptureError: a class cannot be constructed from its fields alone.
    """
    while unseen := {
        type(leaf)
        for leaf in pytree.tree_leaves(tree)
        if _is_dataclass(leaf) and _holds_tensors(leaf)
    }:
        for kind in unseen:
            parameters = list(inspect.signature(kind).parameters)
            if sorted(parameters) != sorted(field.name for field in fields(kind)):
                raise CaptureError(
                    f"the dataclass {kind.__name__} is an argument or result of the model, but"
                    " cannot be constructed from its fields",
                    remedy=(
                        "make the arguments of its __init__ exactly its fields (no init=False, no"
                        " InitVar)"
                    ),
                )
            torch.export.register_dataclass(kind)


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _holds_tensors(value: Any) -> bool:
    leaves = pytree.tree_leaves([getattr(value, field.name, None) for field in fields(value)])
    return any(
        isinstance(leaf, torch.Tensor) or (_is_dataclass(leaf) and _holds_tensors(leaf))
        for leaf in leaves
    )


def flatten_with_paths(tree: Any) -> tuple[tuple[tuple[str, Any], ...], Any]:
    """Return the leaves of `tree` with their paths (``logits``, ``past.0``), and its pytree
    spec."""
    see_into_dataclasses(tree)
    return tuple(
        (".".join(steps), leaf) for steps, leaf in _with_steps(tree)
    ), pytree.tree_structure(tree)


def paths_in(tree: Any) -> list[str]:
    """Return the paths of the leaves, in order."""
    return [path for path, _ in flatten_with_paths(tree)[0]]


def _with_steps(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    for keys, leaf in pytree.tree_flatten_with_path(tree, is_leaf=_is_unnamed)[0]:
        here = tuple(map(_step, keys))
        if _is_unnamed(leaf):
            children, _ = pytree.SUPPORTED_NODES[type(leaf)].flatten_fn(leaf)
            is_named = isinstance(leaf, Mapping) and len(leaf) == len(children)
            for name, child in zip(
                leaf if is_named else range(len(children)), children, strict=True
            ):
                yield from (
                    ((*here, str(name), *steps), below) for steps, below in _with_steps(child)
                )
        else:
            yield here, leaf


def _is_unnamed(value: Any) -> bool:
    """Return whether the class of `value` is registered with torch without names for its contents,
    such as the outputs of diffusers models."""
    node = pytree.SUPPORTED_NODES.get(type(value))
    return node is not None and node.flatten_with_keys_fn is None


def flatten_call(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[tuple[str, Any], ...], Any]:
    """Return the leaves of (args, kwargs) with their paths, and the spec; the path of a positional
    argument starts with its index, that of a keyword argument with its name."""
    leaves, spec = flatten_with_paths((args, kwargs))
    return tuple((path.split(".", 1)[1], leaf) for path, leaf in leaves), spec


def argument_name(path: str, names: Sequence[str]) -> str:
    """Return the path of an argument with the name of a positional argument instead of its index.

    Args:
        path: path of a leaf of the call, as returned by `flatten_call`.
        names: names of the parameters in the signature.
    """
    first, dot, rest = path.partition(".")
    return (
        (names[int(first)] if first.isdecimal() and int(first) < len(names) else first) + dot + rest
    )


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """Return the tree with the given leaves; `spec` is from `flatten_with_paths`."""
    return pytree.tree_unflatten(leaves, spec)


def _step(key: Any) -> str:
    for field in ("key", "idx", "name"):
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)


# --------------------------------------------------------------------------------------------------
# Parameters and buffers with several names.

Aliases = Mapping[str, tuple[str, ...]]
"""First name → other names of the same tensor."""


def aliases_of(model: nn.Module) -> Aliases:
    """Return the first name of every parameter and buffer → its other names."""
    names: dict[int, list[str]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names.setdefault(id(tensor), []).append(name)
    return {first: tuple(others) for first, *others in names.values()}


def refuse_overlaps(model: nn.Module) -> None:
    """Raise CaptureError if two parameters are different tensors that share memory; a program would
    store them separately.

    Tensors in one storage that do not overlap, such as the flattened weights of recurrent layers,
    are allowed.
    """
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        first, last = _extent(parameter)
        for other_first, other_last, other in ranges.setdefault(
            parameter.untyped_storage()._cdata, []
        ):
            if first < other_last and other_first < last:
                raise CaptureError(
                    f"parameters {other!r} and {name!r} are different tensors that share memory",
                    where=Where(module=name.rpartition(".")[0]),
                    remedy="tie them: assign the same nn.Parameter to both modules",
                )
        ranges[parameter.untyped_storage()._cdata].append((first, last, name))


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the range of bytes of `x` in its storage, as (first byte, end)."""
    if not x.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    begin = x.storage_offset() * x.element_size()
    return begin, begin + (last + 1) * x.element_size()
