"""What a kernel of a plan norms: that the sum and the norm follow its product, lie in whole rows as its part does, and round as it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autopar import ops
from autopar.certificate.facts import Claims, Facts
from autopar.layout import Layout, Strategy
from autopar.rules import Call, call_of

_WIDE = {torch.float64: torch.float64}  # all else is normed in float32


@dataclass(frozen=True, slots=True)
class NormWalk:
    """The sum after one product, `total`, its squares and its norm."""

    facts: Facts
    claims: Claims
    product: str
    nodes: tuple[fx.Node, ...]

    @staticmethod
    def of(facts: Facts, claims: Claims, product: str) -> NormWalk | None:
        """Of the product that a node makes, with the first weighted norm of its sum in forward; None where there is none."""
        readers = facts.tensors[product, 0].readers
        total = facts.nodes.get(readers[0].key) if len(readers) == 1 else None
        if total is None or total.target is not torch.ops.aten.add.Tensor:
            return None
        for reader in facts.tensors[total.meta["key"], 0].readers:
            norm = facts.nodes.get(reader.key)  # outputs are none
            if norm is None or norm.target is not ops.rms_norm or norm.args[0] is not total or norm.meta["phase"] != "forward":
                continue
            if isinstance(norm.args[2], fx.Node) and norm.args[2] < total:  # else it may not be there when the sum is made
                return NormWalk(facts, claims, product, (total, norm.args[1], norm))  # type: ignore[arg-type]
        return None

    @property
    def chosen(self) -> list[Strategy | None]:
        """How each of them runs."""
        return [self.claims.chosen.get(node.meta["key"]) for node in self.nodes]

    def wrong(self, layout: Layout) -> Iterator[str]:
        """What keeps a kernel from doing them, where a part lies in a layout."""
        if len(self.facts.nodes[self.product].args) > 3:
            yield "its product has a bias"
        if not self._is_plain_sum():
            yield "it is added to what is not like it"
        if not self._is_plain_norm():
            yield "the norm is computed or rounded in another way"
        yield from self._check_layouts(layout)

    def _is_plain_sum(self) -> bool:
        """Whether the product is added to another tensor of its shape and dtype, and nothing else is done."""
        total, made = self.nodes[0], self.facts.nodes[self.product].meta["val"]
        if total.kwargs or len(total.args) != 2 or total.args[0] is total.args[1]:
            return False
        return all(isinstance(x, fx.Node) and (x.meta["val"].shape, x.meta["val"].dtype) == (made.shape, made.dtype) for x in total.args)

    def _is_plain_norm(self) -> bool:
        """Whether the norm is of all of the sum's last dim, computed in the wide dtype, with a weight and a result in the product's."""
        total, squares, norm = self.nodes
        made = self.facts.nodes[self.product].meta["val"]
        dtype, wide = made.dtype, _WIDE.get(made.dtype, torch.float32)
        _, _, weight, n, _, in_dtype, rounded, _ = norm.args
        has_weight = isinstance(weight, fx.Node) and weight.meta["val"].dtype == dtype
        is_of_total = squares.target is ops.square_sum and squares.args == (total, wide)
        is_in_dtypes = in_dtype == wide and rounded in (dtype, wide) and norm.meta["val"].dtype == dtype
        return has_weight and is_of_total and is_in_dtypes and n == made.shape[-1]

    def _check_layouts(self, layout: Layout) -> Iterator[str]:
        summing, squaring, norming = self.chosen
        if summing is None or {*summing.inputs, *summing.outputs} != {layout}:
            yield "the sum does not lie as what is scattered"
        if squaring is None or norming is None or squaring.inputs != (layout,):
            yield "the squares are taken of something that lies otherwise"
        elif norming.inputs[:2] != (layout, squaring.outputs[0]) or norming.outputs != (layout,) or squaring.outputs[0].has_partial:
            yield "the norm is not of rows as they lie"
        elif not norming.inputs[2].is_replicated:
            yield "the norm has a part of its weight"

    def calls(self) -> tuple[tuple[Call, Strategy], ...]:
        """What the kernel does as well."""
        return tuple((call_of(node), how) for node, how in zip(self.nodes, self.chosen, strict=True) if how is not None)
