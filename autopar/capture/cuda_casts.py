"""The casts of CUDA's autocast, op by op, for tensors of the CPU.

torch casts in kernels under a dispatch key per device type. What CUDA's kernels do cannot be had of them, since they cast CUDA tensors
only; so kernels that do the same are put under the CPU's key for a while. They are those of the whole process.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_Kernel = Callable[..., Any]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# By name of the op, overloads aside. From aten/src/ATen/autocast_mode.h of torch 2.13, and as of 2.15 linalg_matrix_sqrth;
# `_kernels` takes those that the torch that runs has.
_LOWER = _words(
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution cudnn_convolution "
    "cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul "
    "linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "_scaled_dot_product_flash_attention scaled_dot_product_attention"
)
_FP32 = _words(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm native_layer_norm rms_norm "
    "group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
    "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
    "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth"
)
_FP32_RESULT = _words("prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum")
_WITH_FP32_RESULT = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
_WIDEST = _words("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add stack cat")
_REFUSED = frozenset({"binary_cross_entropy"})
# On a GPU a recurrent layer is one op of cuDNN's, cast as a whole; on tensors of the CPU it is its parts, which would be cast apart.
_RECURRENT = tuple(f"{cell}.{form}" for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data"))


@contextmanager
def casting_as_cuda() -> Iterator[None]:
    """Let autocast of the CPU cast what that of CUDA casts, to what it casts it."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*previously registered kernel")  # which is what is wanted
            for name, kernel in _kernels().items():
                library.impl(name, kernel, "AutocastCPU")
        yield
    finally:
        library._destroy()


@functools.cache
def _kernels() -> dict[str, _Kernel]:
    """By name of the op, what stands in for its kernel under autocast; fallthrough for what is cast on CPUs alone."""
    there, here = (set(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in ("AutocastCUDA", "AutocastCPU"))
    there |= {f"aten::{name}" for name in _RECURRENT}
    names = sorted(name.removeprefix("aten::") for name in there | here if name.startswith("aten::"))
    return {name: _kernel(name) if f"aten::{name}" in there else torch.library.fallthrough_kernel for name in names}


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
        return _called(op, args, kwargs, dtype())

    return kernel


def _cast_to_widest(op: _Kernel) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtypes = [leaf.dtype for leaf in tree_leaves((args, kwargs)) if _is_cast(leaf)]
        return _called(op, args, kwargs, functools.reduce(torch.promote_types, dtypes, torch.get_autocast_dtype("cpu")))

    return kernel


def _fp32_result(op: Any) -> _Kernel:
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get("dtype")
        if given is None and _is_cast(args[0]):
            args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
        return _called(op, args, kwargs, None)

    return kernel


def _with_fp32_result(op: Any) -> _Kernel:
    """Of a norm whose form without a dtype is another overload; its missing arguments are those that the schema says."""
    defaults = {"p": 2, "keepdim": False}
    positional = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        named = {**defaults, **dict(zip(positional, args, strict=False)), **kwargs}
        dtype = torch.float32 if _is_cast(args[0]) else args[0].dtype
        return _called(op, tuple(named[name] for name in positional), {"dtype": dtype}, None)

    return kernel


def _refusal(name: str) -> _Kernel:
    known = "torch refuses it under autocast: its operand may be rounded to 1; use binary_cross_entropy_with_logits"
    said = known if name in _REFUSED else "what it does there is not known"

    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{name} under torch.autocast('cuda'): {said}")

    return kernel


def _called(op: _Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None) -> Any:
    """`op` outside of autocast, on operands in `dtype`."""
    with torch._C._DisableAutocast():
        if dtype is not None:
            args, kwargs = tree_map(lambda leaf: leaf.to(dtype) if _is_cast(leaf) else leaf, (args, kwargs))
        return op(*args, **kwargs)


def _is_cast(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64 and value.device.type == "cpu"
