"""Captures from the cache on disk, and the record of the captures that a plan was made from."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from autopar.cache.entries import Key, load_trace, recorded_warnings, save_trace
from autopar.cache.walk import Opaque
from autopar.capture import Trace, capture
from autopar.core.private_folder import is_cache_on

log = logging.getLogger("autopar")
_USES_CACHE: ContextVar[bool] = ContextVar("captures are cached", default=False)
_RECORDED: ContextVar[list[Trace] | None] = ContextVar("recorded captures", default=None)


def capture_or_load(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    precision: torch.dtype | None,
    *,
    inference: bool,
) -> Trace:
    """Capture a call, or load its capture from the cache if `captures_cached` allows it.

    Args:
        model: the plain model.
        args, kwargs: the call; values are not read.
        precision: dtype to which wider parameters are cast for use; None to keep their dtypes.
        inference: whether to capture forward only.

    Raises:
        CaptureError: if the call cannot be captured.
    """
    key = None
    if _USES_CACHE.get():
        key = _key_of(model, args, kwargs, (precision, inference))
    trace = None if key is None else load_trace(key, model)
    if trace is None:
        with recorded_warnings() as messages:
            trace = capture(model, args, kwargs, precision=precision, inference=inference)
        if key is not None:
            save_trace(key, type(model).__name__, trace, messages)
    if (recorded := _RECORDED.get()) is not None:
        recorded.append(trace)
    return trace


def _key_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: tuple[Any, ...]
) -> Key | None:
    """Return the cache key of a capture; None if it cannot be cached, which is logged."""
    try:
        return Key.of("capture", model, args, kwargs, options)
    except Opaque as reason:
        log.debug("cache of captures not used: %s", reason)
        return None


@contextlib.contextmanager
def captures_cached(*, use: bool) -> Iterator[None]:
    """Let `trace_call` load captures from the cache on disk, and store new ones.

    Args:
        use: value of the option; nothing is cached if it is False, or if the environment turns the
            cache off.
    """
    token = _USES_CACHE.set(use and is_cache_on("plans"))
    try:
        yield
    finally:
        _USES_CACHE.reset(token)


@contextlib.contextmanager
def recorded_captures() -> Iterator[list[Trace]]:
    """Record the captures that `trace_call` makes."""
    traces: list[Trace] = []
    token = _RECORDED.set(traces)
    try:
        yield traces
    finally:
        _RECORDED.reset(token)
