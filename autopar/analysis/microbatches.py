"""Whether a batch may be worked through in microbatches, and how they make the batch's outputs and
gradients.

A model may be run on parts of its batch one after another where each output is a concatenation, a
copy, a sum or an average of what microbatches make, and each gradient is a sum. That is inferred
from the joint graph, on an axis in time (`autopar.analysis.time_axis`). With w = 1 of a loss that
is a sum, 1/M of an average, loss = Σ w·loss_m, and the tangent of microbatch m is w times that of
the loss. Without a loss, the tangents of the batch's outputs are cut, or shared, as the outputs are
put together.

Where the rules cannot see that samples do not depend on each other (tokens sorted by expert), the
user may promise it: then shapes say what is a part, and every op where that was needed is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.analysis.counting import Counting, Given, counting
from autopar.analysis.single_samples import Counterparts
from autopar.analysis.time_axis import label_joint_graph
from autopar.analysis.time_labels import WHOLE, Label
from autopar.analysis.time_sites import Edge
from autopar.analysis.weighed_parts import raise_operands, take_given
from autopar.capture.trace import Trace


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How a batch is worked through.

    Attributes:
        num: how many microbatches. inputs: path of each input that is cut → the dim it is cut along.
        outputs: path → its label, of all that can be put together; the loss among them, if there
            is one.
        promised: keys of the ops at which only the user's promise says that samples are
            independent.
        given: what each microbatch is given of the batch.
        raised: by which power of `num` operands of nodes of a microbatch's graph are raised.
        counting: how what is given is computed, once `ready` has made the graph of one that takes
            it.
    """

    num: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, Label]
    promised: tuple[str, ...] = ()
    given: tuple[Given, ...] = ()
    raised: Mapping[Edge, int] = field(default_factory=dict)
    counting: tuple[Counting, ...] = ()


def microbatching(
    whole: Trace, part: Trace, num: int, *, independent: bool = False
) -> Microbatching:
    """How `num` microbatches make a batch, from the traces of the whole and of one.

    Args:
        independent: the user promises that samples do not depend on each other.

    Raises:
        CoupledError: where the model couples samples (batch normalization, contrastive losses),
        naming the op.
    """
    if num == 1:
        return Microbatching(1, {}, {o.path: WHOLE for o in whole.outputs})
    found = label_joint_graph(whole, part, num, independent=independent)
    here = {n.meta["key"]: n.name for n in part.graph.nodes if n.op == "call_function"}
    there = {n.name: n.meta["key"] for n in whole.graph.nodes if n.op == "call_function"}
    names = {name: here[key] for name, key in there.items() if key in here} | {"output": "output"}
    given = tuple(
        Given(names[name], f"{there[name]} of the batch", "sum" if label.as_term == 0 else "mean")
        for name, label in found.given.items()
    )
    return Microbatching(
        num,
        {path: label.dim for path, label in found.inputs.items()},
        found.outputs,
        found.promised,
        given,
        {(names[name], index): power for (name, index), power in found.raised.items()},
    )


def ready(part: Trace, how: Microbatching) -> tuple[Trace, Microbatching]:
    """The trace of one microbatch that takes what it is given of the batch, and how that is
    computed.
    """
    raised = raise_operands(part, how.raised, how.num)
    if not how.given:
        return raised, how
    return take_given(raised, how.given), replace(how, counting=counting(raised, how.given))


def for_single_samples(
    like: Microbatching, made_from: Trace, part: Trace, num: int
) -> Microbatching:
    """How `num` microbatches of one sample make a batch.

    A graph of one sample lacks ops that do nothing to it, and cannot be compared with that of the
    batch. Labels do not depend on how many samples there are, so they are those of two microbatches
    of two samples; only the nodes have to be found anew.

    Args:
        like: of batches of two samples, whose trace is `made_from`. part: the trace of one sample.

    Raises:
        ConstraintError: where the graph of one sample has no such nodes.
    """
    to = Counterparts(made_from, part)
    given = tuple(replace(g, node=to.node(g.node)) for g in like.given)
    return replace(like, num=num, given=given, raised=to.edges(like.raised))
