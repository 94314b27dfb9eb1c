"""Tensors that a model on meta leaves without values, until something is written into them.

They are filled with what no weight is, NaN or the least integer, by which it is known at the first call whether all were given values,
however that was done: torch.distributed.checkpoint, among others, writes past what counts changes. Booleans have no such value: of those
that no file holds, changes are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import RuntimeStateError

_REMEDY = (
    "autopar.load_weights(pm, folder) reads them from safetensors, pm.load_state_dict(...) takes full ones; for buffers that no file "
    "holds build the model under autopar.weights_on_meta(), which makes buffers as ever"
)


def blank(tensor: Tensor) -> Tensor:
    """The same tensor, filled with what says that it has no values yet."""
    value = _mark(tensor.dtype)
    return tensor if value is None else tensor.fill_(value)


class Unset:
    """By name, each with how often it had been changed in place."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: (tensor, tensor._version) for name, tensor in tensors.items()}

    def check(self, held: Callable[[str], Tensor]) -> None:
        """That all of them have values by now; those are not looked at again.

        Args:
            held: what bears a name now; another tensor than at first has values.

        Raises:
            RuntimeStateError: naming the first that has none.
        """
        kept = ((name, of) for name, of in self._tensors.items() if held(name) is of[0])
        self._tensors = {name: (tensor, changes) for name, (tensor, changes) in kept if _is_blank(tensor, changes)}
        if self._tensors:
            name, *others = self._tensors
            more = f", nor have {len(others)} others" if others else ""
            raise RuntimeStateError(f"{name!r} was on meta, and has not been given values since{more}", remedy=_REMEDY)


def _mark(dtype: torch.dtype) -> float | int | None:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return None if dtype == torch.bool else torch.iinfo(dtype).min or torch.iinfo(dtype).max


def _is_blank(tensor: Tensor, changes: int) -> bool:
    local, mark = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach(), _mark(tensor.dtype)
    if mark is None or tensor._version != changes:
        return tensor._version == changes
    found = local.isnan() if isinstance(mark, float) else local == mark
    return local.numel() > 0 and bool(found.all())
