"""Claims of a plan about its cuts: the first layers of later stages, the values that cross, and the
memory budgets of stages.

All of them follow from the microbatch's trace, its cut, and the decisions of the stages' plans. A
value crosses in the layout in which its stage sends it, and each device sends its largest part. A
gradient returns if backward needs one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from autopar.capture.trace import Trace
from autopar.certificate.report import Finding
from autopar.emit.context import output_key
from autopar.plans import Crossed, Pipeline, Plan
from autopar.stages import Cut
from autopar.stages.placing import levels
from autopar.validation.shards import held_bytes


def cuts(part: Trace, cut: Cut, pipeline: Pipeline) -> Iterator[Finding]:
    """Yield a finding for each claim about cuts that does not hold: where later stages begin, and
    which values cross, in which layouts and bytes.

    Args:
        part: the trace of one microbatch.
        made: `part`, cut into stages.
        pipeline: the claims about cuts and crossings.
    """
    places: dict[
        int, list[str]
    ] = {}  # a deeper module may have another name for the part at a position
    for point in (point for points in levels(part) if pipeline.positions for point in points):
        places.setdefault(point.position, []).append(point.module)
    for number, (position, module) in enumerate(
        zip(pipeline.positions, pipeline.modules, strict=True), 1
    ):
        if position not in places:
            yield Finding(
                "model",
                f"stage {number} starts at forward node {position}, which is not the start of a"
                " layer or module",
            )
        elif module not in places[position]:
            yield Finding(
                "model", f"stage {number} starts with {places[position][0]!r}, not {module!r}"
            )
    for number, claimed in enumerate(pipeline.crossings):
        yield from _differences(number, claimed, _crossed_values(part, cut, pipeline, number))


def budgets(plan: Plan, pipeline: Pipeline) -> Iterator[Finding]:
    """Yield a finding for each stage that was planned with other options than the plan, or with
    more memory than its share."""
    for number, stage in enumerate(pipeline.stages):
        for name, value in stage.options.items():
            if value != plan.options.get(name):
                message = (
                    f"stage {number} is planned with {name}={value!r}, but the plan with"
                    f" {plan.options.get(name)!r}"
                )
                yield Finding("memory" if name == "memory_bytes" else "model", message)
    for number, share in enumerate(pipeline.budgets):
        if not 0 < share <= plan.budget_of(number):
            yield Finding(
                "memory",
                f"stage {number} is planned within {share} bytes, which is not a share of"
                f" {plan.budget_of(number)}",
            )
    most = int(plan.options.get("memory_bytes", 0))
    if pipeline.rank_budgets and max(pipeline.rank_budgets) != most:
        yield Finding(
            "memory",
            f"its ranks have budgets of at most {max(pipeline.rank_budgets)} bytes, but its"
            f" options state {most}",
        )


def _crossed_values(part: Trace, cut: Cut, pipeline: Pipeline, number: int) -> dict[str, Crossed]:
    """Return the values that cross from a stage to the next, by node key."""
    stage, boundary = pipeline.stages[number], cut.boundaries[number]
    chosen, crossed = stage.node_choices(), dict[str, Crossed]()
    for name, gradient in zip(boundary.values, boundary.gradients, strict=True):
        node = part.node(name)
        key, value = str(node.meta["key"]), node.meta["val"]
        layout = chosen[output_key(key)].inputs[0]
        crossed[key] = Crossed(
            key,
            layout,
            held_bytes(tuple(value.shape), value.dtype, layout, stage.mesh.shape),
            bool(gradient),
        )
    return crossed


def _differences(
    number: int, claimed: Sequence[Crossed], derived: Mapping[str, Crossed]
) -> Iterator[Finding]:
    place, counts = f"from stage {number} to the next", Counter(crossed.node for crossed in claimed)
    for key in (key for key in derived if key not in counts):
        yield Finding(
            "moves",
            f"it is sent {place} as {_shown(derived[key])}, which is missing in the plan",
            key,
        )
    for key in (key for key, times in counts.items() if times > 1):
        yield Finding("moves", f"the plan lists it twice {place}", key)
    for crossed in claimed:
        if crossed.node not in derived:
            yield Finding("moves", f"no tensor of this name is sent {place}", crossed.node)
        elif crossed != derived[crossed.node]:
            yield Finding(
                "moves",
                f"it is sent {place} as {_shown(derived[crossed.node])}, not as {_shown(crossed)}",
                crossed.node,
            )


def _shown(crossed: Crossed) -> str:
    back = "with a gradient sent back" if crossed.returns else "without a gradient sent back"
    return f"{str(crossed.layout)!r} of {crossed.bytes} bytes, {back}"
