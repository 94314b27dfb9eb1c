"""The time line of a plan, derived anew from the program that it is emitted into.

Where communication runs beside compute, or shares buckets, the bars of forward and backward are
those of the simulated program, and around them stand what the graphs do not run: inputs, values
from other stages, what parameters move in a step, and the optimizer. Else the bars add up to what
entries and collectives take, and how that is divided among parts of the model is not derived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.certificate.report import NEAR, Finding
from autopar.emit import simulate_program
from autopar.plans import Entry, Plan, beyond_shares_s
from autopar.program.program import StageProgram

Bar = tuple[str, str, str, float, float]  # label, phase, kind, start, seconds
_PHASES = ("forward", "backward")


def is_simulated(plan: Plan) -> bool:
    """Whether the time line of a plan is that of its simulated program."""
    beyond = bool(plan.prediction.beyond_shares_s)
    return plan.overlap.slowdown < 1.0 or bool(plan.buckets) or beyond


def bars(plan: Plan, program: StageProgram, crossing: frozenset[str]) -> Iterator[Finding]:
    """Yield every difference between the timeline of a plan and that of its program.

    Args:
        plan: the plan whose `prediction.timeline` is checked.
        program: the program, emitted under the overlap of the plan.
        crossing: keys of values that come from, or go to, other stages.
    """
    if not is_simulated(plan):
        return
    derived, said = tuple(_bars(plan, program, crossing)), plan.prediction.timeline
    if len(derived) != len(said):
        yield Finding("time", f"the timeline has {len(derived)} bars, not {len(said)}")
        return
    end_s = max((start_s + time_s for *_, start_s, time_s in derived), default=0.0)
    for bar, claimed in zip(derived, said, strict=True):
        apart = max(abs(bar[3] - claimed[3]), abs(bar[4] - claimed[4]))
        if bar[:3] != claimed[:3] or apart > NEAR * end_s:
            yield Finding("time", f"the timeline has {_shown(bar)}, not {_shown(claimed)}")
            return


def _bars(plan: Plan, program: StageProgram, crossing: frozenset[str]) -> Iterator[Bar]:
    """The time line, in order."""
    phases = dict(zip(_PHASES, simulate_program(program, plan), strict=True))
    now_s = 0.0
    for phase in (*_PHASES, "step"):
        for label, kind, time_s in _around(plan, phase, crossing):
            if time_s > 0.0:
                yield label, phase, kind, now_s, time_s
                now_s += time_s
        if phase == "step":
            return
        lanes: dict[str, list[Bar]] = {"compute": [], "communication": []}
        for key, kind, at_s, time_s in phases[phase].spans:
            _add(lanes[kind], (_layer(key), phase, kind, now_s + at_s, time_s))
        inside = sorted((*lanes["compute"], *lanes["communication"]), key=lambda bar: bar[3])
        yield from inside
        now_s = max([now_s, *(start_s + time_s for *_, start_s, time_s in inside)])
        if phases[phase].missing_s:
            yield "priced, and not run", phase, "compute", now_s, phases[phase].missing_s
            now_s += phases[phase].missing_s


def _around(plan: Plan, phase: str, crossing: frozenset[str]) -> Iterator[tuple[str, str, float]]:
    """Yield what a phase does outside of its graph, as (label, kind, seconds)."""
    if phase == "forward":
        yield "inputs", "compute", _sum(plan, "input", crossing, crosses=False)
        yield "from the stage before", "communication", _sum(plan, "input", crossing, crosses=True)
    elif phase == "backward":
        yield "from the stage behind", "communication", _sum(plan, "output", crossing, crosses=True)
    else:
        moves = [c for c in plan.communications if c.phase == "step"]
        moved_s = sum(len(c.instances) * c.time_s for c in moves) + beyond_shares_s(moves)
        saved_s = sum(bucket.saved_s for bucket in plan.buckets if bucket.phase == "step")
        yield "parameters", "communication", moved_s - saved_s
        yield "optimizer", "compute", _sum(plan, "parameter", crossing, crosses=False)


def _sum(plan: Plan, kind: str, crossing: frozenset[str], *, crosses: bool) -> float:
    """Seconds of all entries of a kind."""
    found = (e for e in plan.entries if e.kind == kind and _crosses(e, crossing) == crosses)
    return sum(len(entry.instances) * entry.time_s for entry in found)


def _crosses(entry: Entry, crossing: frozenset[str]) -> bool:
    return entry.nodes[0].node.format(*entry.instances[0]) in crossing


def _add(lane: list[Bar], bar: Bar) -> None:
    """Add a bar to a lane. It is merged with the previous bar if both belong to the same layer and
    the previous one ends where it starts."""
    last = lane[-1] if lane else None
    if last and last[:3] == bar[:3] and abs(last[3] + last[4] - bar[3]) <= NEAR * bar[3]:
        lane[-1] = (*last[:4], last[4] + bar[4])
    else:
        lane.append(bar)


def _layer(key: str) -> str:
    """The module path of a node up to its first index, else its first two parts."""
    parts: Sequence[str] = key.partition("/")[0].split(".")
    index = next((place for place, part in enumerate(parts) if part.isdigit()), 1)
    return ".".join(parts[: index + 1])


def _shown(bar: Bar) -> str:
    label, phase, kind, start_s, time_s = bar
    named = f"{kind} of {label or 'the model'} in {phase}"
    return f"{named}, {time_s:.6g} s starting at {start_s:.6g} s"
