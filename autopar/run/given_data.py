"""Data that a distributed parameter was given, ``p.data = tensor``: torch takes it, and ops read this rank's part of before."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import RuntimeStateError

_MARK = "_autopar_storage"


def watch_data(parameters: Iterable[Tensor]) -> None:
    """Note of each what stands for its data now."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            setattr(parameter, _MARK, _mark(parameter))


def refuse_given_data(name: str, parameter: Tensor) -> None:
    """Raises RuntimeStateError where a watched parameter was given data since. A copy of one (`copy.deepcopy`) is not watched."""
    noted = parameter.__dict__.get(_MARK)
    if noted is not None and noted[0] == id(parameter) and noted != _mark(parameter):
        raise RuntimeStateError(
            f"{name!r} was given data (p.data = ...), which torch does not take over into a distributed parameter: it is what it was",
            remedy="write into it under torch.no_grad(): p.copy_(...); whole tensors by pm.load_state_dict({...}, strict=False)",
        )


def _mark(parameter: Tensor) -> tuple[int, int]:
    return id(parameter), parameter.untyped_storage()._cdata
