"""Data that a distributed parameter was given, ``p.data = tensor``: torch takes it, and ops read
this rank's part of before."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.capture.dynamo.fakes import no_modes
from autopar.errors import RuntimeStateError

_MARK = "_autopar_storage"


def watch_data(parameters: Iterable[Tensor]) -> None:
    """Note of each what stands for its data now."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            setattr(parameter, _MARK, _mark(parameter))


def refuse_given_data(name: str, parameter: Tensor) -> None:
    """Raises RuntimeStateError where a watched parameter was given data since. A copy of one
    (`copy.deepcopy`) is not watched."""
    noted = parameter.__dict__.get(_MARK)
    if noted is not None and noted[0] == id(parameter) and noted != _mark(parameter):
        raise RuntimeStateError(
            f"{name!r} was given data (p.data = ...), which torch does not take over into a"
            " distributed parameter: it is what it was",
            remedy=(
                "write into it under torch.no_grad(): p.copy_(...); whole tensors by"
                " pm.load_state_dict({...}, strict=False)"
            ),
        )


def _mark(parameter: Tensor) -> tuple[int, int]:
    return id(parameter), parameter.untyped_storage()._cdata


# --------------------------------------------------------------------------------------------------
# What a user holds and backward reads: tensors in whose memory saved values lie, which may not
# change between a call and its backward.


class Watched:
    """Of one call: tensors by what the user calls them, each with how often it had been changed
    in place."""

    def __init__(self) -> None:
        self._tensors: list[tuple[str, Tensor, int]] = []

    def watch(self, named: Iterable[tuple[str, Tensor]], saved: Sequence[Any]) -> None:
        """Watch those of `named`, local tensors, in whose memory one of `saved` lies.

        What is held is an alias apart from autograd: changes of all aliases are counted together,
        and it keeps no memory that the saved value does not.

        Raises:
            RuntimeStateError: where one was made under `torch.inference_mode`, whose changes are
                not counted.
        """
        read = {_memory(value) for value in saved if isinstance(value, Tensor) and value.numel()}
        for name, tensor in named:
            if not tensor.numel() or _memory(tensor) not in read:
                continue
            if tensor.is_inference():
                raise RuntimeStateError(
                    f"{name} was made under torch.inference_mode, and backward reads it: whether it"
                    " changes until then is not known",
                    remedy=(
                        "clone it outside of torch.inference_mode, or make it under torch.no_grad"
                    ),
                )
            self._tensors.append((name, tensor.detach(), tensor._version))

    def follow(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Watch DTensors, too, whose local tensor is watched under the same name: they count
        changes of their own."""
        known = {name for name, _, _ in self._tensors}
        followed = (
            (name, tensor)
            for name, tensor in named
            if isinstance(tensor, DTensor) and name in known
        )
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
                remedy=(
                    "run backward before optimizer.step(), or whatever else changes it; change a"
                    " clone of an input or an output"
                ),
            )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# --------------------------------------------------------------------------------------------------
# Some of a tensor's values as a number, by which writes are seen that nothing counts:
# ``parameter.data.copy_(...)``.

MOST = 2048  # values of one tensor that are looked at; of smaller ones all
_WORDS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # of as many bytes: numpy has no bfloat16


def sample_checksum(x: Tensor) -> int | None:
    """A checksum of some values, evenly spaced; None of what has none here: on meta, fake,
    sparse, or of a class of its own."""
    if (
        type(x) not in (Tensor, nn.Parameter)
        or x.is_meta
        or x.layout != torch.strided
        or not x.numel()
    ):
        return None
    with (
        torch.no_grad(),
        no_modes(),
    ):  # what counts or traces a step's tensors does not see the look at these
        x = x.detach().resolve_conj().resolve_neg()
        x = torch.view_as_real(x) if x.is_complex() else x
        step = max(1, x.numel() // MOST) | 1  # odd: in each row of another column
        if x.is_contiguous():
            values = x.view(-1)[::step]
        else:
            values = x[
                torch.unravel_index(torch.arange(0, x.numel(), step, device=x.device), x.shape)
            ]
        return zlib.crc32(values.cpu().view(_WORDS[x.element_size()]).numpy().tobytes())
