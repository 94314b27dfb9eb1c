"""Tensor files in the safetensors format. Files are written tensor by tensor, and checked before
they are read.

A file has a JSON header with each tensor's dtype, shape and offsets, followed by the bytes of the
tensors. A tensor whose dtype is not supported by every reader of the format is written as bytes
(``U8``).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from autopar.errors import RuntimeStateError

SUFFIX = ".safetensors"
_BYTES = "U8"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: _BYTES,
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
"""The dtype of each name that `write_tensors` gives a dtype in a file."""
UNSAFE = "do not use it unless you know who wrote it; use another checkpoint, or save again"
"""The remedy for a file that was not written by autopar, or that would run code when it is read."""


def keeps_values(saved: torch.dtype | None, here: torch.dtype) -> bool:
    """Return whether saved numbers may be read into a tensor. Floating-point numbers may be
    rounded; all other numbers must be in the range of the tensor's dtype.

    Args:
        saved: the dtype of the saved numbers; None if it is unknown.
        here: the dtype of the tensor.
    """
    if saved is None or saved == here:
        return saved is not None
    if (saved.is_floating_point, saved.is_complex) != (here.is_floating_point, here.is_complex):
        return False
    if saved.is_floating_point or saved.is_complex:
        return True
    (low, high), (least, most) = _range_of(saved), _range_of(here)
    return least <= low and high <= most


def _range_of(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the largest number of an integer dtype, or of booleans."""
    if dtype == torch.bool:
        return 0, 1
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def damage_error(what: str, path: Path) -> RuntimeStateError:
    """Return the error for a damaged file of a checkpoint."""
    remedy = "use another checkpoint, or copy this one again from its source"
    return RuntimeStateError(what, where=str(path), remedy=remedy)


def unsafe(what: str, place: Path | None) -> RuntimeStateError:
    """Return the error for a file of a checkpoint that was not written by autopar, or that would
    run code when it is read."""
    return RuntimeStateError(what, where=None if place is None else str(place), remedy=UNSAFE)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write a file of tensors, and wait until it is on the disk.

    Args:
        path: the file.
        tensors: the tensors, by name, on any device. Each is copied to the host when it is written.

    Returns:
        The CRC-32 of the file.

    Raises:
        OSError: if the file cannot be written.
    """
    # Tensors are ordered by element size, so that each offset is a multiple of the element size.
    ordered = sorted(tensors.items(), key=lambda named: (-_size_in_file(named[1]), named[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.itemsize
        kind, shape = in_file(tensor.dtype, tensor.shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        written = len(text).to_bytes(8, "little") + text
        file.write(written)
        checksum = zlib.crc32(written)
        for _, tensor in ordered:
            content = _content(tensor)
            file.write(content)
            checksum = zlib.crc32(content, checksum)
        file.flush()
        os.fsync(file.fileno())
    return checksum


def in_file(dtype: torch.dtype, shape: torch.Size) -> tuple[str, tuple[int, ...]]:
    """Return the safetensors name of the dtype and the shape that a tensor has in a file."""
    if dtype in _NAMES:
        return _NAMES[dtype], tuple(shape)
    return _BYTES, (shape.numel() * dtype.itemsize,)


def _size_in_file(tensor: Tensor) -> int:
    return tensor.itemsize if tensor.dtype in _NAMES else 1


def _content(tensor: Tensor) -> Any:
    """Return the bytes of a tensor in row-major order, without a copy if it is contiguous on the
    host."""
    there = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(there.reshape(-1).view(torch.uint8).numpy())


class TensorFile:
    """A tensor file that is open for reading. The header is checked against the size of the file.

    Args:
        path: the file.

    Raises:
        RuntimeStateError: if the file cannot be read, or is not in the safetensors format.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._content = safe_open(path, framework="pt")
            self.names: frozenset[str] = frozenset(self._content.keys())
        except (OSError, SafetensorError) as error:
            raise self._refuse(f"cannot be read ({type(error).__name__}: {error})") from error

    def check(self, name: str, dtype: torch.dtype, shape: torch.Size) -> None:
        """Check that the header lists a tensor as expected.

        Args:
            name: the name of the tensor in the file.
            dtype, shape: the saved dtype and shape of the tensor.

        Raises:
            RuntimeStateError: if the dtype or shape differs, or there is no tensor of that name.
        """
        if name not in self.names:
            raise self._refuse(f"does not contain {name}")
        part = self._content.get_slice(name)
        found, wanted = (part.get_dtype(), tuple(part.get_shape())), in_file(dtype, shape)
        if found != wanted:
            raise self._refuse(
                f"contains {name} as {found[0]} {found[1]}, but {wanted[0]} {wanted[1]} was saved"
            )

    def read(
        self, name: str, dtype: torch.dtype, shape: torch.Size, box: tuple[slice, ...] | None = None
    ) -> Tensor:
        """Read a tensor, or a box of it.

        Args:
            name: the name of the tensor in the file.
            dtype, shape: the saved dtype and shape of the tensor.
            box: a slice for each dim; by default, the whole tensor is read.

        Raises:
            RuntimeStateError: if the file does not contain such a tensor.
        """
        self.check(name, dtype, shape)
        try:
            if box and dtype in _NAMES:
                return self._content.get_slice(name)[box]
            whole = self._content.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise self._refuse(f"cannot be read ({type(error).__name__}: {error})") from error
        whole = whole if dtype in _NAMES else whole.clone().view(dtype).reshape(shape)
        return whole[box] if box else whole

    def _refuse(self, fault: str) -> RuntimeStateError:
        return damage_error(f"{self._path.name} {fault}", self._path)
