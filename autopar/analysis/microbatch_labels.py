"""What a tensor in the graph of one microbatch is of its counterpart in that of the batch: its *label*, inferred op by op.

    whole     the same                          split(d)   a part along dim d
    sum       a term: the terms' sum is it       mean       a term of which the average is it
    place(d)  positions of samples within the microbatch, along dim d: good for looking up along the batch, and nothing else

An op admits a label where its rule does, and where on parts it calls exactly what stands in the graph of the microbatch: microbatches are
like ranks of a data-parallel axis that run one after another.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar import ops, random_ops
from autopar.errors import CoupledError, Where
from autopar.layout import Layout, Strategy
from autopar.rules import AxisOption, Call, axis_options, call_of, localize, operands_of, where_of
from autopar.rules.call import argument
from autopar.rules.losses import LOSSES, MEAN, NONE

aten = torch.ops.aten
_REMEDY = "pass microbatches=1 or num_microbatches=1, or no number, and stages take the whole batch"
_DRAWS = frozenset((random_ops.keep_mask, random_ops.uniform, random_ops.normal, random_ops.randint))
_MEANS = frozenset((aten.mean.dim, aten.mean.default))
_SUMS = frozenset((aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor))
_SCALED = {aten.div.Tensor: True, aten.div.Scalar: True, aten.mul.Tensor: False, aten.mul.Scalar: False}
_MOVES = frozenset(
    (
        aten.unsqueeze.default, aten.squeeze.dim, aten.view.default, aten.expand.default, aten._to_copy.default, aten.clone.default,
        aten.permute.default, aten.transpose.int,
    )
)  # fmt: skip
_VIEWS = frozenset(
    (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default)
)
_CONSTANTS = frozenset(
    (aten.zeros.default, aten.ones.default, aten.full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
)
_FILLED: Mapping[Any, int] = {aten.full.default: 1, aten.new_full.default: 2}  # operand that says with what
_LOOKUPS = frozenset((aten.index.Tensor, aten._unsafe_index.Tensor))
_WORDS: Mapping[str, str] = {
    "whole": "what no sample is part of", "split": "a part of the samples, along dim {dim}", "sum": "a sum over samples",
    "mean": "an average over samples", "place": "positions of samples in the batch",
}  # fmt: skip
Kind = Literal["whole", "split", "sum", "mean", "place"]


@dataclass(frozen=True, slots=True)
class Label:
    """What a microbatch's tensor is of the batch's (see the module's docstring)."""

    kind: Kind
    dim: int = -1

    @property
    def placement(self) -> Placement:
        """As a placement on the axis of microbatches."""
        if self.kind == "whole":
            return Replicate()
        return Shard(self.dim) if self.kind in ("split", "place") else Partial("sum")

    @property
    def is_term(self) -> bool:
        return self.kind in ("sum", "mean")


WHOLE, SUM_OF, MEAN_OF = Label("whole"), Label("sum"), Label("mean")


def part_label(shape: tuple[int, ...], part: tuple[int, ...], num: int) -> Label | None:
    """By shapes alone: what is M times shorter along one dim is a part, what is as long is the same."""
    if shape == part:
        return WHOLE
    differs = [dim for dim, (a, b) in enumerate(zip(shape, part, strict=False)) if a != b]
    cut = len(shape) == len(part) and len(differs) == 1 and shape[differs[0]] == num * part[differs[0]]
    return Label("split", differs[0]) if cut else None


def node_labels(
    node: fx.Node, here: fx.Node, labels: Mapping[tuple[str, int], Label], num: int, unknown: Mapping[str, str]
) -> tuple[Label, ...]:
    """The labels of a node's results.

    Args:
        here: its counterpart in the graph of one of `num` microbatches. labels: of what it reads, by node and result.
        unknown: node → what it follows from, so that it is known of no microbatch before that has run.

    Raises:
        CoupledError: where the op does not make the batch's result of microbatches' results.
    """
    if node.target is operator.getitem:
        return (labels[node.args[0].name, int(node.args[1])],)  # type: ignore[union-attr, arg-type]
    call, part = call_of(node), call_of(here)
    reads = [labels[operand.name, 0] for operand in operands_of(node)]
    if any(r.kind == "place" for r in reads):
        found = _by_place(call, part, reads, num)
    else:
        found = _special(call, part, reads, num) or _by_rule(call, part, reads, num)
    if found is None:
        raise refusal(node, num, *_why_not(node, reads, unknown))
    return found


def _special(call: Call, part: Call, reads: list[Label], num: int) -> tuple[Label, ...] | None:
    """Ops that make averages, or join them; and random numbers, which each microbatch draws anew."""
    alike = call.args == part.args and dict(call.kwargs) == dict(part.kwargs)
    if all(r == WHOLE for r in reads) and alike and call.outputs == part.outputs:
        return tuple(WHOLE for _ in call.outputs)
    if call.target in _CONSTANTS:
        at = _FILLED.get(call.target)
        same = (at is None or call.args[at] == part.args[at]) and dict(call.kwargs) == dict(part.kwargs)
        return _result_label(call, part, num) if same else None  # a value that follows from the number of samples is none of the batch's
    if call.target in _DRAWS and all(r == WHOLE for r in reads):
        return _result_label(call, part, num)
    if call.target is aten.repeat.default and reads == [WHOLE] and not alike:  # every copy is the same
        return _result_label(call, part, num)
    reduction = argument(call, "reduction", MEAN) if call.target in LOSSES else MEAN if call.target in _MEANS else NONE
    if reduction != NONE and alike and call.outputs == part.outputs and _is_cut_alike(call, reads):
        return (MEAN_OF,) if reduction == MEAN else (SUM_OF,)
    if call.target is aten.arange.default and call.args == (part.args[0] * num,) and dict(call.kwargs) == dict(part.kwargs):
        return (Label("place", 0),)
    if call.target in _SCALED and len(reads) == 1 and reads[0] == SUM_OF and not alike:
        a, b = call.args[1], part.args[1]
        return (MEAN_OF,) if (a == b * num if _SCALED[call.target] else b == a * num) else None
    if MEAN_OF not in reads or not alike:
        return None
    if call.target in _SUMS or call.target is aten._to_copy.default:
        return (MEAN_OF,) if {MEAN_OF, WHOLE}.issuperset(reads) else None
    if call.target is ops.dot and set(reads[:2]) == {WHOLE, MEAN_OF}:
        return (MEAN_OF,) if reads[2:] == [WHOLE] else None  # else the rule says what it is
    return None


def _by_place(call: Call, part: Call, reads: list[Label], num: int) -> tuple[Label, ...] | None:
    """Positions may be moved about, and be looked up along the dim that the batch is cut along."""
    if call.target in _MOVES:
        found = _by_rule(call, part, reads, num)
        return None if found is None else tuple(Label("place", label.dim) for label in found)
    if call.target not in _LOOKUPS or reads[0].kind != "split":
        return None
    at = {index.index: position for position, index in enumerate(call.args[1]) if index is not None}
    place = next(n for n, r in enumerate(reads) if r.kind == "place")
    from_right = len(call.inputs[place].shape) - reads[place].dim

    def goes_along(n: int) -> bool:
        r = reads[n]
        return r == WHOLE or (r.kind == "split" and len(call.inputs[n].shape) - r.dim == from_right)

    if at.get(place) != reads[0].dim or not all(goes_along(n) for n in at if n != place):
        return None
    return _result_label(call, part, num)


def _result_label(call: Call, part: Call, num: int) -> tuple[Label, ...] | None:
    label = part_label(call.outputs[0].shape, part.outputs[0].shape, num)
    return None if label is None else (label,)


def _is_cut_alike(call: Call, reads: list[Label]) -> bool:
    """Whether parts are of one dim, counted from the right as broadcasting does, and all else is whole."""
    cut = {len(info.shape) - r.dim for info, r in zip(call.inputs, reads, strict=True) if r.kind == "split"}
    return len(cut) == 1 and all(r.kind in ("split", "whole") for r in reads)


def _by_rule(call: Call, part: Call, reads: list[Label], num: int) -> tuple[Label, ...] | None:
    """By the rule of the op for one axis, where what it calls on parts is what the microbatch's graph calls."""
    terms = {r for r in reads if r.is_term}
    if len(terms) > 1:
        return None
    for option in axis_options(call):
        if list(option.inputs) == [r.placement for r in reads] and _calls(call, part, option, num):
            return tuple(_label_of(p, terms) for p in option.outputs)
    return None


def _label_of(placement: Placement, terms: set[Label]) -> Label:
    if isinstance(placement, Shard):
        return Label("split", placement.dim)
    if isinstance(placement, Partial):
        return next(iter(terms), SUM_OF)
    return WHOLE


def _calls(call: Call, part: Call, option: AxisOption, num: int) -> bool:
    if any(isinstance(p, Partial) and p.reduce_op != "sum" for p in option.outputs):
        return False
    layouts = [Layout((p,)) for p in (*option.inputs, *option.outputs)]
    infos = (*call.inputs, *call.outputs)
    if not all(layout.fits(info.shape, (num,)) for layout, info in zip(layouts, infos, strict=True)):
        return False
    local = localize(call, Strategy(tuple(layouts[: len(call.inputs)]), tuple(layouts[len(call.inputs) :])), (num,))
    if local.target is aten.reshape.default and part.target in _VIEWS:  # what was a view on the whole
        return tuple(local.args[1]) == part.outputs[0].shape
    return (
        local.target is part.target and _plain(local.args) == _plain(part.args) and _plain(dict(local.kwargs)) == _plain(dict(part.kwargs))
    )


def _plain(value: Any) -> Any:
    """Lists as tuples, so that arguments compare."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def _why_not(node: fx.Node, reads: list[Label], unknown: Mapping[str, str]) -> tuple[str, str]:
    """Why what an op makes of microbatches' operands does not make the batch's, and what to do."""
    if not reads:
        return "what it makes follows from the number of samples, of which a microbatch has fewer", _REMEDY
    kinds = {r.kind for r in reads}
    shown = " and ".join(dict.fromkeys(_WORDS[r.kind].format(dim=r.dim) for r in reads))
    if node.target in _SUMS and kinds == {"sum", "mean"}:
        remedy = f"give all terms one denominator, such as the number of samples, or {_REMEDY}"
        return f"it joins terms that weigh differently: {shown}", remedy
    if node.target in _SUMS and kinds == {"sum", "whole"}:
        remedy = f"divide the sum by the number of samples before it is joined, or {_REMEDY}"
        return f"it joins {shown}, which each microbatch would join again", remedy
    terms = [o for o, r in zip(operands_of(node), reads, strict=True) if r.is_term and o.name in unknown]
    late = f"; the batch's follows from {unknown[terms[-1].name]}, and is not known before the last of them" if terms else ""
    return f"it reads {shown}, of which a microbatch's are not enough to make the batch's{late}", _REMEDY


def refusal(node: fx.Node, num: int, why: str, remedy: str = _REMEDY) -> CoupledError:
    """That a batch cannot be worked through in `num` microbatches because of this node."""
    place = "" if node.meta.get("module") else " (in the model's own forward)"
    what = f"the batch cannot be worked through in {num} microbatches: at {node.meta['key']}{place} {why}"
    return CoupledError(what, where=_where(node), remedy=remedy)


def _where(node: fx.Node) -> Where:
    """Its own line, or that of the next node before it that has one."""
    near = node
    while not near.meta.get("source") and near.all_input_nodes:
        near = near.all_input_nodes[0]
    return replace(where_of(node), source=near.meta.get("source", ""))
