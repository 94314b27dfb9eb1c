"""The plan's proof: its multipliers, found again in the problem by the words they are stored under, and its figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.capture.trace import Trace
from autopar.certificate.bound import MemoryRow, Prices, Versions, lower_bound
from autopar.certificate.decisions import keys_of
from autopar.certificate.facts import Facts
from autopar.certificate.moments import Moments
from autopar.certificate.report import NEAR, Finding, near
from autopar.cost.priced import Priced
from autopar.plans import Plan, Potential, Proof
from autopar.problem import at_best


@dataclass
class Stored:
    """The multipliers of a plan; `findings` names those that fit nothing, which prove nothing."""

    trace: Trace
    plan: Plan
    priced: Priced
    facts: Facts
    findings: list[Finding] = field(default_factory=list)

    @property
    def num_multipliers(self) -> int:
        """How many there are."""
        proof = self.plan.proof
        versions = (each for v in proof.versions for each in (v.values_s, v.copies_s, v.once_s))
        return sum(map(len, (*(p.values_s for p in proof.potentials), *versions, proof.memory_s)))

    def bound_s(self) -> float:
        """What they prove of a plan without stages."""
        balance = self.plan.proof.balance
        if not all(0.0 <= share <= 1.0 for share in balance):
            self.findings.append(Finding("bound", f"balance {balance} is no pair of shares, and proves nothing"))
            return 0.0
        return lower_bound(at_best(self.priced.problem), self.prices(), self._rows(), balance, self.versions())

    def prices(self) -> Prices:
        """The potentials."""
        num_ops = len(self.priced.problem.ops)
        tensors, readers = self._tensors(), {keys_of(self.priced, n)[0][0]: n for n in range(num_ops)}
        return dict(filter(None, (self._found(p, tensors, readers) for p in self.plan.proof.potentials)))

    def versions(self) -> dict[int, Versions]:
        """The multipliers of versions, by variant."""
        tensors, found = self._tensors(), dict[int, Versions]()
        for version in self.plan.proof.versions:
            v, problem = tensors.get((version.node, version.result), -1), self.priced.problem
            graph = problem.values[problem.variants[v].value].graph
            index = {str(layout): i for i, layout in enumerate(graph.layouts)} if v >= 0 else {}
            worths = version.values_s, version.copies_s, version.once_s
            if set().union(*worths) <= index.keys():
                found[v] = Versions(*({index[layout]: worth for layout, worth in each.items()} for each in worths))
            else:
                self.findings.append(Finding("bound", "a multiplier is of layouts of which some are not among the problem's", version.node))
        return found

    def _tensors(self) -> dict[tuple[str, int], int]:
        return {(self.facts.names[refs[0][0]], refs[0][1]): v for v, refs in enumerate(self.priced.refs)}

    def _found(
        self, potential: Potential, tensors: dict[tuple[str, int], int], readers: dict[str, int]
    ) -> tuple[tuple[int, int, bool], dict[int, float]] | None:
        v, problem = tensors.get((potential.node, potential.result), -1), self.priced.problem
        if v >= 0:
            value = problem.values[problem.variants[v].value]
            index = {str(layout): i for i, layout in enumerate(value.graph.layouts)}
            who = readers.get(potential.reader, -1), potential.operand
            for i, use in enumerate(problem.variants[v].uses):
                if (use.op, use.operand) == who and potential.values_s.keys() <= index.keys():
                    by_layout = {index[layout]: worth for layout, worth in potential.values_s.items()}
                    return (v, i, potential.phase != value.phase), by_layout
        what = f"a multiplier is of {potential.reader} reading it in layouts of which some are not among the problem's"
        self.findings.append(Finding("bound", what, potential.node))
        return None

    def _rows(self) -> list[MemoryRow]:
        rows, worth = [], self.plan.proof.memory_s
        moments = Moments(self.trace, self.facts, self.priced, self.plan.mesh.shape) if worth else None
        for place, seconds in worth.items():
            row = moments.row(place, seconds) if moments else None
            if row is None:
                self.findings.append(Finding("bound", "no row of memory holds for every plan at this point", place))
            else:
                rows.append(row)
        return rows


def proven(proof: Proof, bound_s: float) -> Iterator[Finding]:
    """Whether certified bound ≤ what the multipliers prove ≤ objective, searched bound ≤ objective, and bound and gap follow from these."""
    slack = NEAR * abs(proof.objective_s)
    if not proof.certified_bound_s <= bound_s + slack:
        yield Finding("bound", f"the multipliers prove {bound_s:.9g} s, not {proof.certified_bound_s:.9g} s")
    if not bound_s <= proof.objective_s + slack:
        yield Finding("bound", f"the multipliers prove {bound_s:.9g} s, and the objective is only {proof.objective_s:.9g} s")
    if not proof.searched_bound_s <= proof.objective_s + slack:
        yield Finding("bound", f"the search claims {proof.searched_bound_s:.9g} s, and the objective is only {proof.objective_s:.9g} s")
    if not abs(max(proof.certified_bound_s, proof.searched_bound_s) - proof.bound_s) <= slack:
        searched = f"a search, by its word, {proof.searched_bound_s:.9g} s" if proof.searched_bound_s else "no search any"
        what = f"the multipliers are said to prove {proof.certified_bound_s:.9g} s, and {searched}"
        yield Finding("bound", f"the bound is said to be {proof.bound_s:.9g} s: {what}")
    gap = max(proof.objective_s - proof.bound_s, 0.0) / proof.objective_s if proof.objective_s else 0.0
    if not near(1 - gap, 1 - proof.gap):
        yield Finding("bound", f"objective and bound are {gap:.6%} apart, not {proof.gap:.6%}")
