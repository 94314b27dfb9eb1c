"""Where a collective-overlap kernel was considered, and why it was taken or not."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape

from autopar.explanation.rendering import table
from autopar.plans import Communication, Plan
from autopar.units import seconds, size

_FIELD = re.compile(r"\{\d+\}")


def kernels_considered(plan: Plan) -> Iterator[RenderableType]:
    """A table with a row per collective that a product stands at the end of; nothing where there is none."""
    rows = [_row(c, plan.mesh.names) for c in plan.communications if c.kernel is not None or c.why]
    if rows:
        yield from table("Collective-overlap kernels considered", ("<tensor", "collective", ">alone", "kernel", ">saves"), rows)


def _row(c: Communication, names: tuple[str, ...]) -> tuple[str, ...]:
    num = len(c.instances)
    moved = f"{c.phase} {c.collective.kind} over {names[c.collective.axis]} ({num}×, {size(c.collective.bytes)})"
    what, saved = f"none: {c.why}", ""
    if c.kernel is not None:
        product = _FIELD.sub("*", c.kernel.node).partition("/")[0]
        again = ", run again" if c.kernel.again else ""
        pieces = "each rank's part whole" if c.kernel.num_chunks == 1 else f"each rank's part in {c.kernel.num_chunks} chunks"
        apart = f"; {c.why}" if c.why else ""
        how = "rows straight into peers' memory" if c.own else pieces
        what, saved = f"{c.kernel.name} of {product}{again}, {how}{apart}", seconds(num * c.kernel.saved_s)
    return escape(_FIELD.sub("*", c.node)), moved, seconds(num * c.time_s), escape(what), saved
