"""Refuse tensors that programs do not support: sparse, nested, quantized and tensor subclasses.

A program is planned for dense tensors of class `torch.Tensor`, which store their elements by
strides. Errors about other kinds name the kind and an alternative. A capture checks the arguments,
the parameters and the buffers (`refuse_state_and_inputs`) and the tensors that forward creates
(`refusal_in_words`, `autopar.capture.refused_ops`). Each later call checks its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.capture.dynamo.fakes import is_fake
from autopar.errors import CaptureError, Where

_PROGRAMS = "programs support only dense torch.Tensor values"
_SPARSE = (
    "compute with dense tensors: pass `a.to_dense()`; or pass its indices and values (`a ="
    " a.to_sparse_coo().coalesce()`, `rows, columns = a.indices()`, `values = a.values()`) and"
    " compute `a @ x` as `x.new_zeros(num_rows, x.shape[1]).index_add(0, rows, values.unsqueeze(1)"
    " * x[columns])`"
)
_NESTED = (
    "compute with padded tensors: pass `torch.nested.to_padded_tensor(x, 0.0)` and a mask, and"
    " multiply by the mask before sums over rows"
)
_MASKED = (
    "use its data and its mask as two tensors, `x.get_data()` and `x.get_mask()`, with torch.where"
)
_OPAQUE = "use a tensor in torch's default layout: `x.to_dense()`"


@dataclass(frozen=True, slots=True)
class TensorKind:
    """A kind of tensor that is refused: its name in messages, and what to use instead."""

    name: str
    remedy: str


def unusual_kind(x: Tensor) -> TensorKind | None:
    """Return the kind of `x` if programs do not support it; None for dense tensors of class
    `torch.Tensor`."""
    if x.is_nested:
        return TensorKind(
            "a nested tensor (torch.nested), whose rows have different lengths", _NESTED
        )
    if type(x).__name__ == "MaskedTensor":
        return TensorKind("a masked tensor (torch.masked)", _MASKED)
    if x.layout is torch._mkldnn:
        return TensorKind("a tensor in the mkldnn layout", _OPAQUE)
    if x.layout is not torch.strided:
        return TensorKind(f"a sparse tensor ({x.layout})", _SPARSE)
    if x.is_quantized:
        return TensorKind(
            f"a quantized tensor ({x.dtype})", "use the dequantized values: `x.dequantize()`"
        )
    if not _is_torchs_class(x):
        return TensorKind(
            f"a {type(x).__name__}, a subclass of torch.Tensor, whose methods a program does not"
            " call",
            "use the plain tensor: `x.as_subclass(torch.Tensor)`, or `x.full_tensor()` for a"
            " DTensor",
        )
    return None


def _is_torchs_class(x: Tensor) -> bool:
    kind = type(x)
    if kind in (Tensor, nn.Parameter, nn.Buffer) or is_fake(x):
        return True
    methods = ("__torch_function__", "__torch_dispatch__")
    return issubclass(kind, nn.Parameter) and not any(
        name in vars(base) for base in _own_bases(kind) for name in methods
    )


def _own_bases(kind: type) -> Iterable[type]:
    return kind.__mro__[: kind.__mro__.index(nn.Parameter)]


def refuse_state_and_inputs(model: nn.Module, inputs: Iterable[tuple[str, object]]) -> None:
    """Raise CaptureError at the first parameter, buffer or argument that programs do not support.

    Args:
        inputs: (name, value) of each leaf of the call.
    """
    parameters = [
        ("parameter", name, x)
        for name, x in model.named_parameters()
        if not nn.parameter.is_lazy(x)
    ]
    for role, name, x in (*parameters, *(("buffer", *each) for each in model.named_buffers())):
        _refuse(f"the {role} {name!r}", unusual_kind(x) or _conjugate(x), name.rpartition(".")[0])
    for name, value in inputs:
        if isinstance(value, Tensor):
            _refuse(f"the input {name!r}", unusual_kind(value), "")


def _conjugate(x: Tensor) -> TensorKind | None:
    """Return a kind for a conjugated or negated view: collectives would send the values of its
    base."""
    if not (x.is_conj() or x.is_neg()):
        return None
    return TensorKind(
        "a conjugated or negated view",
        "store the values instead of a view: `x.resolve_conj().resolve_neg()`",
    )


def _refuse(name: str, kind: TensorKind | None, module: str) -> None:
    if kind is not None:
        raise CaptureError(
            f"{name} is {kind.name}: {_PROGRAMS}", where=Where(module=module), remedy=kind.remedy
        )


def refusal_in_words(text: str, source: str) -> CaptureError | None:
    """Return the error if torch failed to create an unsupported tensor without data; None for other
    messages.

    Args:
        text: torch's message.
        source: the user's line.
    """
    kind = next((kind for pattern, kind in _PATTERNS if pattern.search(text)), None)
    return None if kind is None else of_forward(kind, Where(source=source))


def of_forward(kind: TensorKind, where: Where) -> CaptureError:
    """Return the error for an unsupported tensor that forward creates, or reads without receiving
    it as an argument."""
    return CaptureError(
        f"forward computes with {kind.name}: {_PROGRAMS}", where=where, remedy=kind.remedy
    )


def is_of_kinds(refusal: CaptureError) -> bool:
    """Return whether an error refuses a kind of tensor."""
    return refusal.what.endswith(_PROGRAMS)


_PATTERNS = (
    (
        re.compile(
            r"wrap sparse Tensor|SparseC\w+Impl|SparseTensorImpl|sparse tensor"
            r" creation|\bsparse_\w+_tensor\b"
        ),
        TensorKind("a sparse tensor", _SPARSE),
    ),
    (
        re.compile(r"aten\._nested|nested_tensor|NestedTensorImpl"),
        TensorKind("a nested tensor (torch.nested)", _NESTED),
    ),
    (re.compile(r"OpaqueTensorImpl"), TensorKind("a tensor in the mkldnn layout", _OPAQUE)),
    (
        re.compile(r"function `(masked_tensor|as_masked_tensor)`"),
        TensorKind("a masked tensor (torch.masked)", _MASKED),
    ),
)
