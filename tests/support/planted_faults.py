"""Planted faults, and the law that validation refuses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from planted import forget
from planted_edits import Edit
from planted_subjects import SUBJECTS

from autopar.errors import ValidationError

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """A fault in the emission of the plan of `subject` (`plant`) or in the emitted program
    (`edit`), and a regular expression that matches the resulting error.

    Attributes:
        anew: whether validation has to check ops again that it has checked before.
    """

    subject: str
    says: str
    edit: Edit = lambda program: program
    plant: Callable[[Patch], Any] = lambda patch: None
    anew: bool = False


@cache
def sound(name: str) -> None:
    """Assert that the program of a subject is valid and computes the plain model."""
    subject = SUBJECTS[name]
    program = subject.emit()
    assert subject.validate(program).num_nodes > 0
    assert subject.verify(program).ok


def refused_by_validation(fault: Fault, patch: Patch) -> None:
    """Assert that the program of the subject is valid without the fault, and that validation
    refuses it with the fault."""
    subject = SUBJECTS[fault.subject]
    sound(fault.subject)
    with patch.context() as planting:
        fault.plant(planting)
        program = fault.edit(subject.emit())
        if fault.anew:
            forget()
        with pytest.raises(ValidationError, match=fault.says):
            subject.validate(program)
    if fault.anew:
        forget()
