"""Tensors of a model that have several names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from autopar.errors import CaptureError, Where

Aliases = Mapping[str, tuple[str, ...]]
"""First name → further names of the same tensor."""


def aliases_of(model: nn.Module) -> Aliases:
    """Of every parameter and buffer."""
    names: dict[int, list[str]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), []).append(name)
    return {first: tuple(others) for first, *others in names.values()}


def refuse_overlaps(model: nn.Module) -> None:
    """Raise CaptureError where two parameters are two tensors over the same memory: apart, they would no longer be one.

    Parts of one storage that do not meet, as the flattened weights of recurrent layers, are no tie.
    """
    held: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        first, last = _extent(parameter)
        for other_first, other_last, other in held.setdefault(parameter.untyped_storage()._cdata, []):
            if first < other_last and other_first < last:
                raise CaptureError(
                    f"parameters {other!r} and {name!r} are two tensors over the same memory",
                    where=Where(module=name.rpartition(".")[0]),
                    remedy="tie them as one: assign the same nn.Parameter to both modules",
                )
        held[parameter.untyped_storage()._cdata].append((first, last, name))


def _extent(x: Tensor) -> tuple[int, int]:
    """First byte and the one behind the last, in its storage."""
    if not x.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    begin = x.storage_offset() * x.element_size()
    return begin, begin + (last + 1) * x.element_size()
