"""Buffers whose values a program follows from: they have to hold at each call what they held when the model was captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.capture.trace import KnownBuffer, Stamp
from autopar.errors import RuntimeStateError


class KnownBuffers:
    """Those of one program. Values are compared when a buffer was written or replaced since the last call."""

    def __init__(self, buffers: Iterable[KnownBuffer]) -> None:
        self._known = {buffer.name: buffer.value for buffer in buffers}
        self._seen: dict[str, tuple[Stamp, int]] = {}

    def check(self, held: Callable[[str], Tensor | None]) -> None:
        """Compare the buffers that are here; a collective if one is sharded and was changed.

        Args:
            held: name → the compiled module's buffer; None if other ranks alone hold it.

        Raises:
            RuntimeStateError: one holds other values.
        """
        for name, value in self._known.items():
            buffer = held(name)
            if buffer is None or buffer.is_meta:
                continue
            stamp, version = self._seen.get(name, (None, -1))
            if stamp is not None and stamp.is_of(buffer) and version == _local_version(buffer):
                continue
            if not _is_equal(buffer, value):
                raise RuntimeStateError(
                    f"the buffer {name!r}, whose values forward reads, has changed since the model was "
                    "captured: shapes or branches of the program follow from them",
                    remedy="compile the model again with these values; or let forward take the tensor as an argument: each value then has "
                    "a program of its own",
                )
            self._seen[name] = Stamp.of(buffer), _local_version(buffer)


def _local_version(buffer: Tensor) -> int:
    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    return 0 if local.is_inference() else local._version


def _is_equal(buffer: Tensor, value: Tensor) -> bool:
    with torch.no_grad():
        whole = buffer.full_tensor() if isinstance(buffer, DTensor) else buffer
        return whole.shape == value.shape and whole.dtype == value.dtype and torch.equal(whole.cpu(), value)
