"""Tensors of a model that have several names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

Aliases = Mapping[str, tuple[str, ...]]
"""First name → further names of the same tensor."""


def aliases_of(model: nn.Module) -> Aliases:
    """Of every parameter and buffer."""
    names: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), []).append(name)
    return {first: tuple(others) for first, *others in names.values()}
