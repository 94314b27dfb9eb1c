"""What a user holds and backward reads: tensors in whose memory saved values lie, which may not change between a call and its backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import RuntimeStateError


class Watched:
    """Of one call: tensors by what the user calls them, each with how often it had been changed in place."""

    def __init__(self) -> None:
        self._tensors: list[tuple[str, Tensor, int]] = []

    def watch(self, named: Iterable[tuple[str, Tensor]], saved: Sequence[Any]) -> None:
        """Watch those of `named`, local tensors, in whose memory one of `saved` lies.

        What is held is an alias apart from autograd: changes of all aliases are counted together, and it keeps no memory that the saved
        value does not.

        Raises:
            RuntimeStateError: where one was made under `torch.inference_mode`, whose changes are not counted.
        """
        read = {_memory(value) for value in saved if isinstance(value, Tensor) and value.numel()}
        for name, tensor in named:
            if not tensor.numel() or _memory(tensor) not in read:
                continue
            if tensor.is_inference():
                raise RuntimeStateError(
                    f"{name} was made under torch.inference_mode, and backward reads it: whether it changes until then is not known",
                    remedy="clone it outside of torch.inference_mode, or make it under torch.no_grad",
                )
            self._tensors.append((name, tensor.detach(), tensor._version))

    def follow(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Watch DTensors, too, whose local tensor is watched under the same name: they count changes of their own."""
        known = {name for name, _, _ in self._tensors}
        followed = ((name, tensor) for name, tensor in named if isinstance(tensor, DTensor) and name in known)
        self._tensors += [(name, tensor.detach(), tensor._version) for name, tensor in followed]

    def check(self) -> None:
        """Watch no longer.

        Raises:
            RuntimeStateError: where one was changed.
        """
        changed = [name for name, tensor, before in self._tensors if tensor._version != before]
        self._tensors.clear()
        if changed:
            raise RuntimeStateError(
                f"{changed[0]} was changed in place since the call, and backward reads it",
                remedy="run backward before optimizer.step(), or whatever else changes it; change a clone of an input or an output",
            )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
