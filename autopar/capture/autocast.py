"""`torch.autocast` with the behaviour of CUDA for tensors on the CPU: for captures, whose tensors
are all on the CPU, and for a plain model on the CPU.

A capture cannot determine which device type the autocast of a model is intended for. Its tensors
are on the CPU even if the model is on a GPU, so ``torch.autocast(x.device.type)`` receives
``"cpu"``. Therefore, within `gpu_autocast`, ``cuda`` and ``cpu`` share one autocast state. The
intended device determines which ops are cast. If ``cuda`` autocast is entered, around the call or
in forward, or the model is on a GPU, the ops of CUDA autocast are cast. Otherwise those of CPU
autocast are cast. This module contains torch's op lists for CUDA, which differ from those for the
CPU: softmax, norms, losses, powers and sums run in float32 on GPUs only.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.amp import autocast_mode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.core.autocast_state import KINDS
from autopar.errors import CaptureError

# --------------------------------------------------------------------------------------------------
# The casts of CUDA autocast, op by op, for tensors on the CPU.
#
# torch implements the casts as kernels under one dispatch key per device type. The kernels of CUDA
# autocast only cast CUDA tensors, so equivalent kernels are registered temporarily under the key of
# the CPU. The registration affects the whole process.

_Kernel = Callable[..., Any]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names of ops without overloads, from aten/src/ATen/autocast_mode.h of torch 2.13;
# linalg_matrix_sqrth is from 2.15. `_kernels` uses those that exist in the installed torch.
_LOWER = _words(
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d"
    " convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul"
    " einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot"
    " _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
    " _scaled_dot_product_flash_attention scaled_dot_product_attention"
)
_FP32 = _words(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus"
    " layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm"
    " cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d"
    " hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss"
    " multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss"
    " binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d"
    " _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d"
    " _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa"
    " upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth"
)
_FP32_RESULT = _words(
    "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"
)
_WITH_FP32_RESULT = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
_WIDEST = _words(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
    " stack cat"
)
_REFUSED = frozenset({"binary_cross_entropy"})
# On a GPU, a recurrent layer is one cuDNN op, which is cast as a whole. On the CPU, it consists of
# several ops, which would be cast one by one.
_RECURRENT = tuple(
    f"{cell}.{form}"
    for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for form in ("input", "data")
)


@contextmanager
def casting_as_cuda() -> Iterator[None]:
    """Make CPU autocast cast the ops that CUDA autocast casts, to the same dtypes."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "(?s).*previously registered kernel"
            )  # the registration is intended
            for name, kernel in _kernels().items():
                library.impl(name, kernel, "AutocastCPU")
        yield
    finally:
        library._destroy()


@functools.cache
def _kernels() -> dict[str, _Kernel]:
    """Return the autocast kernel of each op; ops that only CPU autocast casts fall through."""
    there, here = (
        set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
        for key in ("AutocastCUDA", "AutocastCPU")
    )
    there |= {f"aten::{name}" for name in _RECURRENT}
    names = sorted(
        name.removeprefix("aten::") for name in there | here if name.startswith("aten::")
    )
    return {
        name: _kernel(name) if f"aten::{name}" in there else torch.library.fallthrough_kernel
        for name in names
    }


def _kernel(name: str) -> _Kernel:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    if name in _RECURRENT or packet in _LOWER:
        return _cast_to(op, lambda: torch.get_autocast_dtype("cpu"))
    if packet in _FP32:
        return _cast_to(op, lambda: torch.float32)
    if name in _WITH_FP32_RESULT:
        return _with_fp32_result(getattr(torch.ops.aten.norm, _WITH_FP32_RESULT[name]))
    if packet in _FP32_RESULT:
        return _fp32_result(op)
    if packet in _WIDEST:
        return _cast_to_widest(op)
    return _refusal(name)


def _cast_to(op: _Kernel, dtype: Callable[[], torch.dtype]) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        """Run the op with floating operands in one dtype."""
        return _call_outside(op, args, kwargs, dtype())

    return kernel


def _cast_to_widest(op: _Kernel) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        """Run the op with floating operands in the widest of their dtypes."""
        dtypes = [leaf.dtype for leaf in tree_leaves((args, kwargs)) if _is_cast(leaf)]
        return _call_outside(
            op,
            args,
            kwargs,
            functools.reduce(torch.promote_types, dtypes, torch.get_autocast_dtype("cpu")),
        )

    return kernel


def _fp32_result(op: Any) -> _Kernel:
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        """Run the op with a float32 result, unless its caller passes a dtype."""
        dtype = args[position] if len(args) > position else kwargs.get("dtype")
        if dtype is None and _is_cast(args[0]):
            args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
        return _call_outside(op, args, kwargs, None)

    return kernel


def _with_fp32_result(op: Any) -> _Kernel:
    """Return the kernel of a norm that calls `op`, the overload with a dtype; missing arguments
    have the defaults of the schema."""
    defaults = {"p": 2, "keepdim": False}
    positional = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        """Run the norm with a float32 result for operands that autocast would cast."""
        named = {**defaults, **dict(zip(positional, args, strict=False)), **kwargs}
        dtype = torch.float32 if _is_cast(args[0]) else args[0].dtype
        return _call_outside(op, tuple(named[name] for name in positional), {"dtype": dtype}, None)

    return kernel


def _refusal(name: str) -> _Kernel:
    known = (
        "torch does not support it under autocast, since its operand may be rounded to 1; use"
        " binary_cross_entropy_with_logits"
    )
    reason = known if name in _REFUSED else "autopar does not know how it is cast"

    def kernel(*_: Any, **__: Any) -> Any:
        """Raise an error: autopar has no autocast kernel for this op."""
        raise RuntimeError(f"{name} under torch.autocast('cuda'): {reason}")

    return kernel


