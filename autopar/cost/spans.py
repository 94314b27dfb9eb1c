"""Lifetimes of the tensors of a trace, as positions of nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.analysis.gradients import has_own_memory, operand_written
from autopar.capture.trace import Trace

NEVER = -1
"""The position if there is none."""


@dataclass(frozen=True, slots=True)
class Span:
    """The lifetime of a tensor: positions of nodes in the trace, `NEVER` if there is no such node.

    A backward node *needs* a tensor if it reads it, or if an op that is recomputed for this node
    reads it.

    Attributes:
        producer: the node that computes it.
        last_forward: its last reader in forward; the end of the trace for a result of the model.
        earliest: the first backward node that could need it.
        latest: the last backward node that could need it.
        first_read: the first backward node that itself reads it, or a view of it.
        first_reread: the first backward node for which a recomputed op could have read it.
        first_needed: the first node that needs it if ops are recomputed as late as possible.
        until: the last node that needs it in this case.
        is_view: whether it has no memory of its own.
        takes_over: whether it is written into the memory of an operand.
        is_gradient: whether it is the gradient of a parameter.
    """

    producer: int
    last_forward: int
    earliest: int
    latest: int
    first_read: int
    first_reread: int
    first_needed: int
    until: int
    is_view: bool
    takes_over: bool
    is_gradient: bool

    @property
    def has_memory(self) -> bool:
        """Whether it has its own memory."""
        return not self.is_view and not self.takes_over

    def is_made_anew(self, now: float) -> bool:
        """Return whether the node at position `now` computes it in its own memory."""
        return self.producer == now and self.has_memory

    def waits(self, now: float, num_versions: int) -> bool:
        """Return whether all kept versions of it exist while a backward node runs, because no node
        has needed it yet.

        An op that is recomputed for this node may have read it before. Then the tensor may be
        freed, or a version of it that others do not read.

        Args:
            now: position of the node.
            num_versions: number of layouts in which the tensor may be kept.
        """
        is_read_later = self.first_read != NEVER and (num_versions == 1 or self.first_reread != now)
        return self.earliest > now or (self.earliest == now and is_read_later)


def find_spans(
    trace: Trace, recomputable: Collection[str], gradients: Collection[str]
) -> dict[str, Span]:
    """Return the lifetime of each tensor of a trace, for any plan.

    Args:
        trace: the trace.
        recomputable: names of the nodes that backward could recompute.
        gradients: names of the nodes that compute gradients of parameters.

    Returns:
        Node name → span, for all nodes except the output.
    """
    nodes = list(trace.graph.nodes)
    positions = {node.name: place for place, node in enumerate(nodes)}
    spans: dict[str, Span] = {}
    for node in reversed(nodes[:-1]):
        spans[node.name] = _span(node, positions, spans, recomputable, node.name in gradients)
    return spans


def _first(positions: Iterable[int]) -> int:
    """Return the smallest position; `NEVER` is not counted."""
    return min((position for position in positions if position != NEVER), default=NEVER)


def _span(
    node: fx.Node,
    positions: Mapping[str, int],
    spans: Mapping[str, Span],
    recomputable: Collection[str],
    is_gradient: bool,
) -> Span:
    """Return the span of a node, given the spans of all later nodes."""
    users = [user for user in node.users if user.op == "call_function"]
    own_phase = node.meta.get("phase", "forward")
    backward = [positions[user.name] for user in users if user.meta["phase"] == "backward"]
    forward = [user for user in users if user.meta["phase"] == "forward"]
    returned = [u for u in node.users if u.op == "output" and own_phase == "forward"]
    repeated = [user for user in forward if user.name in recomputable]
    repeated_spans = [spans[user.name] for user in repeated]
    asked_again = max((span.first_needed for span in repeated_spans), default=NEVER)
    viewing = [u for u in users if not has_own_memory(u) and u.meta["phase"] == own_phase]
    views = [spans[user.name] for user in viewing]
    # Positions at which recomputed ops could read it, directly or through views.
    through = [spans[user.name].earliest for user in repeated if user not in viewing]
    through += [span.first_reread for span in views]
    first, later = _first(backward), (*repeated_spans, *views)
    read_in_forward = [positions[user.name] for user in (*forward, *returned)]
    return Span(
        producer=positions[node.name],
        last_forward=max([NEVER, *read_in_forward, *(view.last_forward for view in views)]),
        earliest=_first([*backward, *(span.earliest for span in later)]),
        latest=max([NEVER, *backward, *(span.latest for span in later)]),
        first_read=_first([*backward, *(view.first_read for view in views)]),
        first_reread=_first(through),
        first_needed=first if first != NEVER else asked_again,
        # views share its memory
        until=max([asked_again, *backward, *(view.until for view in views)]),
        is_view=node.op == "call_function" and not has_own_memory(node),
        takes_over=operand_written(node) is not None,
        is_gradient=is_gradient,
    )
