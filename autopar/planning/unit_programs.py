"""What units take at least, more closely than op by op (`autopar.planning.parted`): each is searched as a program of its own.

Rows of tensors that only one unit has stay rows; those of all others stay priced by the same multipliers, whatever these are. So the least
of a unit's program, plus what is priced beside it, is at least what its ops take one by one, and still no more than the unit's part of any
plan: with rows of fewer tensors priced there is less that a choice could gain (Geoffrion, Lagrangean relaxation, 1974: the bound lies
between that of the relaxation and that of the integer program). Priced stay tensors that may cross, and all that have kernels on offer,
whose rows (12) to (18) nothing here has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.planning.instances import Instance
from autopar.planning.over_cuts import Parts
from autopar.planning.parted import Parting
from autopar.problem import Op, Use, Value, Variant
from autopar.solve.part import Part, least_of
from autopar.strategies import Ref

_RELAXATIONS = 150  # per unit
_MOST = 450  # in all; units that are no more like each other than this allows are left as they are
_MORE = 1.3  # times the rise that is wanted: small units and what is at borders do not rise
_LEAST = 1e-3  # share of all units: what takes less, all that are alike together, is left as it is


@dataclass
class UnitPrograms:
    """The programs of units of one parting, whose parts are known."""

    parting: Parting
    parts: Parts
    time_limit_s: float
    _members: list[list[Instance]] = field(init=False)
    _inside: set[Ref] = field(init=False)

    def __post_init__(self) -> None:
        self._members = [[] for _ in self.parts.units]
        for instance in self.parting.instances.found:
            self._members[instance.unit].append(instance)
        self._inside = self._only_in_one()

    def raised(self, factor: float) -> Parts:
        """Units that take together as many times what they did, as far as that can be shown."""
        factor = 1.0 + _MORE * (factor - 1.0)
        alike: dict[object, list[int]] = {}
        for unit, members in enumerate(self._members):
            alike.setdefault(self._kind(members), []).append(unit)
        units, left = list(self.parts.units), _MOST
        heavy = sorted(alike.values(), key=lambda same: (-len(same) * units[same[0]], same[0]))
        for same in heavy:
            known_s = units[same[0]]
            if left <= 0 or len(same) * known_s < _LEAST * sum(self.parts.units):
                break
            part, beside_s = self._part(self._members[same[0]])
            least_s, num = least_of(part, known_s * factor - beside_s, min(_RELAXATIONS, left), self.time_limit_s)
            left -= num
            for unit in same:
                units[unit] = max(known_s, least_s + beside_s)
        return replace(self.parts, units=tuple(units))

    def _only_in_one(self) -> set[Ref]:
        """The tensors that only one unit makes and reads, and that the whole prices as any stage does."""
        parting, instances = self.parting, self.parting.instances
        with_kernels = {v for v, _ in parting.kernels}
        several = {ref for i in instances.found if i.alone for ref in (*i.results, *(ref for _, ref in i.operands))}
        several |= instances.hidden | instances.everywhere
        found = set[Ref]()
        for instance in instances.found:
            if any(name in parting.exposed for name, _ in instance.results):
                continue  # backward of a stage that ends here may not run it again
            for ref in instance.results:
                v = instances.variant.get(ref)
                if v is None or v in with_kernels or ref in several or parting.worths.narrower(v, False):
                    continue
                if all(read.unit == instance.unit for read in instances.reads.get(ref, ())):
                    found.add(ref)
        return found

    def _kind(self, members: Sequence[Instance]) -> object:
        """What decides a unit's program."""
        place = {ref: (n, r) for n, i in enumerate(members) for r, ref in enumerate(i.results) if ref in self._inside}
        return tuple(
            (self.parting.kind(i), i.alone, tuple(place.get(ref) for _, ref in i.operands), tuple(ref in place for ref in i.results))
            for i in members
        )

    def _part(self, members: Sequence[Instance]) -> tuple[Part, float]:
        """A unit's program, and what is priced beside it."""
        parting, problem = self.parting, self.parting.problem
        mine = [i for i in members if not i.alone]
        beside_s = sum(parting.least(i) for i in members if i.alone)
        beside_s += sum(parting.worths.of(ref).loss_s for i in members for ref in i.results if self._is_priced(ref))
        ops: list[Op] = []
        further = []
        uses: dict[Ref, list[Use]] = {}
        for n, instance in enumerate(mine):
            op = problem.ops[instance.op]
            times = np.array([s.time_s for s in op.strategies])
            first, again = parting.reduced(instance, parting.supplied(instance), self._inside)
            ops.append(replace(op, count=1))
            further.append((first - times, again - times))
            for operand, ref in instance.operands:
                if ref in self._inside:
                    use = problem.variants[parting.instances.variant[ref]].uses[parting.instances.use(instance.op, operand, ref)]
                    uses.setdefault(ref, []).append(replace(use, op=n))
        values: list[Value] = []
        variants: list[Variant] = []
        for n, instance in enumerate(mine):
            for ref in instance.results:
                if ref in uses:
                    worth = parting.worths.of(ref)
                    versions = frozenset(np.flatnonzero(worth.versions).tolist())
                    values.append(replace(parting.worths.value(ref), op=n, away_s=(), keepable=versions))
                    variants.append(Variant(len(values) - 1, 1, tuple(sorted(uses[ref], key=lambda use: (use.op, use.operand)))))
        own = replace(
            problem, ops=tuple(ops), values=tuple(values), variants=tuple(variants), moments=(), kernels={}, routes={}, regions=()
        )
        return Part(own, frozenset(n for n, i in enumerate(mine) if i.again), tuple(further)), beside_s

    def _is_priced(self, ref: Ref) -> bool:
        return ref in self.parting.instances.variant and ref not in self._inside
