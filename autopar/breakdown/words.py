"""The words for layouts and for the parallelism that they amount to.

How a mesh axis works on a part follows from its main op's layouts on that axis, by the first of these that holds:

    experts      experts only: their weights are split by experts, dim 0
    tensor       the weight is sharded as the op reads it; without a weight, a dim from 2 on of the result is
                 (features), or of the first operand
    heads        attention only: the heads are sharded (dim 1 of ``[batch, heads, sequence, features]``)
    data         dim 0 of the activation, which is the batch, is sharded
    space        convolution only: a dim from 2 on of ``[batch, channels, space…]`` is
    sequence     dim 1 (2 in attention) is; of a matmul's activation any dim but the first
    replicated   every device on the axis does the same

Sharding a weight in its storage layout only is said beside it, per axis:

    ZeRO-3       the weight rests sharded and is gathered for use; a gathered copy is not kept for backward
    ZeRO-2       the same, and the gathered copy is kept from forward to backward
    ZeRO-1       as ZeRO-2, through a step of several microbatches, whose gradients add up as partial sums

A weight that rests as it is read is neither: its gradient and optimizer state are as sharded as the weight. "on the hosts" stands where
some weight of the part rests there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from torch.distributed.tensor import Partial, Shard

from autopar.layout import Layout, Strategy

PARALLELISMS = ("data", "sequence", "space", "heads", "experts", "tensor", "replicated")

# Main ops by rank: op → (operand that is the activation, operand that is the weight).
ROLES = {"dot": (0, 1), "convolution": (0, 1), "attention": (0, None), "flex_attention": (0, None), "embedding": (1, 0), "experts": (0, 3)}


class Parallel(Protocol):
    """What has a parallelism per mesh axis, and weights that are gathered or not."""

    @property
    def parallelism(self) -> tuple[str, ...]: ...

    @property
    def sharded(self) -> tuple[str, ...]: ...

    @property
    def offloaded(self) -> bool: ...


def parallelism_of(op: str, strategy: Strategy, axis: int) -> str:
    """How mesh axis `axis` works on a part whose main op is `op`: one of `PARALLELISMS`."""
    activation, weight = ROLES.get(op, (None, None))
    if weight is not None and (of_weight := _dim(strategy.inputs[weight], axis)) is not None:
        return "experts" if op == "experts" and of_weight == 0 else "tensor"
    if activation is not None:
        dim = _dim(strategy.inputs[activation], axis)
        if op in ("attention", "flex_attention"):
            return {None: "replicated", 0: "data", 1: "heads", 2: "sequence"}.get(dim, "tensor")
        if op == "convolution" and dim is not None and dim >= 2:
            return "space"
        return "replicated" if dim is None else "data" if dim == 0 else "sequence"
    for layout in (*strategy.outputs[:1], *strategy.inputs[:1]):
        dim = _dim(layout, axis)
        if dim is not None:
            return {0: "data", 1: "sequence"}.get(dim, "tensor")
    return "replicated"


def _dim(layout: Layout, axis: int) -> int | None:
    placement = layout.placements[axis]
    return placement.dim if isinstance(placement, Shard) else None


def label(part: Parallel, names: Sequence[str]) -> str:
    """The parallelism in words: ``data over node, sequence over gpu; weights ZeRO-3 over node and gpu, on the hosts``."""
    said = over(part.parallelism, names, PARALLELISMS)
    if set(part.parallelism) == {"replicated"}:
        said = "replicated"
    sharded = over(part.sharded, names, ("ZeRO-1", "ZeRO-2", "ZeRO-3"))
    rest = ", ".join(filter(None, (sharded, "on the hosts" if part.offloaded else "")))
    return f"{said}; weights {rest}" if rest else said


def over(words: Sequence[str], names: Sequence[str], known: Iterable[str]) -> str:
    """Which word holds over which axes, ``data over node, tensor over gpu``."""
    by_word = {word: [name for name, w in zip(names, words, strict=True) if w == word] for word in known}
    return ", ".join(f"{word} over {' and '.join(axes)}" for word, axes in by_word.items() if axes)


_DIMS: Mapping[str, tuple[str, ...]] = {
    "weight": ("rows", "columns"),
    "activation": ("batch", "sequence", "features"),
    "image": ("batch", "channels", "space 0", "space 1", "space 2"),
}


def in_words(layout: Layout, names: Sequence[str], role: str) -> str:
    """A layout in words: ``rows over gpu, then node``; splitters of one dim come outermost first.

    Args:
        role: ``weight``, ``activation`` or ``image``, which say what the dims are called.
    """
    said = ", ".join(_words(layout, names, _DIMS[role])) or "whole"
    return f"{said}, on the hosts" if layout.host else said


def _words(layout: Layout, names: Sequence[str], dims: Sequence[str]) -> Iterator[str]:
    for dim in sorted({p.dim for p in layout.placements if isinstance(p, Shard)}):
        called = dims[dim] if dim < len(dims) else f"dim {dim}"
        halo = layout.halo(dim)
        around = f" with a halo of {halo.before} and {halo.after}" if halo else ", mirrored" if layout.is_mirrored(dim) else ""
        yield f"{called} over {', then '.join(names[axis] for axis in layout.splitters(dim))}{around}"
    sums = [names[axis] for axis, p in enumerate(layout.placements) if isinstance(p, Partial)]
    if sums:
        yield f"partial over {' and '.join(sums)}"
