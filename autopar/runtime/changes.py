"""A record of what a script changed in place in parameters and gradients since the last call.

Ranks compare the record at the next call of the module, so that no rank trains with another
`max_norm`, factor or decay. Only numbers of the script are recorded, since values of tensors would
have to be read:

- numbers that are passed to a function that changes a parameter or a gradient, as in
  ``p.grad.mul_(0.5)``. A number with many digits may be computed from a tensor, and its last digits
  may differ between kinds of devices. Of such a number, two digits are recorded.
- numbers from which a scalar operand was computed, as in ``torch.nn.utils.clip_grad_norm_``, which
  multiplies gradients by ``max_norm / (norm + 1e-6)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_KEPT = "_autopar_kept"  # attribute of tensors whose changes are recorded: the parameter's id
_OWNERS = "_autopar_owners"  # attribute of a result: the parameters that it was computed from
_NUMBERS = "_autopar_numbers"  # attribute of a scalar: the numbers it was computed from
_MOST_DIGITS = 6  # of a number that a script states

_changes: Counter[str] = Counter()


def keep(value: Any, parameter: Any = None) -> Any:
    """Record changes of a tensor from now on, and return it.

    Args:
        value: the tensor.
        parameter: the parameter whose gradient or data it is; None for a parameter.
    """
    if isinstance(value, DTensor):
        vars(value)[_KEPT] = id(value) if parameter is None else id(parameter)
    return value


def owners(value: Tensor) -> frozenset[int]:
    """Return the ids of the parameters from which a tensor was computed, as far as `follow_owners`
    was called."""
    named = vars(value)
    of_result: frozenset[int] | None = named.get(_OWNERS)
    if of_result is not None:
        return of_result
    return frozenset([named[_KEPT]]) if _KEPT in named else frozenset()


def follow_owners(result: DTensor, args: Iterable[Any]) -> None:
    """Remember the parameters from which a result was computed."""
    if not owners(result):
        found = frozenset[int]().union(*(owners(x) for x in args if isinstance(x, DTensor)))
        vars(result)[_OWNERS] = found


def recorded() -> Counter[str]:
    """Return a copy of the record. The step of an optimizer restores it at its end, since ranks
    compare the optimizer's settings instead of what it changes."""
    return Counter(_changes)


def restore(before: Counter[str]) -> None:
    """Replace the record by an earlier one."""
    _changes.clear()
    _changes.update(before)


def record(
    name: str, written: Iterable[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Record a function that changes tensors in place.

    Args:
        name: its name.
        written: the tensors that it changes.
        args, kwargs: its arguments.
    """
    kept = [x for x in written if isinstance(x, DTensor) and _KEPT in vars(x)]
    if not kept or not _has_all_ranks(kept[0]._spec.mesh):
        return
    numbers = ", ".join(dict.fromkeys(_numbers((*args, *kwargs.values()))))
    _changes[f"{name.strip('_')}({numbers})"] += len(kept)


def follow(result: DTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Remember the numbers from which a scalar was computed.

    Args:
        result: the scalar.
        args, kwargs: the arguments of the function that computed it.
    """
    if numbers := tuple(dict.fromkeys(_numbers((*args, *kwargs.values())))):
        vars(result)[_NUMBERS] = numbers


def take() -> str:
    """Return the changes since the last call of this function, in words."""
    if not _changes:
        return ""
    named = sorted(_changes.items())
    _changes.clear()
    return ", ".join(f"changes of {num} parameters or gradients by {name}" for name, num in named)


def _has_all_ranks(mesh: DeviceMesh) -> bool:
    """Return whether there are several ranks, and a mesh has all of them."""
    if mesh is not _newest[0]:
        several = dist.is_initialized() and mesh.size() > 1
        _newest[:] = [mesh, several and mesh.size() == dist.get_world_size()]
    return bool(_newest[1])


_newest: list[Any] = [None, False]  # the mesh of the last call, and whether it has all ranks


def _numbers(values: Iterable[Any]) -> Iterator[str]:
    """Iterate over the numbers among values and in their lists, and those of scalars."""
    for value in values:
        kind = type(value)
        if kind is float or kind is int:
            yield _show(value)
        elif kind is list or kind is tuple:
            yield from _numbers(value)
        elif isinstance(value, Tensor):
            yield from value.__dict__.get(_NUMBERS, ())


@lru_cache(maxsize=1024)
def _show(value: float) -> str:
    shown = repr(value)
    digits = shown.split("e")[0].replace(".", "").strip("-0")
    is_computed = isinstance(value, float) and len(digits) > _MOST_DIGITS
    return f"about {value:.1e}" if is_computed else shown
