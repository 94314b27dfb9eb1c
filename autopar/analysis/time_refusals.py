"""Refusals of batches that cannot be worked through in microbatches: which node, why, and what to
do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar.analysis.time_calls import ADDITIONS
from autopar.analysis.time_labels import Label
from autopar.errors import CoupledError, Where
from autopar.rules import operands_of, where_of

REMEDY = "pass microbatches=1 or num_microbatches=1, or no number, and stages take the whole batch"


def refusal(node: fx.Node, num: int, why: str, remedy: str = REMEDY) -> CoupledError:
    """That a batch cannot be worked through in `num` microbatches because of this node."""
    key = node.meta.get("key", node.name)
    place = "" if node.meta.get("module") else " (in the model's own forward)"
    what = f"the batch cannot be worked through in {num} microbatches: at {key}{place} {why}"
    return CoupledError(what, where=_where(node), remedy=remedy)


def why_not(node: fx.Node, reads: Sequence[Label], unknown: Mapping[str, str]) -> tuple[str, str]:
    """Why no label follows from the labels of what a node reads, and what to do.

    Args:
        unknown: nodes that are not known before the first microbatch runs, and what they follow
            from.
    """
    if not reads:
        why = "what it makes follows from the number of samples, of which a microbatch has fewer"
        return why, REMEDY
    shown = " and ".join(dict.fromkeys(map(str, reads)))
    if node.target in ADDITIONS and all(read.as_term is not None for read in reads):
        remedy = f"give all terms one denominator, such as the number of samples, or {REMEDY}"
        return f"it joins terms that weigh differently: {shown}", remedy
    operands = zip(operands_of(node), reads, strict=True)
    late = [unknown[o.name] for o, r in operands if r.kind == "term" and o.name in unknown]
    why = f"it reads {shown}, of which a microbatch's are not enough to make the batch's"
    if late:
        why += f"; the batch's follows from {late[-1]}, and is not known before the last of them"
    return why, REMEDY


def _where(node: fx.Node) -> Where:
    """Its own line, or that of the next node before it that has one."""
    near = node
    while not near.meta.get("source") and near.all_input_nodes:
        near = near.all_input_nodes[0]
    return replace(where_of(node), source=near.meta.get("source", ""))
