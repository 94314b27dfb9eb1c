"""Copies between device memory and host memory: `store` copies to the host, `fetch` to the device.

On a GPU, the host copy is in pinned memory, and copies overlap with compute, in one stream per
direction. `start_…` issues a copy after all work that is enqueued on the current stream, and
`finish_…` makes the current stream wait for the copy. The host may read a stored tensor after that
stream has finished (`autopar.program.executor`), or if `read` is set (`autopar.kernels.bind`). On a
CPU, host memory and device memory are the same. torch rounds the sizes of pinned blocks up to
powers of two, which budgets of host memory do not include.

To count device memory, tensors on the host must be recognized. `is_on_host` recognizes tensors that
were created by `empty` or registered by `put_on_host`. While `autopar.program.abstract_executor`
counts, it also recognizes tensors that are computed only from such tensors.

Memory: only the operand and the result, and one more copy if the operand is not contiguous. Between
start and finish, both are alive.
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
"""The state between start and finish: the copy, its source, and the event of the copy (None without
a GPU)."""
_on_host: dict[int, weakref.finalize] = {}  # by the address of a storage
_making = [False]


def put_on_host(x: Tensor) -> Tensor:
    """Register that a tensor is in host memory. Return the tensor."""
    storage = x.untyped_storage()
    if storage._cdata not in _on_host:
        _on_host[storage._cdata] = weakref.finalize(storage, _on_host.pop, storage._cdata, None)
    return x


def is_on_host(x: Tensor) -> bool:
    """Return whether a tensor is known to be in host memory."""
    return bool(_on_host) and x.untyped_storage()._cdata in _on_host


def is_used() -> bool:
    """Return whether any tensor is in host memory, or `make_on_host` is active."""
    return _making[0] or bool(_on_host)


def follows(inputs: Sequence[Tensor]) -> bool:
    """Return whether a result of these inputs is in host memory: if `make_on_host` is active, or
    all inputs are in host memory."""
    return _making[0] or (bool(_on_host) and bool(inputs) and all(map(is_on_host, inputs)))


@contextmanager
def make_on_host() -> Iterator[None]:
    """A context in which all new tensors count as tensors in host memory."""
    before, _making[0] = _making[0], True
    try:
        yield
    finally:
        _making[0] = before


def empty(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """Return an uninitialized tensor in host memory.

    Args:
        shape, dtype: the shape and dtype of the tensor.
        pinned: whether the memory is pinned, which copies from or to a GPU require.
    """
    with make_on_host():
        return put_on_host(torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned))


def store(x: Tensor, device: str = "cpu", read: bool = False) -> Tensor:
    """Copy a tensor to the host.

    Args:
        x: a tensor on the device.
        device: the type of the device.
        read: whether the host reads the copy next, so that it must wait for the copy.
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
    """Wait for a `store`, and return the copy.

    Args:
        started: the result of `start_store`.
        device, read: see `store`.
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
    """Wait for a `fetch`, and return the copy."""
    return _await_copy(started)


def _record_copy(
    come: Tensor, sent: Tensor, device: torch.device, way: str
) -> torch.cuda.Event | None:
    """On a GPU, issue a copy and return its event. On other devices, copy synchronously and return
    None."""
    if device.type != "cuda":
        come.copy_(sent)
        return None
    stream = _stream(device, way)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        come.copy_(sent, non_blocking=True)
    # needed if an error releases the tensor before the copy has finished
    (come if come.is_cuda else sent).record_stream(stream)
    return stream.record_event()


def _await_copy(started: Started) -> Tensor:
    """Return the copy, and release its source. The current stream waits first, so that it does not
    reuse the memory of the source before the copy has finished."""
    come, _, copied = started
    if copied is not None:
        torch.cuda.current_stream().wait_event(copied)
    started.clear()
    result: Tensor = come
    return result


@cache
def _stream(device: torch.device, way: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