def _call_outside(
    op: _Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
) -> Any:
    """Call `op` outside autocast, with operands cast to `dtype`."""
    with torch._C._DisableAutocast():
        if dtype is not None:
            args, kwargs = tree_map(
                lambda leaf: leaf.to(dtype) if _is_cast(leaf) else leaf, (args, kwargs)
            )
        return op(*args, **kwargs)


def _is_cast(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and value.device.type == "cpu"
    )


_DISABLED = (
    "the model enters a disabled torch.autocast('cuda') with dtype %s. torch disables autocast"
    " contexts that are created outside of forward, such as decorators, if there is no GPU: write"
    " `with torch.autocast(...)` in forward to plan without a GPU"
)
log = logging.getLogger("autopar")


@contextmanager
def gpu_autocast(on_gpu: bool) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Make ``cuda`` autocast, entered around the call or within it, cast tensors on the CPU (see
    the module docstring).

    Args:
        on_gpu: whether the tensors represent tensors on a GPU.

    Yields:
        A function that creates a context for backward, which users run outside autocast. If code in
        backward enters autocast again, as activation checkpoints do, it is intended for the same
        device as in forward.

    Raises:
        CaptureError: autocast of both device types is active, with different dtypes.
    """
    around = [kind for kind in KINDS if torch.is_autocast_enabled(kind)]
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in around}
    if not on_gpu and len(set(dtypes.values())) > 1:
        raise CaptureError(
            f"torch.autocast is active for two device types with different dtypes: {dtypes}",
            remedy="enter only the torch.autocast of the device that the model is planned for",
        )
    meant = "cuda" if on_gpu or "cuda" in around else "cpu"
    autocast = torch.autocast
    with ExitStack() as stack, _Lists() as lists:
        if around:
            for kind in KINDS:  # set directly: torch.autocast("cuda") needs a GPU
                stack.enter_context(
                    _state(
                        kind, meant in around, dtypes.get(meant, torch.get_autocast_dtype(meant))
                    )
                )
        if meant == "cuda":
            stack.enter_context(lists.use_gpu_lists())
        stack.enter_context(
            mock.patch.object(autocast, "__init__", _accept_any_device(autocast.__init__))
        )
        stack.enter_context(
            mock.patch.object(autocast, "__enter__", lists.wrap_enter(autocast.__enter__))
        )
        stack.enter_context(
            mock.patch.object(autocast, "__exit__", lists.wrap_exit(autocast.__exit__))
        )
        stack.enter_context(
            mock.patch.object(autocast_mode, "_cast", _cast_anywhere(autocast_mode._cast))
        )
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


def _accept_any_device(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `torch.autocast.__init__` so that it does not check which devices are available."""

    @functools.wraps(init)
    def initialize(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        elsewhere = device_type == "cuda"
        init(self, device_type, dtype, enabled and not elsewhere, cache_enabled)
        self._enabled = enabled if elsewhere else self._enabled

    return initialize


def tell_of_disabled(graph: fx.Graph) -> None:
    """Warn if a captured model enters a disabled ``cuda`` autocast with a dtype on a machine
    without a GPU."""
    entered = [
        node.args
        for node in graph.nodes
        if node.target is autocast_mode._enter_autocast and not torch.cuda.is_available()
    ]
    for kind, dtype, enabled, *_ in entered:
        if kind == "cuda" and dtype is not None and not enabled:
            log.warning(_DISABLED, dtype)
            return


def _cast_anywhere(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the cast of `torch.amp.custom_fwd` so that a cast for ``cuda`` also casts tensors on the
    CPU."""
    return lambda value, device_type, dtype: cast(
        value, "cpu" if device_type == "cuda" else device_type, dtype
    )


class _Lists:
    """The op lists in use: those of CUDA while any active autocast is intended for a GPU, else
    those of the CPU."""

    def __init__(self) -> None:
        self._num_meaning_gpu, self._meant_gpu = 0, False
        self._held = ExitStack()
        self._entered: dict[int, tuple[Any, ExitStack]] = {}

    def __enter__(self) -> _Lists:
        return self

    def __exit__(self, *_: Any) -> None:
        self._held.close()

    @contextmanager
    def use_gpu_lists(self) -> Iterator[None]:
        """Use the lists of CUDA until every such context has exited."""
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
        """Disable autocast; autocast that is entered within is intended for the same device as in
        forward."""
        with ExitStack() as stack:
            for kind in KINDS:
                stack.enter_context(_state(kind, False, torch.get_autocast_dtype(kind)))
            if self._meant_gpu:
                stack.enter_context(self.use_gpu_lists())
            yield

    def wrap_enter(self, enter: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `torch.autocast.__enter__` so that it sets the state of both device types."""

        def enter_both(context: Any) -> Any:
            """Enter the context for the other device type, then for its own."""
            if context.device not in KINDS:
                return enter(context)
            stack = ExitStack()
            other = next(kind for kind in KINDS if kind != context.device)
            stack.enter_context(_state(other, context._enabled, context.fast_dtype))
            if context.device == "cuda" and context._enabled:
                stack.enter_context(self.use_gpu_lists())
            self._entered[id(context)] = (context, stack)
            return enter(context)

        return enter_both

    def wrap_exit(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `torch.autocast.__exit__` so that it restores the state of both device types."""

        def exit_both(context: Any, *error: Any) -> Any:
            """Exit the context for both device types."""
            result = leave(context, *error)
            _, stack = self._entered.pop(id(context), (None, ExitStack()))
            stack.close()
            return result

        return exit_both
