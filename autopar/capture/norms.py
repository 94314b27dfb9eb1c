"""Root-mean-square norms that a model writes out as formulas become one operator, `autopar.ops.normed`.

    u = x.to(W);  r = 1/√(mean(u², −1, keepdim) + ε);  n = (u · r).to(D);  y = (n · weight).to(O)

The casts, and the weight, may be missing. They are looked for before there is a backward, in the graph of torch functions, from r on, and
stay as they are where anything between x and the result writes into a tensor or switches gradients or autocast. Where anything else reads
what lies between, the norm ends before that. ``torch.nn.functional.rms_norm`` over the last dim is the same, with all casts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar import ops
from autopar.capture.functions import Places, erase, float_dtype, name_of, shape_given

_CASTS = frozenset(("to", "type", "type_as", "float", "double", "half", "bfloat16"))
_WRITTEN_WITH = frozenset(("add", "mul", "div", "pow", "square", "sqrt", "rsqrt", "mean", *_CASTS))
_RMS_NORM = ("input", "normalized_shape", "weight", "eps")


@dataclass(frozen=True, slots=True)
class _Norm:
    """One that was found: its operands, its settings (`autopar.ops.rms`), those of its nodes that read x, and the one that gives the
    result."""

    x: fx.Node
    readers: tuple[fx.Node, ...]
    result: fx.Node
    eps: float
    dtype: torch.dtype
    rounded: torch.dtype
    out: torch.dtype
    weight: fx.Node | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        return self.x, self.weight, self.eps, self.dtype, self.rounded, self.out


def join_norms(graph: fx.Graph) -> None:
    """Replace each such norm in a graph of torch functions."""
    places = Places(graph)
    for node in list(graph.nodes):
        found = _called(node) if name_of(node) == "rms_norm" else _written_out(node)
        if found is None or any(places.any_change(reader, found.result) for reader in found.readers):
            continue
        with graph.inserting_before(found.result):
            both = graph.call_function(ops.normed, found.args)
            joined = graph.call_function(operator.getitem, (both, 0))
        both.meta = {name: value for name, value in found.result.meta.items() if name != "example_value"}
        places.put(joined, found.result)
        erase(graph, found.result, _WRITTEN_WITH)


def _called(node: fx.Node) -> _Norm | None:
    given = dict(zip(_RMS_NORM, node.args, strict=False)) | dict(node.kwargs)
    x, eps, weight, dtype = given.get("input"), given.get("eps"), given.get("weight"), float_dtype(given.get("input"))
    if dtype is None or len(tuple(given["normalized_shape"])) != 1 or not isinstance(eps, float) or float_dtype(node) != dtype:
        return None
    wide = torch.promote_types(dtype, torch.float32)
    return _Norm(x, (node,), node, eps, wide, wide, dtype, weight)  # type: ignore[arg-type]


def _written_out(root: fx.Node) -> _Norm | None:
    """The norm whose 1/√(…), or √(…), a node is."""
    summed = _under_root(root)
    mean, eps = _split(summed, "add") if summed is not None else (None, None)
    squares = _mean_of(mean) if mean is not None and isinstance(eps, int | float) else None
    squared = _squared(squares) if squares is not None else None
    dtype = float_dtype(root)
    alike = all(float_dtype(each) == dtype for each in (summed, mean, squares))
    if squares is None or squared is None or dtype is None or float_dtype(squared) is None or not alike:
        return None
    x = _before_cast(squared) if float_dtype(squared) == dtype else squared
    if x is squared and torch.promote_types(_dtype(x), dtype) != dtype:
        return None
    for user in root.users:
        other = _scaled(user, root)
        if other is not None and float_dtype(user) == dtype and (other is squared or _is_cast_of(other, x, dtype)):
            assert isinstance(eps, int | float), "looked at above"
            readers = tuple(node for node in (squared, squares, other, user) if x in node.args)
            return _to_its_end(_Norm(x, readers, user, float(eps), dtype, dtype, dtype))
    return None


def _to_its_end(norm: _Norm) -> _Norm:
    """The norm with the casts and the weight behind it, as far as nothing else reads what lies between, and nothing is rounded twice before
    the weight, or behind it: one cast stands for several only where all but the last lose nothing."""
    exact = norm.dtype.itemsize > 2  # whether what is there is as it was computed
    while (user := _only_user(norm.result)) is not None:
        if _is_cast(user, norm.result) and exact:
            dtype = _dtype(user)
            exact = torch.promote_types(_dtype(norm.result), dtype) == dtype
            norm = replace(norm, result=user, out=dtype, rounded=norm.rounded if norm.weight else dtype)
        elif norm.weight is None and (weight := _weight(user, norm)) is not None:
            norm, exact = replace(norm, result=user, weight=weight, out=_dtype(user)), True
        else:
            break
    return norm


def _under_root(node: fx.Node) -> fx.Node | None:
    """What the root is taken of."""
    exponent = node.args[1] if len(node.args) == 2 else None
    is_root = name_of(node) in ("rsqrt", "sqrt") or (name_of(node) == "pow" and exponent in (-0.5, 0.5))
    under = node.args[0] if is_root and node.args and not node.kwargs else None
    return under if isinstance(under, fx.Node) else None


def _scaled(node: fx.Node, root: fx.Node) -> fx.Node | None:
    """What a node multiplies with the root, or divides by it."""
    inverse = name_of(root) == "rsqrt" or (name_of(root) == "pow" and root.args[1] == -0.5)
    if not inverse:
        top, bottom = node.args if name_of(node) == "div" and len(node.args) == 2 and not node.kwargs else (None, None)
        return top if bottom is root and isinstance(top, fx.Node) and top is not root else None
    found = [each for each in _operands(node, "mul") if each is not root]
    return found[0] if len(found) == 1 else None


def _split(node: fx.Node, name: str) -> tuple[fx.Node | None, Any]:
    """The tensor and the number that a node adds or multiplies."""
    if name_of(node) != name or len(node.args) != 2 or node.kwargs:
        return None, None
    a, b = node.args
    if isinstance(a, fx.Node):
        return a, b
    return (b, a) if isinstance(b, fx.Node) else (None, None)


def _operands(node: fx.Node, name: str) -> Iterator[fx.Node]:
    """The two tensors that a node adds or multiplies; nothing of any other node."""
    if name_of(node) == name and len(node.args) == 2 and not node.kwargs and all(isinstance(each, fx.Node) for each in node.args):
        yield from node.args  # type: ignore[misc]


def _mean_of(node: fx.Node) -> fx.Node | None:
    """What a node is the mean of over the last dim, which stays with one element."""
    given = dict(zip(("input", "dim", "keepdim"), node.args, strict=False)) | dict(node.kwargs)
    x, dim = given.get("input"), given.get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, list | tuple) else []
    if name_of(node) != "mean" or not isinstance(x, fx.Node) or not given.get("keepdim") or len(dims) != 1 or given.keys() - _MEAN:
        return None
    return x if dims[0] in (-1, len(shape_given(x)) - 1) else None


_MEAN = {"input", "dim", "keepdim"}


def _squared(node: fx.Node) -> fx.Node | None:
    if (name_of(node) == "pow" and len(node.args) == 2 and node.args[1] == 2) or name_of(node) == "square":
        return node.args[0] if isinstance(node.args[0], fx.Node) and not node.kwargs else None
    found = set(_operands(node, "mul"))
    return found.pop() if len(found) == 1 else None


def _weight(node: fx.Node, norm: _Norm) -> fx.Node | None:
    """What a node multiplies the norm with, if that has one element for each of a row."""
    found = [each for each in _operands(node, "mul") if each is not norm.result and float_dtype(each) is not None]
    return found[0] if len(found) == 1 and shape_given(found[0]) == shape_given(norm.x)[-1:] and len(shape_given(norm.x)) > 1 else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_cast(node: fx.Node, of: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _CASTS and node.args[0] is of and float_dtype(node) is not None


def _is_cast_of(node: fx.Node, x: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a node is x, as it is or cast, where that in `dtype` is x cast to it."""
    exact = torch.promote_types(_dtype(x), dtype) == dtype
    return (node is x and exact) or (_is_cast(node, x) and _dtype(node) == dtype)


def _before_cast(node: fx.Node) -> fx.Node:
    """What a node is a cast of, if it is one."""
    source = node.args[0] if node.op == "call_method" and node.target in _CASTS else None
    return source if isinstance(source, fx.Node) and float_dtype(source) is not None else node


def _dtype(node: fx.Node) -> torch.dtype:
    dtype = float_dtype(node)
    assert dtype is not None, "a tensor of floating numbers"
    return dtype
