"""`torch.autocast` as a GPU would see it, on tensors of the CPU: in capture, which has no others, and for a plain model on a CPU.

Capture cannot tell for which kind of device a model's autocast is meant, since its tensors are on the CPU whatever the model's are: a model
that says ``torch.autocast(x.device.type)`` says ``"cpu"`` there. So while `gpu_autocast` holds, autocast of ``cuda`` and of ``cpu`` are one
state. Which ops it casts depends on who is meant. Where autocast of ``cuda`` was entered, around the call or in forward, or the model is on
a GPU, it is what CUDA's does: `autopar.capture.cuda_casts` has torch's own lists, which differ from the CPU's (softmax, norms, losses,
powers and sums are fp32 on a GPU alone). Else it is what the CPU's does.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.amp import autocast_mode

from autopar.ambient import KINDS
from autopar.capture.cuda_casts import casting_as_cuda
from autopar.errors import CaptureError

_DISABLED = (
    "the model enters a torch.autocast('cuda') to %s that is disabled. If it was made outside of forward, as a decorator is, torch "
    "disabled it for want of a GPU: write `with torch.autocast(...)` in forward to plan without one"
)
log = logging.getLogger("autopar")


@contextmanager
def gpu_autocast(on_gpu: bool) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Let autocast of ``cuda``, around the caller or inside of it, cast tensors of the CPU (see the module).

    Args:
        on_gpu: whether the tensors stand for some on a GPU.

    Yields:
        Makes a context for backward, which users run outside of autocast; what enters it again there, as checkpoints do, means what forward
        meant.

    Raises:
        CaptureError: the caller is under autocast of both kinds of device, to different dtypes.
    """
    around = [kind for kind in KINDS if torch.is_autocast_enabled(kind)]
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in around}
    if not on_gpu and len(set(dtypes.values())) > 1:
        raise CaptureError(
            f"called under torch.autocast of two kinds of device, to different dtypes: {dtypes}",
            remedy="call it under one torch.autocast, that of the device which is meant",
        )
    meant = "cuda" if on_gpu or "cuda" in around else "cpu"
    own = torch.autocast
    with ExitStack() as stack, _Lists() as lists:
        if around:
            for kind in KINDS:  # made by hand: a machine without a GPU gives no autocast of cuda
                stack.enter_context(_state(kind, meant in around, dtypes.get(meant, torch.get_autocast_dtype(meant))))
        if meant == "cuda":
            stack.enter_context(lists.of_gpu())
        stack.enter_context(mock.patch.object(own, "__init__", _made_anywhere(own.__init__)))
        stack.enter_context(mock.patch.object(own, "__enter__", lists.entering(own.__enter__)))
        stack.enter_context(mock.patch.object(own, "__exit__", lists.leaving(own.__exit__)))
        stack.enter_context(mock.patch.object(autocast_mode, "_cast", _cast_anywhere(autocast_mode._cast)))
        yield lists.in_backward


@contextmanager
def _state(kind: str, enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    _set(kind, enabled, dtype)
    try:
        yield
    finally:
        _set(kind, *before)


def _set(kind: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)


def _made_anywhere(init: Callable[..., None]) -> Callable[..., None]:
    """`torch.autocast.__init__` that does not ask which devices are there."""

    @functools.wraps(init)
    def made(
        self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        elsewhere = device_type == "cuda"
        init(self, device_type, dtype, enabled and not elsewhere, cache_enabled)
        self._enabled = enabled if elsewhere else self._enabled

    return made


def tell_of_disabled(graph: fx.Graph) -> None:
    """Warn where a captured model enters autocast of ``cuda`` to some dtype, and it is disabled, on a machine without a GPU."""
    entered = [node.args for node in graph.nodes if node.target is autocast_mode._enter_autocast and not torch.cuda.is_available()]
    for kind, dtype, enabled, *_ in entered:
        if kind == "cuda" and dtype is not None and not enabled:
            log.warning(_DISABLED, dtype)
            return


def _cast_anywhere(cast: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.amp.custom_fwd` casts operands by, on tensors of the CPU, too, where it is for a GPU."""
    return lambda value, device_type, dtype: cast(value, "cpu" if device_type == "cuda" else device_type, dtype)


class _Lists:
    """Whose lists hold: CUDA's, as long as anything that was entered means a GPU."""

    def __init__(self) -> None:
        self._num_meaning_gpu, self._meant_gpu = 0, False
        self._held = ExitStack()
        self._entered: dict[int, tuple[Any, ExitStack]] = {}

    def __enter__(self) -> _Lists:
        return self

    def __exit__(self, *_: Any) -> None:
        self._held.close()

    @contextmanager
    def of_gpu(self) -> Iterator[None]:
        if not self._num_meaning_gpu:
            self._held.enter_context(casting_as_cuda())
        self._num_meaning_gpu, self._meant_gpu = self._num_meaning_gpu + 1, True
        try:
            yield
        finally:
            self._num_meaning_gpu -= 1
            if not self._num_meaning_gpu:
                self._held.close()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Outside of autocast; that of either kind, entered again, means what was meant before."""
        with ExitStack() as stack:
            for kind in KINDS:
                stack.enter_context(_state(kind, False, torch.get_autocast_dtype(kind)))
            if self._meant_gpu:
                stack.enter_context(self.of_gpu())
            yield

    def entering(self, enter: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.autocast.__enter__` that changes the state of both kinds of device."""

        def entered(context: Any) -> Any:
            if context.device not in KINDS:
                return enter(context)
            stack = ExitStack()
            other = next(kind for kind in KINDS if kind != context.device)
            stack.enter_context(_state(other, context._enabled, context.fast_dtype))
            if context.device == "cuda" and context._enabled:
                stack.enter_context(self.of_gpu())
            self._entered[id(context)] = (context, stack)
            return enter(context)

        return entered

    def leaving(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        def left(context: Any, *error: Any) -> Any:
            result = leave(context, *error)
            _, stack = self._entered.pop(id(context), (None, ExitStack()))
            stack.close()
            return result

        return left
