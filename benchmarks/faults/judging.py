"""What became of a case: correct, refused or failed.

- *correct*: it ran to its end.
- *refused*: an `AutoparError` with a remedy, before anything wrong was computed.
- *failed*: a wrong result, an `AutoparError` without a remedy, any other exception, a crash of the
  process, or a hang. `why` says which.
- *invalid*: the case itself does not hold (the plain model raises): a fault of this benchmark.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import AutoparError, VerificationError

WRONG, RAW, HANG, CRASH, NO_REMEDY = "wrong", "raw exception", "hang", "crash", "no remedy"
CORRECT, REFUSED, FAILED, INVALID = "correct", "refused", "failed", "invalid"
MAX_MESSAGE = 3000


class WrongResult(Exception):
    """A result differs from what it has to be, or what is damaged was accepted."""


class InvalidCase(Exception):
    """The case does not hold without autopar."""


class Misbehaviour(Exception):
    """A failure that is neither a wrong result nor raised here; `why` names it."""

    def __init__(self, why: str, message: str) -> None:
        super().__init__(message)
        self.why = why


@dataclass(slots=True)
class Notes:
    """What a case says of itself while it runs: the present phase, and entries of its row."""

    phase: str = "begin"
    entries: dict[str, Any] = field(default_factory=dict)


def judge(run: Callable[[Notes], None]) -> dict[str, Any]:
    """Run a case and tell what became of it.

    Returns:
        `outcome`, `why` (of a failure), `phase`, `error`, `ok`, and the entries of its notes.
    """
    notes = Notes()
    outcome, why, error = CORRECT, "", None
    try:
        run(notes)
    except (WrongResult, VerificationError) as raised:
        outcome, why, error = FAILED, WRONG, str(raised)
    except InvalidCase as raised:
        outcome, error = INVALID, str(raised)
    except Misbehaviour as raised:
        outcome, why, error = FAILED, raised.why, str(raised)
    except AutoparError as raised:
        outcome, error = REFUSED, f"{type(raised).__name__}: {raised}"
        if not raised.remedy:
            outcome, why = FAILED, NO_REMEDY
    except BaseException:  # torch.distributed.checkpoint raises one that is no Exception
        outcome, why, error = FAILED, RAW, traceback.format_exc()
    short = None if error is None else error[-MAX_MESSAGE:]
    ok = outcome in (CORRECT, REFUSED)
    row = {"outcome": outcome, "why": why, "phase": notes.phase, "error": short, "ok": ok}
    return {**row, **notes.entries}


def refusal_of(error: str) -> str:
    """A refusal without names and numbers, by which refusals are counted."""
    first = error.partition("\n")[0]
    return re.sub(r"'[^']*'|\"[^\"]*\"|\b[a-z_]+(\.\w+)+\b|\d+(\.\d+)?", "…", first)[:160]
