"""Copies between a device's memory and its host's: `store` to the host, `fetch` from it.

On a GPU the host's copy is in page-locked memory, and copies run beside compute, in one stream per
direction: `start_…` issues a copy, after everything that was enqueued on the current stream, and
`finish_…` makes the current stream wait for it. The host may read a stored tensor when that stream
is done (`autopar.program.executor`), or if `read` was set (`autopar.kernels.bind`). On the CPU the
host's memory is the device's. Torch rounds page-locked blocks up to powers of two, which no budget
counts.

To count a device's memory one has to know which tensors are on the host. `is_on_host` knows this of
tensors that were made by `empty` or registered by `put_on_host` and, while
`autopar.program.abstract_executor` counts, of those that are computed from nothing else.

Memory: in addition to operand and result nothing; an operand that is not contiguous costs one more
copy. Between start and finish both live.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

Started = list[Any]
"""Between start and finish: what comes, what is sent, and the event of the copy, on a GPU."""
_on_host: dict[int, weakref.finalize] = {}  # by the address of a storage
_making = [False]


def put_on_host(x: Tensor) -> Tensor:
    """Register that a tensor's memory is the host's; return the tensor."""
    storage = x.untyped_storage()
    if storage._cdata not in _on_host:
        _on_host[storage._cdata] = weakref.finalize(storage, _on_host.pop, storage._cdata, None)
    return x


def is_on_host(x: Tensor) -> bool:
    """Return whether a tensor's memory is known to be the host's."""
    return bool(_on_host) and x.untyped_storage()._cdata in _on_host


def is_used() -> bool:
    """Return whether anything is on the host, or is being made there."""
    return _making[0] or bool(_on_host)


def follows(inputs: Sequence[Tensor]) -> bool:
    """Return whether a result of these inputs is made on the host: inside `make_on_host`, or
    because all inputs are there."""
    return _making[0] or (bool(_on_host) and bool(inputs) and all(map(is_on_host, inputs)))


@contextmanager
def make_on_host() -> Iterator[None]:
    """Treat all tensors that are made inside as made on the host."""
    before, _making[0] = _making[0], True
    try:
        yield
    finally:
        _making[0] = before


def empty(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """Return uninitialised memory of the host, page-locked if `pinned`.

    Args:
        shape, dtype: of the tensor. pinned: whether a GPU copies from or to it.
    """
    with make_on_host():
        return put_on_host(torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned))


def store(x: Tensor, device: str = "cpu", read: bool = False) -> Tensor:
    """Copy a tensor to the host.

    Args:
        x: a tensor on the device. device: the device's type. read: whether the host itself reads
            the copy next, so that it must wait for it.
    """
    return finish_store(start_store(x, device), device, read)


def fetch(x: Tensor, device: str = "cpu") -> Tensor:
    """Copy a tensor on the host to the device."""
    return finish_fetch(start_fetch(x, device), device)


def start_store(x: Tensor, device: str = "cpu") -> Started:
    """Issue a `store`."""
    x = x.resolve_conj().resolve_neg().contiguous()
    come = empty(x.shape, x.dtype, pinned=device == "cuda")
    return [come, x, _record_copy(come, x, x.device, "store")]


def finish_store(started: Started, device: str = "cpu", read: bool = False) -> Tensor:
    """Wait for a `store` and return the copy.

    Args:
        started: what `start_store` returned. device, read: see `store`.
    """
    if read and started[-1] is not None:
        started[-1].synchronize()
    return _await_copy(started)


def start_fetch(x: Tensor, device: str = "cpu") -> Started:
    """Issue a `fetch`."""
    x = x.resolve_conj().resolve_neg()
    come = torch.empty(x.shape, dtype=x.dtype, device=device)
    return [come, x, _record_copy(come, x, come.device, "fetch")]


def finish_fetch(started: Started, device: str = "cpu") -> Tensor:
    """Wait for a `fetch` and return the copy."""
    return _await_copy(started)


def _record_copy(
    come: Tensor, sent: Tensor, device: torch.device, way: str
) -> torch.cuda.Event | None:
    """Issue a copy and return its event on a GPU; elsewhere copy at once and return None."""
    if device.type != "cuda":
        come.copy_(sent)
        return None
    stream = _stream(device, way)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        come.copy_(sent, non_blocking=True)
    (come if come.is_cuda else sent).record_stream(
        stream
    )  # should an error let go of it before it is awaited
    return stream.record_event()


def _await_copy(started: Started) -> Tensor:
    """Return the copy and release its source, whose memory the current stream may free only after
    the copy."""
    come, _, copied = started
    if copied is not None:
        torch.cuda.current_stream().wait_event(copied)
    started.clear()
    result: Tensor = come
    return result


@cache
def _stream(device: torch.device, way: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
