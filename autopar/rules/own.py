"""What an op moves between ranks by itself, beside what brings its operands to the layouts that it reads.

Most ops move nothing: a rank computes with what it has. An op that does (`OWN`) has *own collectives*, which follow from its strategy alone
and run inside of it, one after another, so that nothing runs beside them. The tuple of them is the one source of their price and of what
an emitted node says that it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.collective import Collective
from autopar.layout import Strategy
from autopar.rules import dispatch
from autopar.rules.call import Call

OWN: Mapping[Callable[..., Any], Callable[[Call, Strategy, Sequence[int]], tuple[Collective, ...]]] = {
    op: dispatch.moves for op in dispatch.TOKENS
}


def own_moves(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> tuple[Collective, ...]:
    """The own collectives of a call at a strategy, in their order."""
    found = OWN.get(call.target)
    return found(call, strategy, mesh_shape) if found else ()
