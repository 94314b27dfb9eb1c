"""Copies between a device's memory and its host's: `store` there, `fetch` from there.

On a GPU the host's copy is in page-locked memory, and copies run beside compute, on a stream of
their own for each direction: `start_…` issues one, after all that the current stream was given
before, and `finish_…` has the current stream wait for it. The host itself may read what was stored
once that stream is done (`autopar.program.executor`), or where it was said that it does
(`autopar.kernels.bind`). On the CPU a copy is a copy, and the host's memory is the device's. torch
rounds page-locked blocks up to powers of two, which no budget counts.

Whoever counts a device's memory has to know what is on the host: `is_on_host` does, of tensors that
were made by `empty` or told by `put_on_host`, and, while `autopar.program.abstract_executor`
counts, of what is made of nothing else.

Memory: besides operand and result nothing; an operand that is not contiguous costs one more copy.
From start to finish live both.
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
    """Know that a tensor's memory is the host's; the tensor itself."""
    storage = x.untyped_storage()
    if storage._cdata not in _on_host:
        _on_host[storage._cdata] = weakref.finalize(storage, _on_host.pop, storage._cdata, None)
    return x


def is_on_host(x: Tensor) -> bool:
    """Whether a tensor's memory is known to be the host's."""
    return bool(_on_host) and x.untyped_storage()._cdata in _on_host


def is_used() -> bool:
    """Whether anything is on the host, or is being made there."""
    return _making[0] or bool(_on_host)


def follows(inputs: Sequence[Tensor]) -> bool:
    """Whether what is made of these is made on the host: it is asked for there, or all of them
    are there."""
    return _making[0] or (bool(_on_host) and bool(inputs) and all(map(is_on_host, inputs)))


@contextmanager
def make_on_host() -> Iterator[None]:
    """What is made inside is made on the host."""
    before, _making[0] = _making[0], True
    try:
        yield
    finally:
        _making[0] = before


def empty(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """Uninitialised memory of the host, page-locked where a GPU is to reach it."""
    with make_on_host():
        return put_on_host(torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=pinned))


def store(x: Tensor, device: str = "cpu", read: bool = False) -> Tensor:
    """A copy on the host; `read`: which the host itself reads next, so that it waits for the
    copy."""
    return finish_store(start_store(x, device), device, read)


def fetch(x: Tensor, device: str = "cpu") -> Tensor:
    """A copy on the device, of what is on the host."""
    return finish_fetch(start_fetch(x, device), device)


def start_store(x: Tensor, device: str = "cpu") -> Started:
    x = x.resolve_conj().resolve_neg().contiguous()
    come = empty(x.shape, x.dtype, pinned=device == "cuda")
    return [come, x, _record_copy(come, x, x.device, "store")]


def finish_store(started: Started, device: str = "cpu", read: bool = False) -> Tensor:
    if read and started[-1] is not None:
        started[-1].synchronize()
    return _await_copy(started)


def start_fetch(x: Tensor, device: str = "cpu") -> Started:
    x = x.resolve_conj().resolve_neg()
    come = torch.empty(x.shape, dtype=x.dtype, device=device)
    return [come, x, _record_copy(come, x, come.device, "fetch")]


def finish_fetch(started: Started, device: str = "cpu") -> Tensor:
    return _await_copy(started)


def _record_copy(
    come: Tensor, sent: Tensor, device: torch.device, way: str
) -> torch.cuda.Event | None:
    """The event of the copy on a GPU; elsewhere it is done."""
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
    """What came; what was sent is let go, which the current stream may only free after the copy."""
    come, _, copied = started
    if copied is not None:
        torch.cuda.current_stream().wait_event(copied)
    started.clear()
    result: Tensor = come
    return result


@cache
def _stream(device: torch.device, way: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
