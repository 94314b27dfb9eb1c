"""From when to when a tensor of a trace is live, as positions of nodes."""

from __future__ import annotations

from dataclasses import dataclass

NEVER = -1
"""No position."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a tensor is live: positions of nodes in the trace, `NEVER` where there is none.

    Attributes:
        made: what makes it. last_forward: its last reader in forward; that of a result of the model is the end.
        earliest: the first in backward that could ask for it; an op that runs again, because its own result is asked for, asks
            for its operands. latest: the last that could. read: the first in backward that itself reads it, or a view of it.
        again: the first in backward for which what runs again could have read it.
        asked: the first that asks for it if ops run again as late as they can. until: the last that does.
        is_view: it has no memory of its own. takes_over: it is written into what it reads. is_gradient: of a parameter.
    """

    made: int
    last_forward: int
    earliest: int
    latest: int
    read: int
    again: int
    asked: int
    until: int
    is_view: bool
    takes_over: bool
    is_gradient: bool

    @property
    def has_memory(self) -> bool:
        """Of its own."""
        return not self.is_view and not self.takes_over

    def is_made_anew(self, now: float) -> bool:
        """Whether the node that runs makes it, beside what it reads."""
        return self.made == now and self.has_memory

    def waits(self, now: float, num_versions: int) -> bool:
        """Whether all that is kept of it is there while this node of backward runs, since nothing has asked for it yet. What only asks so
        that it can run again for this node has done so: it may be gone, or a version of it that others do not read."""
        left = self.read != NEVER and (num_versions == 1 or self.again != now)
        return self.earliest > now or (self.earliest == now and left)
