"""Which constraints conflict: of those that cannot hold together, a smallest set that cannot, by a deletion filter.

Each constraint in turn is left out; where the others still cannot hold, it is not needed for the conflict and stays out (Chinneck and
Dravnieks, "Locating Minimal Infeasible Constraint Sets in Linear Programs", 1991). What is left cannot hold, and holds without any one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.constraints import Constraint, LayoutConstraint
from autopar.errors import ConstraintError

Hold = Callable[[Sequence[Constraint]], object]


def conflicting(constraints: Sequence[Constraint], hold: Hold) -> tuple[Constraint, ...]:
    """A smallest set of `constraints`, which cannot hold together, that cannot.

    Args:
        hold: raises `ConstraintError` where constraints cannot hold. It is called once per constraint.
    """
    left = list(constraints)
    for constraint in constraints:
        without = [c for c in left if c is not constraint]
        try:
            hold(without)
        except ConstraintError:
            left = without
    return tuple(left)


def with_conflict(error: ConstraintError, constraints: Sequence[Constraint], hold: Hold) -> ConstraintError:
    """The error, and which constraints conflict where more than one are needed for it."""
    found = conflicting(constraints, hold) if len(constraints) > 1 else ()
    if len(found) < 2:
        return error
    said = f"{', '.join(map(in_words, found[:-1]))} and {in_words(found[-1])}"
    return ConstraintError(f"{error.what}; {said} conflict: of these, all but any one can hold", where=error.where, remedy=error.remedy)


def in_words(constraint: Constraint) -> str:
    """As the user writes it."""
    if not isinstance(constraint, LayoutConstraint):
        return str(constraint)
    words = constraint.to_json()
    return f"layout({', '.join([repr(words.pop('pattern')), *(f'{name}={value!r}' for name, value in words.items())])})"
