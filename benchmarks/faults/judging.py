"""The outcome of a case: correct, refused, failed or invalid.

- *correct*: it ran to its end.
- *refused*: an `AutoparError` with a remedy, before a wrong result was computed.
- *failed*: a wrong result, an `AutoparError` without a remedy, any other exception, a crash of the
  process, or a hang. `why` states which.
- *invalid*: the case itself is wrong (the plain model raises, or its own result depends on
  rounding), which is a fault of this benchmark.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import AutoparError, VerificationError
from autopar.verification.case import UndeterminedError

WRONG, RAW, HANG, CRASH, NO_REMEDY = "wrong", "raw exception", "hang", "crash", "no remedy"
CORRECT, REFUSED, FAILED, INVALID = "correct", "refused", "failed", "invalid"
MAX_MESSAGE = 3000


class WrongResult(Exception):
    """Raised if a result is wrong, or if damage was accepted."""


class InvalidCase(Exception):
    """Raised if the case fails without autopar."""


class Misbehaviour(Exception):
    """Raised for a failure of another process or a limit. `why` names it."""

    def __init__(self, why: str, message: str) -> None:
        super().__init__(message)
        self.why = why


@dataclass(slots=True)
class Notes:
    """The notes of a running case: its current phase, and entries of its row."""

    phase: str = "begin"
    entries: dict[str, Any] = field(default_factory=dict)


def judge(run: Callable[[Notes], None]) -> dict[str, Any]:
    """Run a case and return its outcome.

    Returns:
        `outcome`, `why` (of a failure), `phase`, `error`, `ok`, and the entries of its notes.
    """
    notes = Notes()
    outcome, why, error = CORRECT, "", None
    try:
        run(notes)
    except UndeterminedError as raised:
        outcome, error = INVALID, str(raised)
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
    except BaseException:  # torch.distributed.checkpoint raises one that is not an Exception
        outcome, why, error = FAILED, RAW, traceback.format_exc()
    short = None if error is None else error[-MAX_MESSAGE:]
    ok = outcome in (CORRECT, REFUSED)
    row = {"outcome": outcome, "why": why, "phase": notes.phase, "error": short, "ok": ok}
    return {**row, **notes.entries}


def refusal_of(error: str) -> str:
    """Return the text of a refusal without names and numbers, by which refusals are counted."""
    first = error.partition("\n")[0]
    return re.sub(r"'[^']*'|\"[^\"]*\"|\b[a-z_]+(\.\w+)+\b|\d+(\.\d+)?", "…", first)[:160]
