"""Constraints as text for people."""

from __future__ import annotations

from autopar.constraints import Constraint, LayoutConstraint, Pipelined


def in_words(constraint: Constraint) -> str:
    """Write a constraint as in the user's call."""
    if isinstance(constraint, Pipelined) and constraint.axis == "":
        return f"num_microbatches={constraint.microbatches}"
    if not isinstance(constraint, LayoutConstraint):
        return str(constraint)
    words = constraint.to_json()
    pattern = repr(words.pop("pattern"))
    named = (f"{name}={value!r}" for name, value in words.items())
    return f"layout({', '.join((pattern, *named))})"
