"""A fault that is planted, and the law that validation refuses it."""

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
    """A fault in what emits the plan of `subject` (`plant`), or in the program that it emits
    (`edit`), and what is said of it, a regular expression.

    Attributes:
        anew: whether validation has to try the ops again that it has tried before.
    """

    subject: str
    says: str
    edit: Edit = lambda program: program
    plant: Callable[[Patch], Any] = lambda patch: None
    anew: bool = False


@cache
def sound(name: str) -> None:
    """A subject's program as it is emitted is validated, and computes the plain model."""
    subject = SUBJECTS[name]
    program = subject.emit()
    assert subject.validate(program).num_nodes > 0
    assert subject.verify(program).ok


def refused_by_validation(fault: Fault, patch: Patch) -> None:
    """Without the fault the subject's program is sound; with it, validation refuses the program."""
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
