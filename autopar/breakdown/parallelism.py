"""How a mesh axis splits the work of a module, and layouts in words.

How a mesh axis splits a part follows from its main op's layouts on that axis: the first row of
the table that holds.

experts     experts only: their weights are split by experts, dim 0
tensor      the weight is sharded as the op reads it; without a weight, a dim from 2 on of the
            result (features), or of the first operand; dim 1 if activations have two dims
heads       attention only: dim 1 of ``[batch, heads, sequence, features]`` is sharded
data        dim 0 of the activation, the batch, is sharded
space       convolution only: a dim from 2 on of ``[batch, channels, space…]`` is sharded
sequence    dim 1 (in attention dim 2) is sharded; of a matmul's activation any dim but the first
replicated  every device on the axis does the same

Plans do not contain the number of dims of a tensor; `has_two_dims` derives it from the layouts of
matmuls.

Weights that are sharded in their storage layout only are described separately, per axis:

ZeRO-3      the weight is stored sharded and gathered for use; the gathered copy is freed after
            each use, and gathered again if backward reads it
ZeRO-2      the weight is stored sharded; the gathered copy is kept from forward to backward
ZeRO-1      as ZeRO-2, for a whole step of several microbatches, whose gradients are accumulated
            as partial sums

A weight that is stored as it is read is none of these: its gradient and optimizer state are
sharded as the weight is. "on the hosts" is added if a weight of the part is stored there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch.distributed.tensor import Partial, Shard

from autopar.core.layout import Layout, Strategy

PARALLELISMS = ("data", "sequence", "space", "heads", "experts", "tensor", "replicated")

# Main ops by rank: op → (operand that is the activation, operand that is the weight).
ROLES = {
    "dot": (0, 1),
    "convolution": (0, 1),
    "attention": (0, None),
    "flex_attention": (0, None),
    "embedding": (1, 0),
    "experts": (0, 3),
}


def has_two_dims(matmuls: Iterable[Strategy]) -> bool:
    """Return whether the layouts of matmuls show that activations are ``[batch, features]``.

    A matmul with a sharded weight reads an activation whose last dim is sharded, or returns one.

    Args:
        matmuls: the layouts of the operands and results of the matmuls in forward.
    """
    last = set[int | None]()
    for matmul in matmuls:
        for axis in range(len(matmul.outputs[0].placements)):
            if _dim(matmul.inputs[1], axis) is not None:
                read = _dim(matmul.inputs[0], axis)
                last.add(_dim(matmul.outputs[0], axis) if read is None else read)
    return last - {None} == {1}


def parallelism_of(op: str, strategy: Strategy, axis: int, *, two_dims: bool = False) -> str:
    """Return how a mesh axis splits the work of a part: one of `PARALLELISMS`.

    Args:
        op: name of the part's main op.
        strategy: the layouts of the op's operands and results.
        axis: index of the mesh axis.
        two_dims: the result of `has_two_dims` for the plan.
    """
    activation, weight = ROLES.get(op, (None, None))
    if weight is not None and (of_weight := _dim(strategy.inputs[weight], axis)) is not None:
        return "experts" if op == "experts" and of_weight == 0 else "tensor"
    if activation is not None:
        return _split_by_activation(op, _dim(strategy.inputs[activation], axis))
    for layout in (*strategy.outputs[:1], *strategy.inputs[:1]):
        dim = _dim(layout, axis)
        if dim is not None:
            return {0: "data", 1: "tensor" if two_dims else "sequence"}.get(dim, "tensor")
    return "replicated"


def _split_by_activation(op: str, dim: int | None) -> str:
    """Return the parallelism of an op whose activation is sharded on `dim`; None for no dim."""
    if op in ("attention", "flex_attention"):
        return {None: "replicated", 0: "data", 1: "heads", 2: "sequence"}.get(dim, "tensor")
    if op == "convolution" and dim is not None and dim >= 2:
        return "space"
    return {None: "replicated", 0: "data"}.get(dim, "sequence")


def _dim(layout: Layout, axis: int) -> int | None:
    placement = layout.placements[axis]
    return placement.dim if isinstance(placement, Shard) else None


def over(words: Sequence[str], names: Sequence[str], known: Iterable[str]) -> str:
    """Return which word applies to which axes, as text: ``data over node, tensor over gpu``.

    Args:
        words: one per axis.
        names: the name of each axis.
        known: the words to list, in order.
    """
    by_word = {
        word: [name for name, w in zip(names, words, strict=True) if w == word] for word in known
    }
    return ", ".join(f"{word} over {' and '.join(axes)}" for word, axes in by_word.items() if axes)


_DIMS: Mapping[str, tuple[str, ...]] = {
    "weight": ("rows", "columns"),
    "activation": ("batch", "sequence", "features"),
    "matrix": ("batch", "features"),
    "image": ("batch", "channels", "space 0", "space 1", "space 2"),
}


def in_words(layout: Layout, names: Sequence[str], role: str) -> str:
    """Return a layout as text: ``rows over gpu, then node``. Of axes that split the same dim, the
    outermost comes first.

    Args:
        layout: layout of the tensor.
        names: the name of each axis.
        role: ``weight``, ``activation``, ``matrix`` (an activation with two dims) or ``image``,
            which determines the names of dims.
    """
    text = ", ".join(_words(layout, names, _DIMS[role])) or "whole"
    return f"{text}, on the hosts" if layout.host else text


def _words(layout: Layout, names: Sequence[str], dims: Sequence[str]) -> Iterator[str]:
    for dim in sorted({p.dim for p in layout.placements if isinstance(p, Shard)}):
        called = dims[dim] if dim < len(dims) else f"dim {dim}"
        halo = layout.halo(dim)
        around = (
            f" with a halo of {halo.before} and {halo.after}"
            if halo
            else ", mirrored"
            if layout.is_mirrored(dim)
            else ""
        )
        yield (
            f"{called} over {', then '.join(names[axis] for axis in layout.splitters(dim))}{around}"
        )
    sums = [names[axis] for axis, p in enumerate(layout.placements) if isinstance(p, Partial)]
    if sums:
        yield f"partial over {' and '.join(sums)}"
