"""The compiled kernels, which are loaded with ctypes. Only this module declares their C signatures.

``host()`` and ``cuda()`` return the library, which they build if it is not in the cache, or None.
If they return None, ``why_not(kind)`` returns the reason, and ops run their reference
implementations in torch. `launch` calls a kernel by its name without ``_host`` or ``_cuda``.

The environment variable ``AUTOPAR_KERNELS`` selects a variant: ``reference`` always runs the
reference implementations; ``debug`` loads the variant in which waits have a time-out; ``emulated``
runs device code on the CPU, slowly, for tests.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache

import torch
from torch import Tensor

from autopar.errors import KernelError

_P, _I, _L, _U, _D = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64, ctypes.c_double


class NativeShards(ctypes.Structure):
    """`ap::Shards` of include/shards.h; passed by value."""

    _fields_ = [(name, _L) for name in ("outer", "rows", "row_bytes", "size", "rank", "num_chunks")]


class NativeRoutes(ctypes.Structure):
    """`ap::Routes` of include/routes.h; passed by value."""

    _fields_ = [
        (name, _L)
        for name in ("tokens", "choices", "row_bytes", "num_experts", "size", "rank", "most")
    ]


# The types of the arguments of each C function. All functions return an int status. `_P` is an
# address, `_L` a number of elements. The last argument of functions that end in _cuda is the
# stream; that of multi-threaded functions that end in _host is the number of threads.
SIGNATURES: Mapping[str, tuple[type, ...]] = {
    "ap_epoch_signal_host": (_P, _U),
    "ap_epoch_signal_cuda": (_P, _U, _P),
    "ap_epoch_wait_host": (_P, _U),
    "ap_epoch_wait_cuda": (_P, _U, _P, _P),
    "ap_epoch_refused_cuda": (_P,),
    "ap_pack_bucket_host": (_P, _L, _P, _I, _L, _L, _L, _L, _L, _D, _P, _P, _I),
    "ap_pack_bucket_cuda": (_P, _L, _P, _I, _L, _L, _L, _L, _L, _D, _P, _P, _P),
    "ap_unpack_bucket_host": (_P, _L, _P, _I, _L, _L, _L, _L, _L, _D, _I),
    "ap_unpack_bucket_cuda": (_P, _L, _P, _I, _L, _L, _L, _L, _L, _D, _P),
    "ap_reduce_add_rmsnorm_forward_host": (_P, _I, _P, _P, _P, _P, _P, _I, _L, _L, _D, _I, _I),
    "ap_reduce_add_rmsnorm_forward_cuda": (_P, _I, _P, _P, _P, _P, _P, _I, _L, _L, _D, _I, _P),
    "ap_reduce_add_rmsnorm_backward_host": (_P, _P, _P, _P, _P, _P, _P, _P, _I, _L, _L, _D, _I),
    "ap_reduce_add_rmsnorm_backward_cuda": (_P, _P, _P, _P, _P, _P, _P, _P, _I, _L, _L, _D, _P),
    "ap_all_gather_matmul_publish_host": (_P, _P, _P, _P, NativeShards, _U),
    "ap_all_gather_matmul_publish_cuda": (_P, _P, _P, _P, NativeShards, _U, _P),
    "ap_all_gather_matmul_pull_host": (_P, _P, _P, NativeShards, _U),
    "ap_all_gather_matmul_pull_cuda": (_P, _P, _P, NativeShards, _U, _P),
    "ap_all_gather_matmul_pull_by_blocks_cuda": (_P, _P, _P, NativeShards, _U, _L, _D, _P),
    "ap_all_gather_matmul_wait_host": (_P, NativeShards, _L, _L, _U),
    "ap_all_gather_matmul_wait_cuda": (_P, NativeShards, _L, _L, _U, _P),
    "ap_all_gather_matmul_order_host": (_P, NativeShards),
    "ap_all_gather_matmul_sizes_host": (_P, NativeShards),
    "ap_matmul_reduce_scatter_produced_host": (_P, NativeShards, _L, _L, _U),
    "ap_matmul_reduce_scatter_produced_cuda": (_P, NativeShards, _L, _L, _U, _P),
    "ap_matmul_reduce_scatter_push_host": (_P, _P, _P, NativeShards, _U),
    "ap_matmul_reduce_scatter_push_cuda": (_P, _P, _P, NativeShards, _U, _P),
    "ap_matmul_reduce_scatter_push_by_blocks_cuda": (_P, _P, _P, NativeShards, _U, _L, _D, _P),
    "ap_matmul_reduce_scatter_arrive_host": (_P, NativeShards, _U),
    "ap_matmul_reduce_scatter_arrive_cuda": (_P, NativeShards, _U, _P),
    "ap_matmul_reduce_scatter_reduce_host": (_P, _P, _L, _I, NativeShards, _U),
    "ap_matmul_reduce_scatter_reduce_cuda": (_P, _P, _L, _I, NativeShards, _U, _P),
    "ap_matmul_reduce_scatter_order_host": (_P, NativeShards),
    "ap_matmul_reduce_scatter_sizes_host": (_P, NativeShards, _U),
    "ap_moe_dispatch_announce_host": (_P, _P, _P, _P, _P, NativeRoutes, _U),
    "ap_moe_dispatch_announce_cuda": (_P, _P, _P, _P, _P, NativeRoutes, _U, _P),
    "ap_moe_dispatch_push_host": (*(_P,) * 6, _P, _P, NativeRoutes, _U),
    "ap_moe_dispatch_push_cuda": (*(_P,) * 6, _P, _P, NativeRoutes, _U, _P),
    "ap_moe_dispatch_collect_host": (_P, _P, _P, _P, NativeRoutes, _U),
    "ap_moe_dispatch_collect_cuda": (_P, _P, _P, _P, NativeRoutes, _U, _P),
    "ap_moe_combine_push_host": (_P, _P, _P, _P, NativeRoutes, _U),
    "ap_moe_combine_push_cuda": (_P, _P, _P, _P, NativeRoutes, _U, _P),
    "ap_moe_combine_sum_host": (_P, _P, _P, _P, _I, _P, _P, NativeRoutes, _U),
    "ap_moe_combine_sum_cuda": (_P, _P, _P, _P, _I, _P, _P, NativeRoutes, _U, _P),
    "ap_moe_sizes_host": (_P, NativeRoutes),
    "ap_expert_rows_announce_host": (_P, _P, _P, NativeRoutes, _U),
    "ap_expert_rows_announce_cuda": (_P, _P, _P, NativeRoutes, _U, _P),
    "ap_expert_rows_table_host": (_P, _P, _P, NativeRoutes, _U),
    "ap_expert_rows_table_cuda": (_P, _P, _P, NativeRoutes, _U, _P),
    "ap_expert_rows_push_host": (_P, _P, _P, _P, _P, NativeRoutes, _U),
    "ap_expert_rows_push_cuda": (_P, _P, _P, _P, _P, NativeRoutes, _U, _P),
    "ap_expert_rows_return_host": (_P, _P, _P, _P, NativeRoutes, _U),
    "ap_expert_rows_return_cuda": (_P, _P, _P, _P, NativeRoutes, _U, _P),
    "ap_expert_rows_await_host": (_P, _P, NativeRoutes, _U),
    "ap_expert_rows_await_cuda": (_P, _P, NativeRoutes, _U, _P),
    "ap_expert_rows_sizes_host": (_P, NativeRoutes),
    "ap_row_norm_cuda": (_P, _P, _P, _P, _I, _L, _L, _L, _D, _I, _P),
    "ap_row_product_cuda": (_P, _P, _P, _P, _I, _L, _L, _P),
    "ap_row_norm_backward_cuda": (_P, _P, _P, _P, _P, _P, _I, _L, _L, _L, _D, _P),
    "ap_row_weight_gradient_cuda": (_P, _P, _P, _P, _P, _I, _L, _L, _L, _D, _P),
    "ap_sum_exp_cuda": (_P, _P, _P, _I, _L, _L, _P),
    "ap_cross_entropy_backward_cuda": (_P, _P, _P, _P, _P, _P, _I, _L, _L, _L, _P),
}
STATUS = {1: "an argument was refused", 2: "a wait for a signal timed out", 3: "the launch failed"}
TIMED_OUT = 2
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
"""Dtypes in the order of their numbers in C."""
FLOATS = DTYPES[:4]
_LOG = logging.getLogger(__name__)


def host() -> ctypes.CDLL | None:
    """Return the library for the CPU, or None."""
    return _load_library("host", _variant())[0]


def cuda() -> ctypes.CDLL | None:
    """Return the library for CUDA devices, or None."""
    return _load_library("cuda", _variant())[0]


def why_not(kind: str = "host") -> str:
    """Return the reason why there is no library for ``host`` or ``cuda``; empty if there is a
    library."""
    return _load_library(kind, _variant())[1]


def forget() -> None:
    """Forget loaded libraries, so that the next call looks for them again. Call this after changes
    of the environment."""
    _load_library.cache_clear()


def has(device: torch.device) -> bool:
    """Return whether there are kernels for tensors on `device`. If not, the reason is logged
    once."""
    return (
        device.type in ("cpu", "cuda")
        and _load_library("host" if device.type == "cpu" else "cuda", _variant())[0] is not None
    )


def launch(kernel: str, device: torch.device, *arguments: object) -> None:
    """Call ``kernel_host`` with the number of torch's threads as the last argument, or
    ``kernel_cuda`` with the current stream as the last argument.

    Args:
        kernel: the name of the kernel without ``_host`` or ``_cuda``.
        device: the device of the tensors.
        arguments: the other arguments.

    Raises:
        KernelError: if the kernel returns an error.
    """
    if device.type == "cpu" and _variant() == "emulated":
        status = function("host", f"{kernel}_cuda")(*arguments, None)
    elif device.type == "cpu":
        status = function("host", f"{kernel}_host")(*arguments, torch.get_num_threads())
    else:
        with torch.cuda.device(device):
            status = function("cuda", f"{kernel}_cuda")(
                *arguments, torch.cuda.current_stream(device).cuda_stream
            )
    check(status, kernel)


def step(kind: str, name: str, stream: int | None = None) -> Callable[..., None]:
    """Return a function of a protocol (`autopar.kernels.peers`). It raises KernelError if its
    status is an error.

    Args:
        kind: ``host`` or ``cuda``.
        name: the name of the C function without ``ap_`` and its suffix.
        stream: the CUDA stream on which it is enqueued.

    Raises:
        KernelError: see `function` and `check`.
    """
    native = function(kind, f"ap_{name}_{'cuda' if on_device(kind) else 'host'}")
    last = (stream,) if on_device(kind) else ()
    return lambda *arguments: check(native(*arguments, *last), name)


def function(kind: str, name: str) -> Callable[..., int]:
    """Return a C function of the library for ``host`` or ``cuda``.

    Raises:
        KernelError: if there is no library.
    """
    library, reason = _load_library(kind, _variant())
    if library is None:
        raise KernelError(f"{name} is not available: {reason}", remedy="call the reference instead")
    return getattr(library, name)


def on_device(kind: str) -> bool:
    """Return whether device code runs, possibly emulated."""
    return kind == "cuda" or _variant() == "emulated"


def num_refused(kind: str) -> int:
    """Return the number of signals and waits that ran as kernels, because the driver does not
    support them as stream operations."""
    count = ctypes.c_uint64()
    check(function(kind, "ap_epoch_refused_cuda")(ctypes.byref(count)), "epoch_refused")
    return count.value


def check(status: int, kernel: str) -> None:
    """Check the status of a C function.

    Args:
        status: the status.
        kernel: the name of the function, for the message.

    Raises:
        KernelError: if the status is not 0.
    """
    if status:
        file = (
            "include/epoch.h: a producer did not signal"
            if status == TIMED_OUT
            else "the top of the kernel's file"
        )
        remedy = f"see autopar_csrc, {file}"
        raise KernelError(f"{kernel}: {STATUS.get(status, f'status {status}')}", remedy=remedy)


def code_of(dtype: torch.dtype) -> int:
    """Return the number of a dtype in C.

    Raises:
        KernelError: if kernels do not support the dtype.
    """
    if dtype not in DTYPES:
        raise KernelError(
            f"kernels do not support {dtype}", remedy=f"use one of {', '.join(map(str, DTYPES))}"
        )
    return DTYPES.index(dtype)


def wide(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels compute: fp64 if one of `dtypes` is fp64, otherwise
    fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def table(rows: Iterable[int], device: torch.device) -> Tensor:
    """Return integers, such as addresses, as a 1-d int64 tensor on `device`."""
    tensor = torch.tensor(list(rows), dtype=torch.int64)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _variant() -> str:
    return os.environ.get("AUTOPAR_KERNELS") or "release"


_LEAST = (8, 0)  # the oldest compiled architecture; later ones can use its PTX


@cache
def _load_library(kind: str, variant: str) -> tuple[ctypes.CDLL | None, str]:
    """Return the library and an empty reason, or None and the reason."""
    if variant == "reference":
        return None, "AUTOPAR_KERNELS=reference selects the torch reference implementations"
    if (
        kind == "cuda"
        and torch.cuda.is_available()
        and (has := torch.cuda.get_device_capability()) < _LEAST
    ):
        reason = (
            f"they require GPUs of compute capability {_LEAST[0]}.{_LEAST[1]} or later, but this"
            f" one has {has[0]}.{has[1]}"
        )
        _LOG.warning(
            ("autopar's %s kernels are replaced by torch reference implementations: %s"),
            kind,
            reason,
        )
        return None, reason
    from autopar.kernels.build import (
        # imported here, since `build` is also a command and must not be imported with the package
        build_library,
    )

    try:
        library = ctypes.CDLL(str(build_library(kind, variant).path))
    except (KernelError, OSError) as error:
        reason = f"{error.what} ({error.remedy})" if isinstance(error, KernelError) else str(error)
        _LOG.warning(
            ("autopar's %s kernels are replaced by torch reference implementations: %s"),
            kind,
            reason,
        )
        return None, reason
    for name, types in SIGNATURES.items():
        if hasattr(library, name):
            function = getattr(library, name)
            function.argtypes, function.restype = types, _I
    return library, ""
