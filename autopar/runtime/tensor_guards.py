"""Detection of writes to tensors: in-place changes between forward and backward, and checksums of
values."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.tensor import DTensor

from autopar.capture.dynamo.fakes import no_modes
from autopar.errors import RuntimeStateError

# --------------------------------------------------------------------------------------------------
# Tensors that the user holds and backward reads. They must not change between a call and its
# backward.


class WatchedTensors:
    """The watched tensors of one call, with their names and version counters."""

    def __init__(self) -> None:
        self._tensors: list[tuple[str, Tensor, int]] = []

    def watch(self, named: Iterable[tuple[str, Tensor]], saved: Sequence[Any]) -> None:
        """Watch the tensors that share memory with a saved value.

        This object keeps detached aliases. Aliases share one version counter, and keep only memory
        alive that the saved values also keep alive.

        Args:
            named: pairs of a name and a local tensor.
            saved: the values that backward reads.

        Raises:
            RuntimeStateError: if such a tensor was created under `torch.inference_mode`, which does
                not count changes.
        """
        read = {_memory(value) for value in saved if isinstance(value, Tensor) and value.numel()}
        for name, tensor in named:
            if not tensor.numel() or _memory(tensor) not in read:
                continue
            if tensor.is_inference():
                raise RuntimeStateError(
                    f"{name} was created under torch.inference_mode, and backward reads it:"
                    " changes to it cannot be detected",
                    remedy=(
                        "clone it outside torch.inference_mode, or create it under torch.no_grad"
                    ),
                )
            self._tensors.append((name, tensor.detach(), tensor._version))

    def follow(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Also watch DTensors whose local tensor is watched under the same name, since a DTensor
        has a separate version counter. This object keeps an alias of a result of an autograd
        function, to avoid a reference cycle."""
        known = {name for name, _, _ in self._tensors}
        with DisableTorchFunctionSubclass():
            self._tensors += [
                (name, tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)
                for name, tensor in named
                if isinstance(tensor, DTensor) and name in known
            ]

    def check(self) -> None:
        """Check the tensors, and stop watching them.

        Raises:
            RuntimeStateError: if a tensor was changed.
        """
        with DisableTorchFunctionSubclass():
            changed = [name for name, tensor, before in self._tensors if tensor._version != before]
        self._tensors.clear()
        if changed:
            raise RuntimeStateError(
                f"{changed[0]} was changed in place after the call, and backward reads it",
                remedy=(
                    "run backward before optimizer.step() or any other in-place change; change a"
                    " clone of an input or an output instead"
                ),
            )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# --------------------------------------------------------------------------------------------------
# Checksums of values. They detect writes that do not change version counters, such as
# ``parameter.data.copy_(...)``.

MOST = 2048  # number of values in a checksum; all values of smaller tensors are used
_WORDS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # integers of the same size, since numpy has no bfloat16


def sample_checksum(x: Tensor) -> int | None:
    """Return a checksum of about `MOST` evenly spaced values, or of all values of a small tensor.
    Return None for tensors without values (meta, fake), sparse tensors and tensor subclasses."""
    if (
        type(x) not in (Tensor, nn.Parameter)
        or x.is_meta
        or x.layout != torch.strided
        or not x.numel()
    ):
        return None
    # these ops must be invisible to modes that count or trace the tensors of a step
    with torch.no_grad(), no_modes():
        x = x.detach().resolve_conj().resolve_neg()
        x = torch.view_as_real(x) if x.is_complex() else x
        step = max(1, x.numel() // MOST) | 1  # odd, so that each row samples other columns
        if x.is_contiguous():
            values = x.view(-1)[::step]
        else:
            values = x[
                torch.unravel_index(torch.arange(0, x.numel(), step, device=x.device), x.shape)
            ]
        return zlib.crc32(values.cpu().view(_WORDS[x.element_size()]).numpy().tobytes())
