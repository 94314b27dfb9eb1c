"""Row-wise ops: row i of the result depends only on row i of each operand with these rows, in the
same way for all rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.capture.ragged_rows.rows import first_dim, tensor_of

_ELEMENTWISE = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "true_divide",
        "floordiv",
        "floor_divide",
        "mod",
        "remainder",
        "fmod",
        "pow",
        "neg",
        "pos",
        "abs",
        "absolute",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "log2",
        "log10",
        "sqrt",
        "rsqrt",
        "square",
        "reciprocal",
        "sigmoid",
        "tanh",
        "relu",
        "relu6",
        "gelu",
        "silu",
        "mish",
        "elu",
        "selu",
        "celu",
        "leaky_relu",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "softplus",
        "softsign",
        "logsigmoid",
        "threshold",
        "erf",
        "erfc",
        "erfinv",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "atan2",
        "sinh",
        "cosh",
        "floor",
        "ceil",
        "round",
        "trunc",
        "frac",
        "sign",
        "sgn",
        "clamp",
        "clip",
        "clamp_min",
        "clamp_max",
        "maximum",
        "minimum",
        "where",
        "masked_fill",
        "lerp",
        "addcmul",
        "addcdiv",
        "float",
        "double",
        "half",
        "bfloat16",
        "long",
        "int",
        "short",
        "bool",
        "byte",
        "to",
        "type",
        "type_as",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_xor",
        "logical_not",
        "and_",
        "or_",
        "xor",
        "invert",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "detach",
        "clone",
        "contiguous",
        "isnan",
        "isfinite",
        "isinf",
        "nan_to_num",
        "logit",
        "zeros_like",
        "ones_like",
        "full_like",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ipow",
        "expand_as",
        "copy",
    ]
)
"""Elementwise ops, whose operands are broadcast."""
MAKING = frozenset(("zeros", "ones", "full", "new_zeros", "new_ones", "new_full"))
SHAPING = frozenset(("view", "reshape", "flatten", "expand", "unflatten"))
"""Ops that change shapes, after which the first dim still counts rows or parts of rows."""
SIZED = SHAPING | MAKING | {"repeat"}
"""Ops with sizes among their arguments."""
COMPUTING = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "true_divide",
        "pow",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    ]
)
"""Ops of a tensor and a number, which also accept a tensor instead of the number."""
_DIMS: Mapping[str, tuple[int, str, Any]] = {
    **dict.fromkeys(
        [
            "softmax",
            "log_softmax",
            "softmin",
            "cumsum",
            "cumprod",
            "unsqueeze",
            "squeeze",
            "select",
            "narrow",
            "logsumexp",
            "sum",
            "mean",
            "prod",
            "amax",
            "amin",
            "max",
            "min",
            "argmax",
            "argmin",
            "std",
            "var",
            "all",
            "any",
            "median",
            "count_nonzero",
            "unbind",
        ],
        (1, "dim", 0),
    ),
    **dict.fromkeys(("sort", "argsort", "glu"), (1, "dim", -1)),
    **dict.fromkeys(("topk", "kthvalue", "diff"), (2, "dim", -1)),
    **dict.fromkeys(("normalize", "cosine_similarity"), (2, "dim", 1)),
    **dict.fromkeys(
        ("norm", "vector_norm", "quantile", "repeat_interleave", "chunk", "split"), (2, "dim", 0)
    ),
    "unfold": (1, "dimension", 0),
    "flip": (1, "dims", 0),
    "roll": (2, "dims", 0),
}
"""Name → (position, name, default) of the argument with the dim that the op works along. The
default 0 also means all dims."""
_ALONG_ALL = {"cat": 0, "stack": 0, "gather": 1, "take_along_dim": 2}
"""Name → default dim of ops that work along a dim of several operands, all of which must have the
rows."""
_FIRST = {"linear": 2, "bilinear": 2, "layer_norm": 2, "rms_norm": 2, "embedding": 1, "one_hot": 1}
_IMAGES = {
    **{
        f"{name}{n}d": n + 2
        for n in (1, 2, 3)
        for name in ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool")
    },
    "group_norm": 2,
    "pixel_shuffle": 4,
    "interpolate": 3,
    "pad": 2,
}
"""Name → least rank of the first operand at which its first dim is the samples. Only the first
operand may have rows."""


_TAME = frozenset(
    [
        "add",
        "sub",
        "mul",
        "iadd",
        "isub",
        "imul",
        "neg",
        "abs",
        "square",
        "relu",
        "relu6",
        "leaky_relu",
        "gelu",
        "silu",
        "mish",
        "elu",
        "selu",
        "celu",
        "softplus",
        "logsigmoid",
        "sigmoid",
        "tanh",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "softmax",
        "log_softmax",
        "linear",
        "matmul",
        "bmm",
        "einsum",
        "bilinear",
        "layer_norm",
        "group_norm",
        "embedding",
        "one_hot",
        "getitem",
        "index_select",
        "gather",
        "cat",
        "stack",
        "transpose",
        "permute",
        "squeeze",
        "unsqueeze",
        "select",
        "narrow",
        "chunk",
        "split",
        "unbind",
        "float",
        "double",
        "half",
        "bfloat16",
        "long",
        "int",
        "bool",
        "to",
        "type",
        "type_as",
        "clamp",
        "where",
        "masked_fill",
        "detach",
        "clone",
        "contiguous",
        "expand_as",
        "zeros_like",
        "ones_like",
        "full_like",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "and_",
        "or_",
        "invert",
        "sum",
        "mean",
        "any",
        "all",
        "amax",
        "amin",
        "max",
        "min",
        "argmax",
        "argmin",
        "topk",
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy_with_logits",
        "cross_entropy",
        "nll_loss",
        "index_add",
        "index_put",
        "setitem",
        "masked_scatter",
        "masked_select",
        "nonzero",
        "scaled_dot_product_attention",
        "dropout",
        "repeat",
        "ctc_joined.default",
        *_IMAGES,
    ]
)
"""Ops with finite results and finite derivatives for all finite operands."""


def is_tame(node: fx.Node) -> bool:
    """Return whether a row that the model does not compute (such as zeros) cannot cause an error,
    an infinite value or an infinite derivative."""
    name = name_of(node)
    if name in ("truediv", "div", "itruediv"):
        return first_dim(argument(node, 1, "other")) is None
    return name in _TAME or name in SHAPING or name in MAKING


def name_of(node: fx.Node) -> str:
    """Return the name of a function, operator or method, without the underscore of in-place
    forms."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (
        name[:-1]
        if name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_")
        else name
    )


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of `node`, passed by position or by name.

    Args:
        node: a call.
        position: position of the argument.
        name: its keyword.
        default: the result if the argument is not passed.
    """
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def dims_of(node: fx.Node, name: str, rank: int) -> tuple[int, ...] | None:
    """Return the dims that an op of `_DIMS` works along; None if the argument is a tensor.

    Args:
        node: a call of the op.
        name: name of the op, a key of `_DIMS`.
        rank: rank of the first operand.
    """
    position, keyword, default = _DIMS[name]
    dims = argument(node, position, keyword, default)
    dims = default if dims is None else dims
    if isinstance(dims, fx.Node):
        return None
    rank += name == "unsqueeze"
    return tuple(dim % rank for dim in (dims if isinstance(dims, list | tuple) else (dims,)))


_ALWAYS = _ELEMENTWISE | SHAPING | MAKING  # ops that are row-wise for all arguments


def keeps_rows(node: fx.Node) -> bool:
    """Return whether `node` is row-wise; the first dim of its result counts rows."""
    name, operands = name_of(node), [n for n in node.all_input_nodes if tensor_of(n) is not None]
    rows = list(filter(first_dim, operands))
    if name in _ALWAYS:
        return True
    if name in _DIMS and rows and operands[0] in rows:
        return _is_along_others(node, name, operands[0])
    if name in _ALONG_ALL:
        return len(rows) == len(operands) and _is_along_another_dim(node, name, rows)
    if name in _FIRST or name in _IMAGES:
        return rows == operands[:1] and _rank(rows[0]) >= _FIRST.get(name, _IMAGES.get(name, 0))
    special: Callable[[fx.Node, list[fx.Node], list[fx.Node]], bool] | None = _SPECIAL.get(name)
    return special is not None and special(node, operands, rows)


def _is_along_others(node: fx.Node, name: str, operand: fx.Node) -> bool:
    """Return whether an op of `_DIMS` works along dims that do not count rows."""
    dims = dims_of(node, name, _rank(operand))
    return name in ("max", "min") if dims is None else 0 not in dims


def _is_along_another_dim(node: fx.Node, name: str, rows: list[fx.Node]) -> bool:
    """Return whether an op of `_ALONG_ALL` works along a dim that does not count rows."""
    rank = _rank(rows[0]) + (name == "stack")
    dim = argument(node, 2 if name == "take_along_dim" else 1, "dim", _ALONG_ALL[name])
    return isinstance(dim, int) and dim % rank != 0


def _rank(node: fx.Node) -> int:
    tensor = tensor_of(node)
    return 0 if tensor is None else tensor.dim()


def _takes_all(index: Any) -> bool:
    return index is Ellipsis or index == slice(None)


def _getitem(node: fx.Node, operands: list[fx.Node], rows: list[fx.Node]) -> bool:
    """Return whether an index takes all rows, or looks up integer rows in another tensor."""
    source, index = node.args
    if tensor_of(source) is None:
        return True  # one of several results
    indices = index if isinstance(index, tuple) else (index,)
    if source in rows:
        inner = [i for i in indices if isinstance(i, fx.Node)]
        used = sum(i is not None and i is not Ellipsis for i in indices)
        return (
            _takes_all(indices[0])
            and not any(first_dim(i) for i in inner)
            and used < _rank(source) + (indices[0] is not Ellipsis)
        )
    among = [position for position, i in enumerate(indices) if isinstance(i, fx.Node)]
    takes_all_rows = all(
        (tensor := tensor_of(indices[i])) is not None and tensor.dtype in (torch.int64, torch.int32)
        for i in among
    )
    return takes_all_rows and among == list(range(len(among)))


def _index_select(node: fx.Node, operands: list[fx.Node], rows: list[fx.Node]) -> bool:
    dim = argument(node, 1, "dim")
    return (
        dim == 0 and rows == operands[1:]
        if operands[0] not in rows
        else rows == operands[:1] and dim % _rank(operands[0]) != 0
    )


def _matmul(node: fx.Node, operands: list[fx.Node], rows: list[fx.Node]) -> bool:
    left_factor, right = node.args[:2]
    if left_factor in rows and right not in rows:
        return _rank(left_factor) >= 2 and _rank(right) <= 2
    if right in rows and left_factor not in rows:
        return _rank(right) >= 3 and _rank(left_factor) <= 2
    return _rank(left_factor) == _rank(right) >= 3


def _attention(node: fx.Node, operands: list[fx.Node], rows: list[fx.Node]) -> bool:
    mask = argument(node, 3, "attn_mask")
    heads = _rank(node.args[0]) if isinstance(node.args[0], fx.Node) else 0
    fits = mask is None or mask in rows or _rank(mask) < heads
    return (
        heads >= 3
        and fits
        and not argument(node, 4, "dropout_p", 0.0)
        and all(operand in rows for operand in node.args[:3])
    )


def _dropout(node: fx.Node, operands: list[fx.Node], rows: list[fx.Node]) -> bool:
    """Return whether a dropout drops nothing; with all rows instead of the selected ones, other
    elements would be dropped."""
    return argument(node, 1, "p", 0.5) == 0.0 or not argument(node, 2, "training", True)


def _repeat(node: fx.Node, operands: list[fx.Node], rows: list[fx.Node]) -> bool:
    """Return whether a repeat is within rows, or of a tensor without rows; repeated rows would be
    in another order."""
    first = node.args[1][0] if isinstance(node.args[1], tuple | list) else node.args[1]
    return not rows or first == 1


def _einsum(node: fx.Node, operands: list[fx.Node], rows: list[fx.Node]) -> bool:
    inputs, _, output = str(node.args[0]).replace(" ", "").partition("->")
    letters = inputs.split(",")
    if "." in inputs or not output or len(letters) != len(operands):
        return False
    mine = {letter[0] for letter, operand in zip(letters, operands, strict=True) if operand in rows}
    return mine == {output[0]} and all(
        letters[i].count(output[0]) == (operands[i] in rows) for i in range(len(operands))
    )


_SPECIAL: Mapping[str, Callable[[fx.Node, list[fx.Node], list[fx.Node]], bool]] = {
    "getitem": _getitem,
    "index_select": _index_select,
    "matmul": _matmul,
    "bmm": lambda node, operands, rows: rows == operands,
    "scaled_dot_product_attention": _attention,
    "dropout": _dropout,
    "repeat": _repeat,
    "einsum": _einsum,
    "transpose": lambda node, operands, rows: (
        0 not in {dim % _rank(operands[0]) for dim in node.args[1:]} and len(node.args) == 3
    ),
    "permute": lambda node, operands, rows: (
        next(iter(node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:])) == 0
    ),
}
