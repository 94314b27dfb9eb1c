"""The cases of a proof: whether they cover all solutions, and the strategies that each rules out.

A condition states whether an op runs whole along a mesh axis: no operand and no result of its
strategy is split, partial or shifted there. Each solution satisfies the condition or its opposite.
So two cases that differ in one condition cover the same solutions as the case without this
condition. A proof covers all solutions if its cases are the leaves of a tree whose inner nodes
divide by a condition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.tensor import Replicate

from autopar.certificate.decisions import keys_of
from autopar.core.layout import Layout
from autopar.cost.priced import Priced
from autopar.plans import ProofCase

Conditions = Mapping[tuple[str, int], bool]
"""First node of an op and axis → whether the op runs whole."""


class UnprovenCases(Exception):
    """Raised if cases prove nothing. The argument is the reason."""


def ruled_out_by_case(
    priced: Priced, cases: Sequence[ProofCase], num_axes: int
) -> list[dict[int, tuple[int, ...]]]:
    """Return, for each case, the strategies that its conditions rule out, by op.

    Args:
        priced: the problem that the cases divide.
        cases: the cases of the proof.
        num_axes: number of mesh axes.

    Raises:
        UnprovenCases: if a condition does not refer to an op of the problem or to a mesh axis, if a
            case has two conditions on one op and axis, or if the cases do not cover all choices.
    """
    ops = {keys_of(priced, n)[0][0]: n for n in range(len(priced.problem.ops))}
    read = [_read_conditions(case, ops, num_axes) for case in cases]
    missing = _find_uncovered(read, {})
    if missing is not None:
        raise UnprovenCases(
            f"the cases of the proof do not cover choices in which {_text(missing)}"
        )
    by_case = []
    for conditions in read:
        ruled_out: dict[int, set[int]] = {}
        for (node, axis), is_whole in conditions.items():
            for s, strategy in enumerate(priced.problem.ops[ops[node]].strategies):
                layouts = strategy.layouts
                if is_whole != _is_whole((*layouts.inputs, *layouts.outputs), axis):
                    ruled_out.setdefault(ops[node], set()).add(s)
        by_case.append({n: tuple(sorted(some)) for n, some in ruled_out.items()})
    return by_case


def _read_conditions(case: ProofCase, ops: Mapping[str, int], num_axes: int) -> Conditions:
    for c in case.conditions:
        if c.node not in ops:
            raise UnprovenCases(
                f"a condition names {c.node!r}, which is not the first node of an op of the problem"
            )
        if not 0 <= c.axis < num_axes:
            raise UnprovenCases(
                f"a condition names axis {c.axis}, but the mesh has {num_axes} axes"
            )
    conditions = {(c.node, c.axis): c.is_whole for c in case.conditions}
    if len(conditions) < len(case.conditions):
        raise UnprovenCases("a case has two conditions on one op and axis")
    return conditions


def _find_uncovered(cases: Sequence[Conditions], met: Conditions) -> Conditions | None:
    """Return conditions of choices that no case covers; None if the cases are the leaves of a tree
    for the choices that meet some conditions."""
    if any(conditions.items() <= met.items() for conditions in cases):
        return None
    shared = [key for key in cases[0] if all(key in each for each in cases)] if cases else []
    dividing = next((key for key in shared if key not in met), None)
    if dividing is None:
        return met
    for is_whole in (True, False):
        part = [each for each in cases if each[dividing] == is_whole]
        missing = _find_uncovered(part, {**met, dividing: is_whole})
        if missing is not None:
            return missing
    return None


def _is_whole(layouts: Sequence[Layout], axis: int) -> bool:
    return all(isinstance(layout.placements[axis], Replicate) for layout in layouts)


def _text(conditions: Conditions) -> str:
    parts = (
        f"{node} {'is' if is_whole else 'is not'} replicated along axis {axis}"
        for (node, axis), is_whole in conditions.items()
    )
    return " and ".join(parts) or "no condition holds"
