"""Communication beside compute: the orders in which a program may run (`autopar.emit.early`), tried before one of them is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.emit.early import PhaseWork, Schedule
from autopar.emit.rooms import Room
from autopar.emit.times import node_times
from autopar.plans import Overlap, Plan
from autopar.run.program import Action, Program
from autopar.run.reordered import written

_ROOM = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)  # times what early steps hold


def overlapped(program: Program, plan: Plan) -> tuple[Program, Overlap]:
    """The program with its communication beside its compute, as far as `plan.overlap` says, and what early steps hold in it at most; with
    that little room alone they may come in another order."""
    found, held = Orders(program, plan).within(plan.overlap)
    return written(found), held


def least_overlap(program: Program, plan: Plan) -> Overlap:
    """As `Orders.least`, of the overlap that the plan says."""
    return Orders(program, plan).least(plan.overlap)


@dataclass
class Orders:
    """The orders in which a program may run, of which `plan` says what its nodes take; its graphs stay as they are.

    Args:
        program: in no other order yet.
    """

    program: Program
    plan: Plan
    _phases: dict[str, PhaseWork] = field(default_factory=dict)

    def within(self, overlap: Overlap) -> tuple[Program, Overlap]:
        """The program in the order that an overlap gives (`Program.orders`), and what early steps hold in it at most."""
        orders: dict[str, list[Action]] = {}
        held = dict.fromkeys(("forward", "backward"), 0)
        for phase, schedule in self._schedules(overlap).items():
            order = schedule.run()
            held[phase] = schedule.most_held
            if schedule.most_held:  # else nothing is started, and the order stays as it was
                orders[phase] = order
        return replace(self.program, orders=orders), _allowing(overlap, held)

    def least(self, overlap: Overlap) -> Overlap:
        """The overlap that gives the same program with few bytes allowed: what early steps hold at most, or where with so little room they
        would come in another order, some multiple of that."""
        held = dict.fromkeys(("forward", "backward"), 0)
        for phase, schedule in self._schedules(overlap).items():
            order, most, limit = schedule.run(), schedule.most_held, schedule.room.most_bytes
            less = (int(most * factor) for factor in _ROOM)
            held[phase] = next((n for n in less if most and n < limit and schedule.within(n).run() == order), limit if most else 0)
        return _allowing(overlap, held)

    def _schedules(self, overlap: Overlap) -> dict[str, Schedule]:
        """By phase, where early steps are allowed to hold something."""
        limits = {
            "forward": Room(overlap.forward_bytes, overlap.forward_room),
            "backward": Room(overlap.backward_bytes, overlap.backward_room),
        }
        allowed = {phase: room for phase, room in limits.items() if overlap.slowdown < 1.0 and room.most_bytes > 0}
        return {phase: Schedule(self._phase(phase, overlap.slowdown), room) for phase, room in allowed.items()}

    def _phase(self, phase: str, slowdown: float) -> PhaseWork:
        if phase not in self._phases or self._phases[phase].slowdown != slowdown:
            graph = getattr(self.program, phase).graph
            self._phases[phase] = PhaseWork.of(graph, node_times(graph, self.plan), self.program.mesh.shape, slowdown)
        return self._phases[phase]


def _allowing(overlap: Overlap, held: Mapping[str, int]) -> Overlap:
    if overlap.slowdown >= 1.0:
        return overlap
    room = {"forward": overlap.forward_room, "backward": overlap.backward_room}
    room = {phase: pieces if any(size < held[phase] for _, size in pieces) else () for phase, pieces in room.items()}
    return Overlap(overlap.slowdown, held["forward"], held["backward"], room["forward"], room["backward"])
